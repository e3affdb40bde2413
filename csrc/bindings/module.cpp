#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "kvtier/build_info.hpp"
#include "leaks.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace {

nb::dict build_info() {
    const kvtier::BuildInfo info = kvtier::build_info();
    nb::dict result;
    result["abi"] = kvtier::abi;
    result["compiler"] = info.compiler;
    result["avx2"] = info.avx2;
    result["avx512"] = info.avx512;
    result["io_uring"] = info.io_uring;
    return result;
}

}  // namespace

NB_MODULE(_native, module) {
    kvtier::bindings::disable_leak_warnings();
    module.doc() = "kvtier's native core. Import it through kvtier.native only.";
    module.def("build_info", &build_info);
    kvtier::bindings::bind_catalog(module);
    kvtier::bindings::bind_codec(module);
    kvtier::bindings::bind_copy(module);
    kvtier::bindings::bind_disk(module);
    kvtier::bindings::bind_eviction(module);
    kvtier::bindings::bind_holders(module);
    kvtier::bindings::bind_keys(module);
    kvtier::bindings::bind_simulation(module);
    kvtier::bindings::bind_sockets(module);
}
