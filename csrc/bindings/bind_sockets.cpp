#include "subjects.hpp"

namespace kvtier::bindings {

void bind_sockets(nanobind::module_&) {}

}  // namespace kvtier::bindings
