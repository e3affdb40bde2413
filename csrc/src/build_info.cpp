#include "kvtier/build_info.hpp"

namespace kvtier {

namespace {

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

}  // namespace

BuildInfo build_info() {
    BuildInfo info{compiler(), false, false, false};
#if defined(__x86_64__)
    __builtin_cpu_init();
    info.avx2 = __builtin_cpu_supports("avx2") != 0;
    info.avx512 = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0;
#endif
#if defined(KVTIER_HAS_IO_URING)
    info.io_uring = true;
#endif
    return info;
}

}  // namespace kvtier
