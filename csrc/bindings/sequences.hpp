// Items of lists and tuples, and the memory of bytes: read and filled in place, or with the stable ABI by calls.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier::bindings {

#if defined(Py_LIMITED_API)

inline Py_ssize_t count_items(PyObject* sequence) {
    return PyList_Check(sequence) ? PyList_Size(sequence) : PyTuple_Size(sequence);
}

// Borrowed items of a list or tuple from `start` on. It must not change while they are in use.
class Items {
   public:
    explicit Items(PyObject* sequence, std::size_t start = 0)
        : sequence_(sequence), start_(start), item_(PyList_Check(sequence) ? &PyList_GetItem : &PyTuple_GetItem) {}
    PyObject* operator[](std::size_t at) const { return item_(sequence_, static_cast<Py_ssize_t>(start_ + at)); }

   private:
    PyObject* sequence_;
    std::size_t start_;
    PyObject* (*item_)(PyObject*, Py_ssize_t);
};

// Fill a place of a new list. Takes ownership of the item.
inline void fill_item(PyObject* list, Py_ssize_t at, PyObject* item) { PyList_SetItem(list, at, item); }

inline char* bytes_memory(PyObject* bytes) { return PyBytes_AsString(bytes); }

inline Py_ssize_t bytes_length(PyObject* bytes) { return PyBytes_Size(bytes); }

#else

inline Py_ssize_t count_items(PyObject* sequence) { return PySequence_Fast_GET_SIZE(sequence); }

class Items {
   public:
    explicit Items(PyObject* sequence, std::size_t start = 0) : first_(PySequence_Fast_ITEMS(sequence) + start) {}
    PyObject* operator[](std::size_t at) const { return first_[at]; }

   private:
    PyObject* const* first_;
};

inline void fill_item(PyObject* list, Py_ssize_t at, PyObject* item) { PyList_SET_ITEM(list, at, item); }

inline char* bytes_memory(PyObject* bytes) { return PyBytes_AS_STRING(bytes); }

inline Py_ssize_t bytes_length(PyObject* bytes) { return PyBytes_GET_SIZE(bytes); }

#endif

// A list or tuple, or the items of another iterable.
inline nanobind::object fast_sequence(nanobind::handle iterable, const char* problem = "must be a sequence") {
    nanobind::object sequence = nanobind::steal(PySequence_Fast(iterable.ptr(), problem));
    if (!sequence.is_valid()) throw nanobind::python_error();
    return sequence;
}

// A list of new references, each from a call of `make` with its place.
template <typename Make>
nanobind::list list_of(std::size_t count, Make make) {
    nanobind::list list = nanobind::steal<nanobind::list>(PyList_New(static_cast<Py_ssize_t>(count)));
    if (!list.is_valid()) throw nanobind::python_error();
    for (std::size_t at = 0; at < count; ++at) {
        PyObject* const item = make(at);
        if (item == nullptr) throw nanobind::python_error();
        fill_item(list.ptr(), static_cast<Py_ssize_t>(at), item);
    }
    return list;
}

// Bytes to be filled before Python code gets them.
inline nanobind::bytes new_bytes(std::size_t size) {
    auto bytes = nanobind::steal<nanobind::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!bytes.is_valid()) throw nanobind::python_error();
    return bytes;
}

}  // namespace kvtier::bindings
