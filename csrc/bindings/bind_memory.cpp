#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <new>

#include "errors.hpp"
#include "kvtier/memory.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

void bind_memory(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    module.def(
        "map_over",
        [](std::uintptr_t address, int file, std::size_t length) {
            or_os_error([&] { map_over(reinterpret_cast<std::byte*>(address), file, length); });
        },
        nb::arg("address"), nb::arg("file"), nb::arg("length"));
    nb::class_<LargePages>(module, "LargePages")
        .def_prop_ro_static("ahead", [](nb::handle) { return LargePages::ahead; })
        .def(
            "__init__",
            [](LargePages* self, int file, std::size_t length) {
                or_os_error([&] { new (self) LargePages(file, length); });
            },
            nb::arg("file"), nb::arg("length"))
        .def("reach", &LargePages::reach, nb::arg("stop"))
        .def("wait", &LargePages::wait, Released())
        .def_prop_ro("taken", &LargePages::taken)
        .def("close", &LargePages::close, Released());
}

}  // namespace kvtier::bindings
