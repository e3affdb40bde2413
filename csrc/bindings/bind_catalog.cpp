#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "columns.hpp"
#include "kvtier/chunk_table.hpp"
#include "sequences.hpp"
#include "subjects.hpp"
#include "token_ids.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using catalog::Count;
using catalog::Key;
using catalog::Row;

Key key_of(PyObject* object) {
    if (!PyBytes_Check(object) || bytes_length(object) != catalog::key_bytes) return nullptr;
    return reinterpret_cast<Key>(bytes_memory(object));
}

// The keys of a sequence. What is not a key is nullptr. The sequence must not change while they are in use.
class Keys {
   public:
    explicit Keys(nb::handle keys) : sequence_(fast_sequence(keys)) {
        const Items items(sequence_.ptr());
        const auto count = static_cast<std::size_t>(count_items(sequence_.ptr()));
        keys_.reserve(count);
        for (std::size_t at = 0; at < count; ++at) keys_.push_back(key_of(items[at]));
    }
    std::span<const Key> span() const { return keys_; }
    nb::object at(std::size_t index) const {
        return nb::borrow(Items(sequence_.ptr())[index]);
    }

   private:
    nb::object sequence_;
    std::vector<Key> keys_;
};

std::vector<std::uint64_t> lengths_of(nb::handle lengths) {
    const nb::object sequence = fast_sequence(lengths);
    const Items items(sequence.ptr());
    const auto count = static_cast<std::size_t>(count_items(sequence.ptr()));
    std::vector<std::uint64_t> values;
    values.reserve(count);
    for (std::size_t at = 0; at < count; ++at) {
        const unsigned long long value = PyLong_AsUnsignedLongLong(items[at]);
        if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw nb::python_error();
        values.push_back(value);
    }
    return values;
}

nb::list as_list(std::span<const Row> rows) {
    return list_of(rows.size(), [rows](std::size_t at) { return PyLong_FromLong(rows[at]); });
}

// `count` keys, of which `key` returns each.
template <typename KeyOf>
nb::list key_list(std::size_t count, KeyOf key) {
    return list_of(count, [key](std::size_t at) {
        return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(key(at)), catalog::key_bytes);
    });
}

nb::list keys_at(nb::handle column, nb::handle rows) {
    const TokenIds ids(rows.ptr());
    const Column<std::uint8_t> keys(column);
    return key_list(ids.all().size(), [&](std::size_t at) { return catalog::key_at(keys.span(), ids.all()[at]); });
}

nb::list split_keys(nb::handle joined) {
    const Buffer buffer(joined, PyBUF_SIMPLE);
    if (buffer.length() % catalog::key_bytes != 0) throw nb::value_error("not a whole number of keys");
    const Key first = reinterpret_cast<Key>(buffer.memory());
    return key_list(buffer.length() / catalog::key_bytes,
                    [first](std::size_t at) { return first + at * catalog::key_bytes; });
}

catalog::IsRow as_question(nb::handle callable) {
    if (callable.is_none()) return {};
    return [callable](Row row) {
        const nb::object number = nb::steal(PyLong_FromLong(row));
        if (!number.is_valid()) throw nb::python_error();
        const nb::object answer = nb::steal(PyObject_CallFunctionObjArgs(callable.ptr(), number.ptr(), nullptr));
        const int yes = answer.is_valid() ? PyObject_IsTrue(answer.ptr()) : -1;
        if (yes < 0) throw nb::python_error();
        return yes != 0;
    };
}

// The rows of an LruPolicy, coldest first. An iterator for Python, and an order that needs no Python.
class LruOrder {
   public:
    explicit LruOrder(nb::handle warmer) : warmer_(nb::borrow(warmer)) {}

    nb::handle warmer() const { return warmer_; }

    // Return the next row, or no_row at the end. Throws `std::out_of_range` if the link is not a place.
    Row next(std::span<const Row> warmer) {
        if (ended_) return catalog::no_row;
        if (place_ < 0 || static_cast<std::size_t>(place_) >= warmer.size()) {
            throw std::out_of_range("corrupt ring: a link is out of range");
        }
        place_ = warmer[static_cast<std::size_t>(place_)];
        ended_ = place_ == 0;
        return place_ - 1;
    }

    Row next_for_python() {
        const Row row = next(Column<Row>(warmer_).span());
        if (row == catalog::no_row) throw nb::stop_iteration();
        return row;
    }

   private:
    nb::object warmer_;
    Row place_ = 0;
    bool ended_ = false;
};

// Row numbers from an iterator.
Row next_of(nb::handle iterator) {
    const nb::object item = nb::steal(PyIter_Next(iterator.ptr()));
    if (!item.is_valid()) {
        if (PyErr_Occurred()) throw nb::python_error();
        return catalog::no_row;
    }
    const long row = PyLong_AsLong(item.ptr());
    if (row == -1 && PyErr_Occurred()) throw nb::python_error();
    if (row < 0 || row > std::numeric_limits<Row>::max()) {
        throw std::out_of_range("the eviction policy has offered a row beyond the columns");
    }
    return static_cast<Row>(row);
}

