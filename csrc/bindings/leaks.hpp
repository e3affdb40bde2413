// What is said of objects that are left when an interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier::bindings {

// Nothing, but in builds for debugging: a program may end with objects in use, as vLLM does, and its users would be
// told of a fault that is none.
inline void end_in_silence() {
#ifdef NDEBUG
    nanobind::set_leak_warnings(false);
#endif
}

}  // namespace kvtier::bindings
