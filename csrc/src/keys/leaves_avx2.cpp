#if defined(__x86_64__)

#define KVTIER_TARGET __attribute__((target("avx2")))
#define KVTIER_AVX2
#include "leaves.hpp"

namespace kvtier::keys {

KVTIER_TARGET
void hash_leaves_avx2(const Leaves& leaves, ChainingValue* values) {
    hash_leaves<8>(leaves, values);
}

}  // namespace kvtier::keys

#endif
