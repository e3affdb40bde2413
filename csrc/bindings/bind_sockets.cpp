#include <nanobind/nanobind.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "columns.hpp"
#include "kvtier/exchange.hpp"
#include "kvtier/hashes.hpp"
#include "kvtier/pump.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace {

using kvtier::bindings::Buffer;
using kvtier::sockets::Kind;
using kvtier::sockets::Operation;

// Operations parsed from Python objects, and the buffers that they use.
struct Arguments {
    std::vector<Buffer> held;
    std::vector<Operation> operations;
    std::span<std::byte> unread;

    Arguments(const nb::sequence& given, const nb::object& buffer) {
        for (const nb::handle operation : given) add(operation);
        const Buffer& last = held.emplace_back(buffer, PyBUF_WRITABLE);
        unread = {last.memory(), last.length()};
    }

    void add(nb::handle operation) {
        const auto kind = static_cast<Kind>(nb::cast<int>(operation[0]));
        Operation parsed{kind, {}};
        for (const nb::handle buffer : operation[1]) {
            const Buffer& last = held.emplace_back(buffer, kind == Kind::receive ? PyBUF_WRITABLE : PyBUF_SIMPLE);
            parsed.spans.push_back({last.memory(), last.length()});
        }
        if (kind != Kind::send && kind != Kind::receive && (kind != Kind::expect || parsed.spans.size() != 1)) {
            throw nb::value_error("no such operation");
        }
        operations.push_back(std::move(parsed));
    }
};

std::chrono::steady_clock::time_point after(double seconds) {
    const std::chrono::duration<double> left(std::fmin(std::fmax(seconds, 0.0), 1e9));
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(left);
}

nb::tuple exchange(int socket, const nb::sequence& operations, const nb::object& unread, double seconds,
                   kvtier::Hashes* hashes) {
    const Arguments arguments(operations, unread);
    std::optional<nb::gil_scoped_release> released(std::in_place);
    const auto [operation, bytes, error] =
        kvtier::sockets::exchange(socket, arguments.operations, arguments.unread, after(seconds), true, hashes);
    released.reset();
    return nb::make_tuple(operation, bytes, error);
}

nb::tuple exchange_now(int socket, const nb::sequence& operations, const nb::object& unread,
                       kvtier::Hashes* hashes) {
    const Arguments arguments(operations, unread);
    const auto [operation, bytes, error] =
        kvtier::sockets::exchange(socket, arguments.operations, arguments.unread, {}, false, hashes);
    return nb::make_tuple(operation, bytes, error);
}

void add(kvtier::Hashes& hashes, const nb::object& memory, bool object) {
    const Buffer held(memory, PyBUF_SIMPLE);  // Not for longer: only conversations read from it, and hold it.
    hashes.add({held.memory(), held.length()}, object);
}

void move(kvtier::Hashes& hashes, const nb::object& memory) {
    const Buffer held(memory, PyBUF_SIMPLE);
    hashes.move(held.memory(), held.length());
}

nb::list digests(const kvtier::Hashes& hashes) {
    nb::list found;
    for (const auto& digest : hashes.digests()) {
        if (digest) {
            found.append(nb::bytes(digest->data(), digest->size()));
        } else {
            found.append(nb::none());
        }
    }
    return found;
}

// The pump, and the buffers of conversations in flight.
class Pump {
public:
    explicit Pump(std::size_t max_threads) : pump_(std::make_unique<kvtier::sockets::Pump>(max_threads)) {}
    ~Pump() { close(); }

    int fileno() const { return open().descriptor(); }

    std::uint64_t start(int socket, const nb::sequence& operations, const nb::object& unread, double seconds,
                        const nb::object& hashes) {
        Arguments arguments(operations, unread);
        auto* const hashing = hashes.is_none() ? nullptr : nb::cast<kvtier::Hashes*>(hashes);
        const std::uint64_t ticket = next_++;
        held_.emplace(ticket, Used{std::move(arguments.held), hashes});
        try {
            open().start({ticket, socket, std::move(arguments.operations), arguments.unread, after(seconds), hashing});
        } catch (...) {
            held_.erase(ticket);
            throw;
        }
        return ticket;
    }

    nb::list collect() {
        nb::list ended;
        for (const auto& [ticket, progress] : open().collect()) {
            held_.erase(ticket);
            ended.append(nb::make_tuple(ticket, progress.operations, progress.bytes, progress.error));
        }
        return ended;
    }

    void close() {
        if (pump_ != nullptr) {
            const nb::gil_scoped_release released;
            pump_.reset();
        }
        held_.clear();
    }

private:
    struct Used {
        std::vector<Buffer> buffers;
        nb::object hashes;
    };

    kvtier::sockets::Pump& open() const {
        if (pump_ == nullptr) throw nb::value_error("the pump is closed");
        return *pump_;
    }

    std::unique_ptr<kvtier::sockets::Pump> pump_;
    std::unordered_map<std::uint64_t, Used> held_;
    std::uint64_t next_ = 0;
};

}  // namespace

namespace kvtier::bindings {

void bind_sockets(nb::module_& module) {
    nb::class_<kvtier::Hashes>(module, "Hashes")
        .def(nb::init<>())
        .def("add", &add, nb::arg("memory"), nb::arg("is_object"))
        .def("move", &move, nb::arg("memory"))
        .def("digests", &digests);
    module.def("exchange", &exchange, nb::arg("socket"), nb::arg("operations"), nb::arg("unread"),
               nb::arg("seconds"), nb::arg("hashes") = nb::none());
    module.def("exchange_now", &exchange_now, nb::arg("socket"), nb::arg("operations"), nb::arg("unread"),
               nb::arg("hashes") = nb::none());
    nb::class_<Pump>(module, "Pump")
        .def(nb::init<std::size_t>(), nb::arg("max_threads"))
        .def("fileno", &Pump::fileno)
        .def("start", &Pump::start, nb::arg("socket"), nb::arg("operations"), nb::arg("unread"),
             nb::arg("seconds"), nb::arg("hashes") = nb::none())
        .def("collect", &Pump::collect)
        .def("close", &Pump::close);
}

}  // namespace kvtier::bindings
