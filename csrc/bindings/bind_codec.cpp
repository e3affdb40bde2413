#include <nanobind/nanobind.h>

#include "kvtier/lossless.hpp"
#include "kvtier/lossy.hpp"
#include "pages.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

template <typename Array>
auto all(const Array& array) {
    return std::span(array.data(), array.nbytes());
}

std::size_t encode(const ReadOnlyBytes& source, const Bytes& target, bool dense) {
    return dense ? codec::encode_dense(all(source), all(target)) : codec::encode(all(source), all(target));
}

void decode(const ReadOnlyBytes& source, const Bytes& target) {
    codec::decode(all(source), all(target));
}

std::size_t lossy_bound(const ReadOnlyBytes& table, std::size_t length) {
    return codec::lossy_bound(all(table), length);
}

std::size_t lossy_encode(std::uint32_t form, const ReadOnlyBytes& table, const ReadOnlyBytes& source, const Bytes& target) {
    return codec::lossy_encode(codec::Form{form}, all(table), all(source), all(target));
}

void lossy_decode(const ReadOnlyBytes& source, const Bytes& target) {
    codec::lossy_decode(all(source), all(target));
}

}  // namespace

void bind_codec(nb::module_& module) {
    const nb::arg table("table"), length("length"), source("source"), target("target");
    module.def("lossless_bound", &codec::max_encoded, length);
    module.def("lossless_encode", &encode, source, target, nb::arg("dense") = false, WithoutGil());
    module.def("lossless_decode", &decode, source, target, WithoutGil());
    module.def("lossy_bound", &lossy_bound, table, length);
    module.def("lossy_encode", &lossy_encode, nb::arg("form"), table, source, target, WithoutGil());
    module.def("lossy_decode", &lossy_decode, source, target, WithoutGil());
}

}  // namespace kvtier::bindings
