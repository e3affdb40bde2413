// Conversion of the core's exceptions to Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <cerrno>
#include <system_error>

namespace kvtier::bindings {

// Return the result of `call`; convert a std::system_error to an OSError. Requires the GIL at entry and exit.
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
