#include <nanobind/nanobind.h>

#include "columns.hpp"
#include "kvtier/simulation.hpp"
#include "subjects.hpp"
#include "token_ids.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using simulation::Number;

nb::tuple number_chunks(nb::handle ids, nb::handle ends, std::uint64_t max_vacant, nb::handle numbered) {
    const Column<std::uint64_t> given(ids), stops(ends);
    const Column<Number> into(numbered);
    simulation::Numbered result{};
    {
        const nb::gil_scoped_release released;
        result = simulation::number_chunks(given.span(), stops.span(), max_vacant, into.span());
    }
    return nb::make_tuple(result.kept, result.numbers, result.unique);
}

void next_uses(nb::handle chunks, nb::handle ends, nb::handle order, std::uint64_t numbers, nb::handle uses) {
    const TokenIds turns(order.ptr());
    const Column<Number> all(chunks), into(uses);
    const Column<std::uint64_t> stops(ends);
    const nb::gil_scoped_release released;
    simulation::next_uses({stops.span(), turns.all()}, all.span(), numbers, into.span());
}

std::uint64_t belady_hits(nb::handle uses, nb::handle ends, nb::handle order, std::uint64_t capacity,
                          std::size_t interval, nb::handle advance) {
    const TokenIds turns(order.ptr());
    const Column<Number> all(uses);
    const Column<std::uint64_t> stops(ends);
    return simulation::belady_hits({stops.span(), turns.all()}, all.span(), capacity, interval,
                                   [&] { advance(interval); });
}

}  // namespace

void bind_simulation(nb::module_& module) {
    module.def("number_chunks", &number_chunks, nb::arg("ids"), nb::arg("ends"), nb::arg("max_vacant"),
               nb::arg("numbered"));
    module.def("next_uses", &next_uses, nb::arg("chunks"), nb::arg("ends"), nb::arg("order"), nb::arg("numbers"),
               nb::arg("uses"));
    module.def("belady_hits", &belady_hits, nb::arg("uses"), nb::arg("ends"), nb::arg("order"), nb::arg("capacity"),
               nb::arg("interval"), nb::arg("advance").none());
}

}  // namespace kvtier::bindings
