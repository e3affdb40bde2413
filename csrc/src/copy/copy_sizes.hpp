// From which size on a copy is worth what.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kvtier/threads.hpp"

namespace kvtier {

// What a thread takes at a time.
inline constexpr std::size_t piece_bytes = std::size_t{1} << 20;

// A further thread pays for each so many bytes: to wake one takes 50 us, in which another copies 0.5 MiB.
inline constexpr std::size_t thread_bytes = std::size_t{2} << 20;

// Less than this stays in the caches, where whoever reads it next finds it.
inline constexpr std::size_t streaming_bytes = std::size_t{2} << 20;

inline bool pays_streaming(std::size_t total) { return total >= streaming_bytes; }

inline unsigned threads_for(std::size_t total, unsigned most) {
    const std::size_t useful = std::min<std::size_t>(1 + total / thread_bytes, useful_threads());
    const unsigned wanted = static_cast<unsigned>(most > 0 ? std::min<std::size_t>(useful, most) : useful);
    return wanted > 1 ? std::min(wanted, spare_threads()) : wanted;
}

}  // namespace kvtier
