#if defined(__x86_64__)

#define KVTIER_TARGET __attribute__((target("avx512f,avx2")))
#define KVTIER_AVX2
#include "leaves.hpp"

namespace kvtier::keys {

KVTIER_TARGET
void hash_leaves_avx512(const Leaves& leaves, ChainingValue* values) {
    hash_leaves<16>(leaves, values);
}

}  // namespace kvtier::keys

#endif
