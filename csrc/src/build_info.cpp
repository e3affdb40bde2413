#include "kvtier/build_info.hpp"

#include "kvtier/cpu.hpp"

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
    BuildInfo info{compiler(), cpu::features().avx2, cpu::features().avx512, false};
#if defined(KVTIER_HAS_IO_URING)
    info.io_uring = true;
#endif
    return info;
}

}  // namespace kvtier
