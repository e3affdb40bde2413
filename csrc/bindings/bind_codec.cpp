#include <nanobind/nanobind.h>

#include "kvtier/lossless.hpp"
#include "pages.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using ReadOnlyBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const codec::Kernels& fastest() {
    static const codec::Kernels& found = *codec::kernels().front();
    return found;
}

std::size_t encode(const ReadOnlyBytes& source, const Bytes& target) {
    const nb::gil_scoped_release released;
    return codec::encode({source.data(), source.nbytes()}, {target.data(), target.nbytes()}, fastest());
}

void decode(const ReadOnlyBytes& source, const Bytes& target) {
    const nb::gil_scoped_release released;
    codec::decode({source.data(), source.nbytes()}, {target.data(), target.nbytes()}, fastest());
}

}  // namespace

void bind_codec(nb::module_& module) {
    module.def("lossless_bound", &codec::max_encoded, nb::arg("length"));
    module.def("lossless_encode", &encode, nb::arg("source"), nb::arg("target"));
    module.def("lossless_decode", &decode, nb::arg("source"), nb::arg("target"));
}

}  // namespace kvtier::bindings
