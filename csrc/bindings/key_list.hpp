// Keys for Python: one by one, or joined.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "kvtier/key_rows.hpp"

namespace kvtier::bindings {

inline nanobind::object new_key(catalog::Key key) {
    nanobind::object made =
        nanobind::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(key), catalog::key_bytes));
    if (!made.is_valid()) throw nanobind::python_error();
    return made;
}

// `count` keys, of which `key` returns each.
template <typename KeyOf>
nanobind::list list_of_keys(std::size_t count, KeyOf key) {
    nanobind::list list = nanobind::steal<nanobind::list>(PyList_New(static_cast<Py_ssize_t>(count)));
    if (!list.is_valid()) throw nanobind::python_error();
    for (std::size_t at = 0; at < count; ++at) {
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(at), new_key(key(at)).release().ptr());
    }
    return list;
}

// An immutable sequence of joined keys, whose slices share the memory. For Python, `bytes` objects are made one by one.
class KeyList {
   public:
    explicit KeyList(nanobind::bytes joined) : joined_(std::move(joined)), count_(joined_.size() / catalog::key_bytes) {
        if (joined_.size() % catalog::key_bytes != 0) throw nanobind::value_error("not a whole number of keys");
    }

    std::size_t size() const { return count_; }

    std::vector<catalog::Key> all() const {
        std::vector<catalog::Key> keys(count_);
        catalog::Key next = key(0);
        for (catalog::Key& each : keys) {
            each = next;
            next += catalog::key_bytes;
        }
        return keys;
    }

    // The key at an index, or the keys of a slice.
    nanobind::object item(nanobind::handle index) const {
        if (PySlice_Check(index.ptr())) return slice(nanobind::borrow<nanobind::slice>(index));
        const Py_ssize_t given = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
        if (given == -1 && PyErr_Occurred()) throw nanobind::python_error();
        const auto count = static_cast<Py_ssize_t>(count_);
        const Py_ssize_t at = given < 0 ? given + count : given;
        if (at < 0 || at >= count) throw nanobind::index_error("there is no such key");
        return new_key(key(static_cast<std::size_t>(at)));
    }

   private:
    KeyList(nanobind::bytes joined, std::size_t first, std::size_t count)
        : joined_(std::move(joined)), first_(first), count_(count) {}

    catalog::Key key(std::size_t at) const {
        return static_cast<catalog::Key>(joined_.data()) + (first_ + at) * catalog::key_bytes;
    }

    nanobind::object slice(const nanobind::slice& slice) const {
        const auto [start, stop, step, length] = slice.compute(count_);
        if (step == 1) return nanobind::cast(KeyList(joined_, first_ + static_cast<std::size_t>(start), length));
        return list_of_keys(length, [&](std::size_t at) {
            return key(static_cast<std::size_t>(start + static_cast<Py_ssize_t>(at) * step));
        });
    }

    nanobind::bytes joined_;
    std::size_t first_ = 0, count_;
};

inline void bind_key_list(nanobind::module_& module) {
    nanobind::class_<KeyList>(module, "KeyList")
        .def(nanobind::init<nanobind::bytes>(), nanobind::arg("joined"))
        .def("__len__", &KeyList::size)
        .def("__getitem__", &KeyList::item, nanobind::arg("index"));
}

}  // namespace kvtier::bindings
