// Features of this build and of this CPU.
#pragma once

#include <string>

namespace kvtier {

// Version of the names, arguments and results that the extensions expose to Python. After changing one, increment it
// here and in kvtier/native/__init__.py, so that an extension built from other sources is not loaded.
inline constexpr int abi = 13;

struct BuildInfo {
    std::string compiler;
    bool avx2;      // supported by this CPU, detected at run time
    bool avx512;    // the same for AVX-512F and AVX-512BW
    bool io_uring;  // built with io_uring; the kernel may still not permit it
};

BuildInfo build_info();

}  // namespace kvtier
