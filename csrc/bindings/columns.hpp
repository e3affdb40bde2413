// Python's flat arrays as spans.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>

namespace kvtier::bindings {

// A writable array of items of type T. It cannot be resized while this lives. Requires the GIL at both ends. Raises
// BufferError if it is read-only, and TypeError for items of another size.
template <typename T>
class Column {
   public:
    explicit Column(nanobind::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_CONTIG) != 0) throw nanobind::python_error();
        if (buffer_.itemsize != sizeof(T)) {
            PyBuffer_Release(&buffer_);
            throw nanobind::type_error("a column has items of another size");
        }
    }
    ~Column() { PyBuffer_Release(&buffer_); }
    Column(const Column&) = delete;
    Column& operator=(const Column&) = delete;

    std::span<T> span() const {
        return {static_cast<T*>(buffer_.buf), static_cast<std::size_t>(buffer_.len) / sizeof(T)};
    }

   private:
    Py_buffer buffer_{};
};

}  // namespace kvtier::bindings
