#include <nanobind/nanobind.h>

#include <vector>

#include "kvtier/lru_ring.hpp"
#include "subjects.hpp"
#include "token_ids.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using eviction::LruRing;

// A writable array of C ints, locked while this lives.
class Places {
   public:
    explicit Places(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_CONTIG) != 0) throw nb::python_error();
        if (buffer_.itemsize != sizeof(LruRing::Place)) {
            PyBuffer_Release(&buffer_);
            throw nb::type_error("places must be 32-bit integers");
        }
    }
    ~Places() { PyBuffer_Release(&buffer_); }
    Places(const Places&) = delete;
    Places& operator=(const Places&) = delete;

    std::span<LruRing::Place> span() const {
        return {static_cast<LruRing::Place*>(buffer_.buf), static_cast<std::size_t>(buffer_.len / buffer_.itemsize)};
    }

   private:
    Py_buffer buffer_{};
};

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
