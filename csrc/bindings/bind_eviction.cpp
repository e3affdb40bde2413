#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "columns.hpp"
#include "kvtier/key_rows.hpp"
#include "kvtier/lru_ring.hpp"
#include "kvtier/rings.hpp"
#include "kvtier/slices.hpp"
#include "kvtier/visits.hpp"
#include "subjects.hpp"
#include "token_ids.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using eviction::LruRing;
using eviction::Number;
using eviction::VisitRings;

using Places = Column<LruRing::Place>;

// Rows are 32-bit words, like token ids.
template <auto method, typename... Parent>
void change(nb::handle warmer, nb::handle colder, nb::handle rows, Parent... parent) {
    const TokenIds ids(rows.ptr());
    const Places above(warmer), below(colder);
    (LruRing(above.span(), below.span()).*method)(ids.all(), parent...);
}

void rings_use(nb::handle warmer, nb::handle colder, nb::handle ring_of, nb::handle counts, nb::handle rows,
               std::size_t ring) {
    const TokenIds ids(rows.ptr());
    const Column<Number> above(warmer), below(colder);
    const Column<std::uint8_t> rings(ring_of);
    const Column<std::int64_t> sizes(counts);
    eviction::Rings(above.span(), below.span(), rings.span(), sizes.span()).use(ids.all(), ring);
}

std::vector<std::vector<Number>> visits_runs(nb::handle of_row, nb::handle parents, nb::handle rows) {
    const TokenIds ids(rows.ptr());
    const Column<Number> visits(of_row), above(parents);
    return eviction::runs(visits.span(), above.span(), ids.all());
}

std::vector<Number> visits_take(nb::handle of_row, nb::handle counts, Number visit, nb::handle rows) {
    const TokenIds ids(rows.ptr());
    const Column<Number> visits(of_row), sizes(counts);
    return eviction::take(visits.span(), sizes.span(), visit, ids.all());
}

std::vector<std::int64_t> visits_move_on(nb::handle newer, nb::handle older, nb::handle rings, nb::handle sizes,
                                         nb::handle since, std::size_t ring, std::size_t at, nb::handle starts,
                                         double now, std::int64_t most) {
    const Column<Number> above(newer), below(older), ring_of(rings), counts(sizes);
    const Column<double> times(since), ages(starts);
    VisitRings visits(above.span(), below.span(), ring_of.span(), counts.span(), times.span());
    return visits.move_on(ring, at, ages.span(), now, most);
}

std::vector<std::uint32_t> sampled_rows(nb::handle column, nb::handle rows, std::uint32_t threshold) {
    const TokenIds ids(rows.ptr());
    const Column<std::uint8_t> keys(column);
    std::vector<std::uint32_t> sampled;
    for (const std::uint32_t row : ids.all()) {
        const catalog::Key key = catalog::key_at(keys.span(), row);
        if ((std::uint32_t{key[1]} << 8 | key[2]) < threshold) sampled.push_back(row);
    }
    return sampled;
}

// The numbers of the slices, and their offsets.
std::pair<std::vector<Number>, std::vector<std::uint64_t>> share_slices(nb::handle places, nb::handle handles,
                                                                        nb::handle offsets, nb::handle rows) {
    const TokenIds ids(rows.ptr());
    const Column<Number> of_row(places), counts(handles);
    const Column<std::uint64_t> starts(offsets);
    if (starts.span().size() != counts.span().size()) throw nb::value_error("the columns must have the same length");
    std::vector<Number> numbers = memory::share(of_row.span(), counts.span(), ids.all());
    std::vector<std::uint64_t> found;
    found.reserve(numbers.size());
    for (const Number number : numbers) found.push_back(starts.span()[static_cast<std::size_t>(number)]);
    return {std::move(numbers), std::move(found)};
}

std::vector<Number> release_slices(nb::handle handles, nb::handle numbers) {
    const TokenIds ids(numbers.ptr());
    const Column<Number> counts(handles);
    return memory::release(counts.span(), ids.all());
}

}  // namespace

void bind_eviction(nb::module_& module) {
    module.def("lru_touch", &change<&LruRing::touch>, nb::arg("warmer"), nb::arg("colder"), nb::arg("rows"));
    module.def("lru_link_chain", &change<&LruRing::link_chain, std::int64_t>, nb::arg("warmer"), nb::arg("colder"),
               nb::arg("rows"), nb::arg("parent"));
    module.def("lru_unlink", &change<&LruRing::unlink>, nb::arg("warmer"), nb::arg("colder"), nb::arg("rows"));
    module.def("rings_use", &rings_use, nb::arg("warmer"), nb::arg("colder"), nb::arg("ring_of"), nb::arg("counts"),
               nb::arg("rows"), nb::arg("ring"));
    module.def("visits_runs", &visits_runs, nb::arg("of_row"), nb::arg("parents"), nb::arg("rows"));
    module.def("visits_take", &visits_take, nb::arg("of_row"), nb::arg("counts"), nb::arg("visit"), nb::arg("rows"));
    module.def("visits_move_on", &visits_move_on, nb::arg("newer"), nb::arg("older"), nb::arg("rings"),
               nb::arg("sizes"), nb::arg("since"), nb::arg("ring"), nb::arg("at"), nb::arg("starts"), nb::arg("now"),
               nb::arg("most"));
    module.def("share_slices", &share_slices, nb::arg("places"), nb::arg("handles"), nb::arg("offsets"),
               nb::arg("rows"));
    module.def("release_slices", &release_slices, nb::arg("handles"), nb::arg("numbers"));
    module.def("sampled_rows", &sampled_rows, nb::arg("keys"), nb::arg("rows"), nb::arg("threshold"));
}

}  // namespace kvtier::bindings
