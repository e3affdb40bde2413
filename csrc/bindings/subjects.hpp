// One function a subject: each adds its own names to the module. Bindings hold no logic.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier::bindings {

void bind_copy(nanobind::module_& module);
void bind_disk(nanobind::module_& module);
void bind_eviction(nanobind::module_& module);
void bind_keys(nanobind::module_& module);
void bind_sockets(nanobind::module_& module);

}  // namespace kvtier::bindings
