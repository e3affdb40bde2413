#include "subjects.hpp"

namespace kvtier::bindings {

void bind_keys(nanobind::module_&) {}

}  // namespace kvtier::bindings