class ChunkTable {
   public:
    ChunkTable(nb::object keys, nb::object parents, nb::object ready, nb::object pending, nb::object spaces,
               nb::object generations, nb::object shared_lengths, std::vector<nb::object> lengths,
               std::vector<nb::object> children)
        : keys_(std::move(keys)),
          parents_(std::move(parents)),
          ready_(std::move(ready)),
          pending_(std::move(pending)),
          spaces_(std::move(spaces)),
          generations_(std::move(generations)),
          shared_lengths_(std::move(shared_lengths)),
          lengths_(std::move(lengths)),
          children_(std::move(children)) {
        if (lengths_.empty() || lengths_.size() > 8 || lengths_.size() != children_.size()) {
            throw nb::value_error("1 to 8 tiers, with lengths and children of each");
        }
    }

    std::int64_t parents_only() const { return table_.parents_only; }
    void set_parents_only(std::int64_t count) { table_.parents_only = count; }

    Row find(nb::handle key) const {
        return table_.index().find(key_of(key.ptr()), Column<std::uint8_t>(keys_).span());
    }

    nb::list find_all(nb::handle sequence) const { return as_list(rows_of(Keys(sequence))); }

    nb::tuple prefix(nb::handle sequence, std::uint8_t among) const {
        const Keys keys(sequence);
        std::vector<Row> rows;
        rows.reserve(keys.span().size());
        const Locked locked(*this);
        table_.prefix(keys.span(), among, locked.columns, rows);
        const nb::bytes tiers = new_bytes(rows.size());
        char* tier = bytes_memory(tiers.ptr());
        for (const Row row : rows) {
            *tier++ = static_cast<char>(__builtin_ctz(locked.columns.ready[static_cast<std::size_t>(row)] & among));
        }
        return nb::make_tuple(as_list(rows), tiers);
    }

    nb::list absent(nb::handle sequence, std::size_t tier) const {
        const std::uint8_t bit = bit_of(tier);
        std::vector<Row> rows = rows_of(Keys(sequence));
        const Column<std::uint8_t> ready(ready_);
        std::size_t count = 0;
        for (std::size_t at = 0; at < rows.size(); ++at) {
            const auto row = static_cast<std::size_t>(rows[at]);
            if (rows[at] == catalog::no_row || row >= ready.span().size() || (ready.span()[row] & bit) == 0) {
                rows[count++] = static_cast<Row>(at);
            }
        }
        return as_list(std::span(rows).first(count));
    }

    void fill(nb::handle sequence, nb::handle rows, nb::handle lengths, Row parent, std::uint32_t space,
              std::uint32_t generation) {
        const TokenIds ids(rows.ptr());
        const std::vector<std::uint64_t> sizes = lengths_of(lengths);
        const Keys keys(sequence);
        const Locked locked(*this);
        const Column<std::uint64_t> shared(shared_lengths_);
        const Column<std::uint32_t> spaces(spaces_), generations(generations_);
        table_.fill(keys.span(), ids.all(), sizes, parent, locked.columns,
                    {shared.span(), spaces.span(), generations.span(), space, generation});
    }

    std::uint64_t enter(nb::handle rows, std::size_t tier, bool ready) {
        const std::uint8_t bit = bit_of(tier);
        const TokenIds ids(rows.ptr());
        const Locked locked(*this);
        const Column<std::uint64_t> shared(shared_lengths_), own(lengths_[tier]);
        const Column<Count> children(children_[tier]);
        const bool has_own = own.span().data() != shared.span().data();
        return table_.enter(ids.all(), bit, ready ? locked.columns.ready : locked.columns.pending, locked.columns,
                            shared.span(), has_own ? own.span() : std::span<std::uint64_t>(), children.span());
    }

    nb::tuple leave(nb::handle sequence, std::size_t tier) {
        const std::uint8_t bit = bit_of(tier);
        const Keys keys(sequence);
        const std::vector<Row> rows = rows_of(keys);
        const Locked locked(*this);
        const Column<std::uint64_t> lengths(lengths_[tier]);
        std::size_t failed = 0;
        const std::optional<std::uint64_t> bytes = table_.leave(rows, bit, locked.columns, lengths.span(), failed);
        if (!bytes) {
            PyErr_SetObject(PyExc_KeyError, keys.at(failed).ptr());
            throw nb::python_error();
        }
        return nb::make_tuple(as_list(rows), *bytes);
    }

    nb::list release(nb::handle rows, std::size_t tier) {
        bit_of(tier);
        const TokenIds ids(rows.ptr());
        const Locked locked(*this);
        const Children children(children_);
        return as_list(table_.release(ids.all(), tier, locked.columns, children.spans));
    }

    nb::list free_parents(nb::handle rows) {
        const TokenIds ids(rows.ptr());
        const Locked locked(*this);
        const Children children(children_);
        std::vector<Row> freed;
        table_.free_parents(ids.all(), locked.columns, children.spans, freed);
        return as_list(freed);
    }

