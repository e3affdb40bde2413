// Separate from kvtier._native, so that a broken CUDA does not affect that module, and machines without a GPU do not
// load this one.

#include <nanobind/stl/string.h>

#include <optional>

#include "kvtier/build_info.hpp"
#include "kvtier/cuda.hpp"
#include "leaks.hpp"
#include "pages.hpp"

namespace nb = nanobind;

namespace kvtier::cuda {

namespace {

using bindings::Bytes;
using bindings::ChunkTuple;
using bindings::RegionTuple;

// Pinned memory, and the Python object that keeps it mapped. Releases the GIL to pin and unpin, which both take long.
struct Pinned {
    explicit Pinned(const Bytes& bytes) : bytes(bytes) {
        const nb::gil_scoped_release released;
        memory.emplace(bindings::span_of(bytes));
    }
    ~Pinned() {
        const nb::gil_scoped_release released;
        memory.reset();
    }

    Bytes bytes;
    std::optional<PinnedMemory> memory;
};

Pinned* pin(const Bytes& bytes) { return new Pinned(bytes); }

DevicePages* device_pages(int device, const std::vector<std::vector<RegionTuple>>& groups,
                          std::int64_t skipped) {
    return new DevicePages(device, bindings::kv_memory(groups, skipped));
}

template <Direction direction>
Ticket begin_copy(DevicePages& pages, const Pinned& arena, std::vector<ChunkTuple> chunks, std::uintptr_t engine,
                  CopyMethod method, const std::vector<Ticket>& after) {
    const std::vector<ChunkPages> chunk_pages = bindings::chunk_pages(chunks);
    const nb::gil_scoped_release released;
    return pages.begin(*arena.memory, chunk_pages, direction, reinterpret_cast<cudaStream_t>(engine), method, after);
}

void hold(DevicePages& pages, std::uintptr_t engine, Ticket ticket) {
    const nb::gil_scoped_release released;
    pages.hold(reinterpret_cast<cudaStream_t>(engine), ticket);
}

void wait_for(DevicePages& pages, Ticket ticket) {
    const nb::gil_scoped_release released;
    pages.wait(ticket);
}

}  // namespace

}  // namespace kvtier::cuda

NB_MODULE(_native_cuda, module) {
    using namespace kvtier;
    using namespace kvtier::cuda;
    bindings::disable_leak_warnings();
    module.doc() = "Copies between CUDA devices and the arena. Import it through kvtier.native only.";
    module.attr("abi") = abi;
    nb::exception<CudaError>(module, "CudaError", PyExc_RuntimeError);
    module.def("device_count", &device_count);
    module.def("use_device", &use_device, nb::arg("device"));
    nb::enum_<CopyMethod>(module, "CopyMethod")
        .value("BEST", CopyMethod::best)
        .value("DIRECT", CopyMethod::direct);
    nb::class_<Pinned>(module, "PinnedMemory").def(nb::new_(&pin), nb::arg("memory"));
    nb::class_<DevicePages>(module, "DevicePages")
        .def(nb::new_(&device_pages), nb::arg("device"), nb::arg("groups"), nb::arg("skipped"))
        .def_prop_ro("staged", &DevicePages::staged)
        .def("load", &begin_copy<Direction::into_engine>, nb::arg("arena"), nb::arg("chunks"), nb::arg("engine"),
             nb::arg("method") = CopyMethod::best, nb::arg("after") = std::vector<Ticket>())
        .def("save", &begin_copy<Direction::out_of_engine>, nb::arg("arena"), nb::arg("chunks"), nb::arg("engine"),
             nb::arg("method") = CopyMethod::best, nb::arg("after") = std::vector<Ticket>())
        .def("hold", &hold, nb::arg("engine"), nb::arg("ticket"))
        .def("done", &DevicePages::done, nb::arg("ticket"))
        .def("wait", &wait_for, nb::arg("ticket"));
}
