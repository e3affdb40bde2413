// The intrinsics of x86-64.
#pragma once

#if defined(__x86_64__)
// GCC 12's own ones for AVX-512 begin with a variable that they do not initialize.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