   private:
    // The columns, locked while this lives.
    struct Locked {
        explicit Locked(const ChunkTable& table)
            : keys(table.keys_), parents(table.parents_), ready(table.ready_), pending(table.pending_) {}
        Column<std::uint8_t> keys;
        Column<Row> parents;
        Column<std::uint8_t> ready, pending;
        const catalog::Columns columns{keys.span(), parents.span(), ready.span(), pending.span()};
    };

    // The children of all tiers, locked while this lives.
    struct Children {
        explicit Children(const std::vector<nb::object>& children) {
            for (const nb::object& of_tier : children) {
                columns.push_back(std::make_unique<Column<Count>>(of_tier));
                spans.push_back(columns.back()->span());
            }
        }
        std::vector<std::unique_ptr<Column<Count>>> columns;
        std::vector<std::span<Count>> spans;
    };

    std::vector<Row> rows_of(const Keys& keys) const {
        std::vector<Row> rows(keys.span().size());
        table_.index().find_all(keys.span(), rows, Column<std::uint8_t>(keys_).span());
        return rows;
    }

    std::uint8_t bit_of(std::size_t tier) const {
        if (tier >= lengths_.size()) throw nb::index_error("no such tier");
        return static_cast<std::uint8_t>(1u << tier);
    }

    nb::object keys_, parents_, ready_, pending_, spaces_, generations_, shared_lengths_;
    std::vector<nb::object> lengths_, children_;
    catalog::ChunkTable table_;
};

// `order`: an iterator. See select_victims in kvtier/catalog/selection.py; a negative limit is none.
nb::list select_victims(nb::handle order, nb::handle parents, nb::handle lengths, nb::handle children, nb::handle ready,
                        std::uint8_t mask, nb::handle is_pinned, nb::handle is_leased, std::int64_t needed_bytes,
                        std::int64_t limit, std::int64_t deferred, bool whole) {
    // Python code may run meanwhile, but cannot resize a column.
    const Column<Row> above(parents);
    const Column<std::uint64_t> sizes(lengths);
    const Column<Count> counts(children);
    const Column<std::uint8_t> masks(ready);
    const catalog::Tier tier{above.span(), sizes.span(), counts.span(), masks.span(), mask};
    const catalog::Wanted wanted{needed_bytes, limit, deferred, whole};
    const catalog::IsRow pinned = as_question(is_pinned), leased = as_question(is_leased);
    if (nb::isinstance<LruOrder>(order)) {
        LruOrder& lru = nb::cast<LruOrder&>(order);
        const Column<Row> warmer(lru.warmer());
        return as_list(catalog::select([&] { return lru.next(warmer.span()); }, tier, pinned, leased, wanted));
    }
    return as_list(catalog::select([&] { return next_of(order); }, tier, pinned, leased, wanted));
}

}  // namespace

void bind_catalog(nb::module_& module) {
    nb::class_<LruOrder>(module, "LruOrder")
        .def(nb::init<nb::handle>(), nb::arg("warmer"))
        .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
        .def("__next__", &LruOrder::next_for_python);
    nb::class_<ChunkTable>(module, "ChunkTable")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                      std::vector<nb::object>, std::vector<nb::object>>(),
             nb::arg("keys"), nb::arg("parents"), nb::arg("ready"), nb::arg("pending"), nb::arg("spaces"),
             nb::arg("generations"), nb::arg("shared_lengths"), nb::arg("lengths"), nb::arg("children"))
        .def_prop_rw("parents_only", &ChunkTable::parents_only, &ChunkTable::set_parents_only)
        .def("find", &ChunkTable::find, nb::arg("key"))
        .def("find_all", &ChunkTable::find_all, nb::arg("keys"))
        .def("prefix", &ChunkTable::prefix, nb::arg("keys"), nb::arg("among"))
        .def("absent", &ChunkTable::absent, nb::arg("keys"), nb::arg("tier"))
        .def("fill", &ChunkTable::fill, nb::arg("keys"), nb::arg("rows"), nb::arg("lengths"), nb::arg("parent"),
             nb::arg("space"), nb::arg("generation"))
        .def("enter", &ChunkTable::enter, nb::arg("rows"), nb::arg("tier"), nb::arg("ready"))
        .def("leave", &ChunkTable::leave, nb::arg("keys"), nb::arg("tier"))
        .def("release", &ChunkTable::release, nb::arg("rows"), nb::arg("tier"))
        .def("free_parents", &ChunkTable::free_parents, nb::arg("rows"));
    module.def("keys_at", &keys_at, nb::arg("column"), nb::arg("rows"));
    module.def("split_keys", &split_keys, nb::arg("joined"));
    module.def("select_victims", &select_victims, nb::arg("order"), nb::arg("parents"), nb::arg("lengths"),
               nb::arg("children"), nb::arg("ready"), nb::arg("mask"), nb::arg("is_pinned").none(),
               nb::arg("is_leased").none(), nb::arg("needed_bytes"), nb::arg("limit"), nb::arg("deferred"),
               nb::arg("whole"));
}

}  // namespace kvtier::bindings
