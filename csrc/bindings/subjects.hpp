// One function per subject, which adds its names to the module. Bindings contain no logic.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtier::bindings {

void bind_catalog(nanobind::module_& module);
void bind_codec(nanobind::module_& module);
void bind_copy(nanobind::module_& module);
void bind_disk(nanobind::module_& module);
void bind_eviction(nanobind::module_& module);
void bind_holders(nanobind::module_& module);
void bind_keys(nanobind::module_& module);
void bind_simulation(nanobind::module_& module);
void bind_sockets(nanobind::module_& module);

}  // namespace kvtier::bindings
