#include "kvtier/disk/write_hashed.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kvtier::disk {

namespace {

// Fits into the L2 cache of a core. Pieces at multiples of it get large pages of the page cache: pieces that began one
// page later took 7 % longer.
constexpr std::size_t kPieceBytes = std::size_t{512} << 10;

}  // namespace

Digest write_hashed(int descriptor, std::span<const std::byte> object, std::span<const std::byte> payload) {
    Xxh3 hash(payload);
    for (std::size_t at = 0; at < object.size();) {
        const auto piece = object.subspan(at, std::min(kPieceBytes, object.size() - at));
        hash.advance(static_cast<std::size_t>(std::max(piece.data() + piece.size() - payload.data(), std::ptrdiff_t{0})));
        const ssize_t written = ::pwrite(descriptor, piece.data(), piece.size(), static_cast<off_t>(at));
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) throw std::system_error(written < 0 ? errno : EIO, std::generic_category(), "pwrite");
        at += static_cast<std::size_t>(written);
    }
    return hash.digest();
}

}  // namespace kvtier::disk
