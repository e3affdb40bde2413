#include "subjects.hpp"

namespace kvtier::bindings {

void bind_disk(nanobind::module_&) {}

}  // namespace kvtier::bindings
