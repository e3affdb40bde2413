#include "subjects.hpp"

namespace kvtier::bindings {

void bind_copy(nanobind::module_&) {}

}  // namespace kvtier::bindings
