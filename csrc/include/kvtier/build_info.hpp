// What this build has, and what of it this processor can run.
#pragma once

#include <string>

namespace kvtier {

// Of the names, arguments and results that the extensions offer to Python. Whoever changes one raises it here and in
// kvtier/native/__init__.py, so that an extension that was built of other sources is left out and not called wrongly.
inline constexpr int abi = 4;

struct BuildInfo {
    std::string compiler;
    bool avx2;      // this processor has it; asked at run time
    bool avx512;    // AVX-512F and BW, the same
    bool io_uring;  // the headers were there; whether the kernel lets one use it is another question
};

BuildInfo build_info();

}  // namespace kvtier
