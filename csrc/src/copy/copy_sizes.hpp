// Size thresholds for copies.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kvtier/threads.hpp"

namespace kvtier {

// Work unit of a thread.
inline constexpr std::size_t piece_bytes = std::size_t{1} << 20;

// One more thread per this many bytes: waking a thread takes 50 us, in which another one copies 0.5 MiB.
inline constexpr std::size_t thread_bytes = std::size_t{2} << 20;

// Smaller copies stay in the CPU caches for the next reader.
inline constexpr std::size_t streaming_bytes = std::size_t{2} << 20;

inline bool pays_streaming(std::size_t total) { return total >= streaming_bytes; }

inline unsigned threads_for(std::size_t total, unsigned limit) {
    const std::size_t useful = std::min<std::size_t>(1 + total / thread_bytes, useful_threads());
    const unsigned wanted = static_cast<unsigned>(limit > 0 ? std::min<std::size_t>(useful, limit) : useful);
    return wanted > 1 ? std::min(wanted, spare_threads()) : wanted;
}

}  // namespace kvtier
