#include <nanobind/nanobind.h>

#include "columns.hpp"
#include "kvtier/lru_ring.hpp"
#include "subjects.hpp"
#include "token_ids.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using eviction::LruRing;

using Places = Column<LruRing::Place>;

// Rows are 32-bit words, like token ids.
template <typename Change>
void change(nb::handle warmer, nb::handle colder, nb::handle rows, Change apply) {
    const TokenIds ids(rows.ptr());
    const Places above(warmer), below(colder);
    LruRing ring(above.span(), below.span());
    apply(ring, ids.all());
}

void touch(nb::handle warmer, nb::handle colder, nb::handle rows) {
    change(warmer, colder, rows, [](LruRing& ring, LruRing::Rows all) { ring.touch(all); });
}

void link_chain(nb::handle warmer, nb::handle colder, nb::handle rows, std::int64_t parent) {
    change(warmer, colder, rows, [parent](LruRing& ring, LruRing::Rows all) { ring.link_chain(all, parent); });
}

void unlink(nb::handle warmer, nb::handle colder, nb::handle rows) {
    change(warmer, colder, rows, [](LruRing& ring, LruRing::Rows all) { ring.unlink(all); });
}

}  // namespace

void bind_eviction(nb::module_& module) {
    module.def("lru_touch", &touch, nb::arg("warmer"), nb::arg("colder"), nb::arg("rows"));
    module.def("lru_link_chain", &link_chain, nb::arg("warmer"), nb::arg("colder"), nb::arg("rows"),
               nb::arg("parent"));
    module.def("lru_unlink", &unlink, nb::arg("warmer"), nb::arg("colder"), nb::arg("rows"));
}

}  // namespace kvtier::bindings
