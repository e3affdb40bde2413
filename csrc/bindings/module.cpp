#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "kvtier/build_info.hpp"
#include "leaks.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace {

nb::dict build_info() {
    const kvtier::BuildInfo info = kvtier::build_info();
    nb::dict answer;
    answer["abi"] = kvtier::abi;
    answer["compiler"] = info.compiler;
    answer["avx2"] = info.avx2;
    answer["avx512"] = info.avx512;
    answer["io_uring"] = info.io_uring;
    return answer;
}

}  // namespace

NB_MODULE(_native, module) {
    kvtier::bindings::end_in_silence();
    module.doc() = "kvtier's native core. Imported by kvtier.native alone.";
    module.def("build_info", &build_info);
    kvtier::bindings::bind_copy(module);
    kvtier::bindings::bind_disk(module);
    kvtier::bindings::bind_eviction(module);
    kvtier::bindings::bind_keys(module);
    kvtier::bindings::bind_sockets(module);
}
