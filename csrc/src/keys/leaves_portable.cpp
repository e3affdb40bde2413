#define KVTIER_TARGET
#include "leaves.hpp"

namespace kvtier::keys {

void hash_leaves_portable(const Leaves& leaves, ChainingValue* values) {
    hash_leaves<4>(leaves, values);
}

}  // namespace kvtier::keys
