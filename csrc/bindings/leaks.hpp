// nanobind's warnings about objects that are alive when the interpreter exits.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier::bindings {

// Disable them, except in debug builds: a program may exit with objects in use, as vLLM does, and the warnings would
// alarm its users without need.
inline void disable_leak_warnings() {
#ifdef NDEBUG
    nanobind::set_leak_warnings(false);
#endif
}

}  // namespace kvtier::bindings
