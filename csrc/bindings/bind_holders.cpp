#include <nanobind/nanobind.h>

#include <cstring>
#include <vector>

#include "columns.hpp"
#include "kvtier/key_numbers.hpp"
#include "sequences.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using holders::KeyNumbers;
using holders::Keys;
using holders::Moved;
using holders::Number;

// Joined keys, read in place, or the keys of a sequence, which are joined.
class JoinedKeys {
   public:
    explicit JoinedKeys(nb::handle keys) : keys_(nb::borrow(keys)) {
        if (PyBytes_Check(keys.ptr())) return;
        const nb::object sequence = fast_sequence(keys, "must be a sequence of keys, or bytes");
        const Items items(sequence.ptr());
        const auto count = static_cast<std::size_t>(count_items(sequence.ptr()));
        keys_ = new_bytes(count * holders::key_bytes);
        char* to = bytes_memory(keys_.ptr());
        for (std::size_t at = 0; at < count; ++at, to += holders::key_bytes) {
            if (!PyBytes_Check(items[at]) || bytes_length(items[at]) != holders::key_bytes) {
                throw nb::value_error("a key must have 32 bytes");
            }
            std::memcpy(to, bytes_memory(items[at]), holders::key_bytes);
        }
    }

    Keys get() const {
        return Keys({reinterpret_cast<const std::uint8_t*>(bytes_memory(keys_.ptr())),
                     static_cast<std::size_t>(bytes_length(keys_.ptr()))});
    }

   private:
    nb::object keys_;
};

nb::list as_list(const std::vector<Moved>& moves) {
    nb::list list;
    for (const Moved& moved : moves) list.append(nb::make_tuple(moved.before, moved.after, moved.keys));
    return list;
}

nb::list numbers(const KeyNumbers& table, nb::handle keys) {
    const JoinedKeys joined(keys);
    std::vector<Number> found(joined.get().size());
    table.find(joined.get(), found);
    nb::list list;
    for (const Number number : found) list.append(number);
    return list;
}

nb::list runs(const KeyNumbers& table, nb::handle keys) {
    nb::list list;
    for (const holders::Run& run : table.runs(JoinedKeys(keys).get())) {
        list.append(nb::make_tuple(run.start, run.number));
    }
    return list;
}

nb::tuple change(KeyNumbers& table, nb::handle keys, nb::handle after, std::size_t max_keys) {
    const JoinedKeys joined(keys);
    std::size_t dropped = 0;
    const std::vector<Moved> moves = table.change(
        joined.get(), [after](Number before) { return nb::cast<Number>(after(before)); }, max_keys, dropped);
    return nb::make_tuple(as_list(moves), dropped);
}

nb::list sweep(KeyNumbers& table, std::size_t row, nb::handle targets) {
    return as_list(table.sweep(row, Column<Number>(targets).span()));
}

}  // namespace

void bind_holders(nb::module_& module) {
    nb::class_<KeyNumbers>(module, "KeyNumbers")
        .def(nb::init<>())
        .def("__len__", &KeyNumbers::size)
        .def_prop_ro("rows", [](const KeyNumbers&) { return std::size_t{KeyNumbers::rows}; })
        .def("numbers", &numbers, nb::arg("keys"))
        .def("runs", &runs, nb::arg("keys"))
        .def("change", &change, nb::arg("keys"), nb::arg("after"), nb::arg("max_keys"))
        .def("sweep", &sweep, nb::arg("row"), nb::arg("targets"));
}

}  // namespace kvtier::bindings
