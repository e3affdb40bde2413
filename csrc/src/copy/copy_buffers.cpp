#include <algorithm>

#include "copy_sizes.hpp"
#include "kvtier/copy.hpp"
#include "kvtier/threads.hpp"

namespace kvtier {

void copy_buffers(std::span<const Buffer> buffers, unsigned threads) {
    std::vector<Buffer> pieces;
    std::size_t total = 0;
    for (const Buffer& buffer : buffers) {
        total += buffer.length;
        for (std::size_t at = 0; at < buffer.length; at += piece_bytes) {
            pieces.push_back({buffer.to + at, buffer.from + at, std::min(piece_bytes, buffer.length - at)});
        }
    }
    const bool streaming = pays_streaming(total);
    parallel_for(pieces.size(), threads_for(total, threads), [&](std::size_t index) {
        const Buffer& piece = pieces[index];
        copy_run(piece.to, piece.from, piece.length, streaming);
    });
}

}  // namespace kvtier
