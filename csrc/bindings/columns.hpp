// The memory of Python's objects, and flat arrays as spans.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <utility>

namespace kvtier::bindings {

// The memory of an object, locked while this lives. Requires the GIL at both ends. Raises BufferError if it cannot be
// had with these flags.
class Buffer {
   public:
    Buffer(nanobind::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(Buffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
    Buffer& operator=(Buffer&&) = delete;

    std::byte* memory() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t length() const { return static_cast<std::size_t>(view_.len); }
    std::size_t item_bytes() const { return static_cast<std::size_t>(view_.itemsize); }

   private:
    Py_buffer view_{};
};

// A writable array of items of type T. It cannot be resized while this lives. Raises BufferError if it is read-only,
// and TypeError for items of another size.
template <typename T>
class Column {
   public:
    explicit Column(nanobind::handle array) : buffer_(array, PyBUF_CONTIG) {
        if (buffer_.item_bytes() != sizeof(T)) throw nanobind::type_error("a column has items of another size");
    }

    std::span<T> span() const { return {reinterpret_cast<T*>(buffer_.memory()), buffer_.length() / sizeof(T)}; }

   private:
    Buffer buffer_;
};

}  // namespace kvtier::bindings
