#include <nanobind/nanobind.h>

#include <cmath>
#include <utility>
#include <vector>

#include "kvtier/exchange.hpp"
#include "subjects.hpp"

namespace nb = nanobind;

namespace {

using kvtier::sockets::Kind;
using kvtier::sockets::Operation;
using kvtier::sockets::Span;

// Memory of Python's, held for as long as this lives.
class Held {
public:
    Held(nb::handle owner, bool writable) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
            throw nb::python_error();
        }
    }
    Held(Held&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
    Held& operator=(Held&&) = delete;
    ~Held() { PyBuffer_Release(&view_); }

    Span span() const { return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

private:
    Py_buffer view_{};
};

nb::tuple exchange(int socket, const nb::sequence& operations, const nb::object& unread, double seconds) {
    std::vector<Held> held;
    std::vector<Operation> asked;
    for (const nb::handle operation : operations) {
        const auto kind = static_cast<Kind>(nb::cast<int>(operation[0]));
        Operation one{kind, {}};
        for (const nb::handle buffer : operation[1]) {
            held.emplace_back(buffer, kind == Kind::receive);
            one.spans.push_back(held.back().span());
        }
        if (kind != Kind::send && kind != Kind::receive && (kind != Kind::expect || one.spans.size() != 1)) {
            throw nb::value_error("no such operation");
        }
        asked.push_back(std::move(one));
    }
    const Held scratch(unread, true);
    const auto left = std::chrono::duration<double>(std::fmin(std::fmax(seconds, 0.0), 1e9));
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(left);
    kvtier::sockets::Progress progress;
    {
        const nb::gil_scoped_release released;
        const Span room = scratch.span();
        progress = kvtier::sockets::exchange(socket, asked, {room.data, room.length}, deadline);
    }
    return nb::make_tuple(progress.operations, progress.bytes, progress.error);
}

}  // namespace

namespace kvtier::bindings {

void bind_sockets(nb::module_& module) {
    module.def("exchange", &exchange, nb::arg("socket"), nb::arg("operations"), nb::arg("unread"),
               nb::arg("seconds"));
}

}  // namespace kvtier::bindings
