#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "columns.hpp"
#include "errors.hpp"
#include "kvtier/disk/engine.hpp"
#include "kvtier/disk/write_hashed.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {
namespace {

using disk::Transfer;

std::string text(const nb::bytes& path) {
    return {path.c_str(), path.size()};
}

class DiskEngine {
public:
    explicit DiskEngine(unsigned depth) : engine_(open(depth)) {}

    int event_fd() const { return engine_->event_fd(); }

    void register_memory(nb::handle memory) {
        kept_ = std::make_unique<Buffer>(memory, PyBUF_WRITABLE);
        engine_->keep(kept_->memory(), kept_->length());
    }

    std::uint64_t read(const nb::list& items, bool direct) {
        std::vector<Buffer> buffers;
        std::vector<Transfer> transfers;
        for (const nb::handle item : items) {
            auto [path, view] = nb::cast<std::pair<nb::bytes, nb::object>>(item);
            const Buffer& buffer = buffers.emplace_back(view, PyBUF_WRITABLE);
            transfers.push_back(Transfer::reading(text(path), buffer.memory(), buffer.length(), direct));
        }
        return submit(std::move(transfers), std::move(buffers));
    }

    std::uint64_t write(const nb::list& items, bool direct) {
        std::vector<Buffer> buffers;
        std::vector<Transfer> transfers;
        for (const nb::handle item : items) {
            auto [path, temporary, view] = nb::cast<std::tuple<nb::bytes, nb::bytes, nb::object>>(item);
            const Buffer& buffer = buffers.emplace_back(view, PyBUF_SIMPLE);
            transfers.push_back(Transfer::writing(text(path), text(temporary), buffer.memory(),
                                                  buffer.length(), direct));
        }
        return submit(std::move(transfers), std::move(buffers));
    }

    void cancel(std::uint64_t batch) { engine_->cancel(batch); }

    nb::list finished() {
        nb::list batches;
        for (const disk::Finished& batch : engine_->take_finished()) {
            nb::list outcomes;
            for (const int outcome : batch.outcomes) outcomes.append(outcome);
            batches.append(nb::make_tuple(batch.batch, outcomes));
            buffers_.erase(batch.batch);
        }
        return batches;
    }

    void close() {
        const nb::gil_scoped_release unlocked;
        engine_->close();
    }

private:
    static std::unique_ptr<disk::Engine> open(unsigned depth) {
        return or_os_error([&] {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<disk::Engine>(depth);
        });
    }

    std::uint64_t submit(std::vector<Transfer> transfers, std::vector<Buffer> buffers) {
        const std::uint64_t number = engine_->submit(std::move(transfers));
        buffers_.emplace(number, std::move(buffers));
        return number;
    }

    // Declared before the engine, so destroyed after it: the engine waits until the kernel no longer uses them.
    std::unique_ptr<Buffer> kept_;
    std::unordered_map<std::uint64_t, std::vector<Buffer>> buffers_;
    std::unique_ptr<disk::Engine> engine_;
};

nb::bytes write_hashed(int descriptor, nb::handle object, std::size_t start, std::size_t length) {
    const Buffer buffer(object, PyBUF_SIMPLE);
    const std::span<const std::byte> bytes(buffer.memory(), buffer.length());
    if (start > bytes.size() || length > bytes.size() - start) throw nb::value_error("the payload exceeds the object");
    const Digest digest = or_os_error([&] {
        const nb::gil_scoped_release unlocked;
        return disk::write_hashed(descriptor, bytes, bytes.subspan(start, length));
    });
    return nb::bytes(digest.data(), digest.size());
}

}  // namespace

void bind_disk(nanobind::module_& module) {
    nb::class_<DiskEngine>(module, "DiskEngine")
        .def(nb::init<unsigned>(), nb::arg("depth"))
        .def_prop_ro("event_fd", &DiskEngine::event_fd)
        .def("register_memory", &DiskEngine::register_memory, nb::arg("memory"))
        .def("read", &DiskEngine::read, nb::arg("items"), nb::arg("direct"))
        .def("write", &DiskEngine::write, nb::arg("items"), nb::arg("direct"))
        .def("cancel", &DiskEngine::cancel, nb::arg("batch"))
        .def("finished", &DiskEngine::finished)
        .def("close", &DiskEngine::close);
    module.def("write_hashed", &write_hashed, nb::arg("descriptor"), nb::arg("chunk"), nb::arg("start"),
               nb::arg("length"));
}

}  // namespace kvtier::bindings
