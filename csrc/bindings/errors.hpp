// What the core throws, as Python raises it.
#pragma once

#include <nanobind/nanobind.h>

#include <cerrno>
#include <system_error>

namespace kvtier::bindings {

// What `call` returns; a std::system_error is an OSError. Called, and left, with the GIL.
template <typename Call>
auto or_os_error(Call call) {
    try {
        return call();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw nanobind::python_error();
    }
}

}  // namespace kvtier::bindings
