#include <nanobind/nanobind.h>

#include "kvtier/lossless.hpp"
#include "kvtier/lossy.hpp"
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

const codec::TileKernels& fastest_tiles() {
    static const codec::TileKernels& found = *codec::tile_kernels().front();
    return found;
}

std::size_t lossy_bound(const nb::bytes& table, std::size_t length) {
    return codec::lossy_bound({static_cast<const std::uint8_t*>(table.data()), table.size()}, length);
}

std::size_t lossy_encode(std::uint32_t form, const nb::bytes& table, const ReadOnlyBytes& source, const Bytes& target) {
    const std::span described{static_cast<const std::uint8_t*>(table.data()), table.size()};
    const nb::gil_scoped_release released;
    return codec::lossy_encode(codec::Form{form}, described, {source.data(), source.nbytes()},
                               {target.data(), target.nbytes()}, fastest_tiles());
}

void lossy_decode(const ReadOnlyBytes& source, const Bytes& target) {
    const nb::gil_scoped_release released;
    codec::lossy_decode({source.data(), source.nbytes()}, {target.data(), target.nbytes()}, fastest_tiles());
}

}  // namespace

void bind_codec(nb::module_& module) {
    module.def("lossless_bound", &codec::max_encoded, nb::arg("length"));
    module.def("lossless_encode", &encode, nb::arg("source"), nb::arg("target"));
    module.def("lossless_decode", &decode, nb::arg("source"), nb::arg("target"));
    module.def("lossy_bound", &lossy_bound, nb::arg("table"), nb::arg("length"));
    module.def("lossy_encode", &lossy_encode, nb::arg("form"), nb::arg("table"), nb::arg("source"), nb::arg("target"));
    module.def("lossy_decode", &lossy_decode, nb::arg("source"), nb::arg("target"));
}

}  // namespace kvtier::bindings
