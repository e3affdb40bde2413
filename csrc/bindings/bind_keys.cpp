#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <vector>

#include "kvtier/chunk_keys.hpp"
#include "sequences.hpp"
#include "subjects.hpp"
#include "token_ids.hpp"

namespace nb = nanobind;

namespace kvtier::bindings {

namespace {

using keys::Hash;

// Longer prompts release the GIL. Up to here hashing takes some 0.2 ms, while reacquiring the GIL can take 5 ms.
constexpr std::size_t max_tokens_with_gil = 1 << 17;

keys::Bytes bytes_of(const nb::bytes& bytes) {
    return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

Hash hash_of(const nb::bytes& bytes) {
    Hash hash;
    if (bytes.size() != hash.size()) throw nb::value_error("a key must have 32 bytes");
    std::memcpy(hash.data(), bytes.data(), hash.size());
    return hash;
}

nb::list as_list(const std::vector<Hash>& hashes) {
    return list_of(hashes.size(), [&hashes](std::size_t at) {
        return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(hashes[at].data()), sizeof(Hash));
    });
}

nb::list chunk_keys(const nb::bytes& parent, nb::handle tokens, std::size_t chunk_tokens, bool tail,
                    const std::vector<nb::bytes>& extras) {
    if (chunk_tokens == 0) throw nb::value_error("chunk_tokens must not be 0");
    const TokenIds ids(tokens.ptr());
    const keys::Words words = ids.all();
    std::vector<Hash> hashes(keys::count_chunks(words.size(), chunk_tokens, tail));
    std::vector<keys::Bytes> encoded;
    for (const nb::bytes& extra : extras) encoded.push_back(bytes_of(extra));
    const Hash before = hash_of(parent);
    std::optional<nb::gil_scoped_release> released;
    if (words.size() > max_tokens_with_gil) released.emplace();
    keys::chunk_keys(before, words, chunk_tokens, encoded, hashes);
    released.reset();
    return as_list(hashes);
}

// The first `hash_bytes` bytes of the hash of each whole block, one after the other.
nb::bytes block_hashes(nb::handle tokens, std::size_t block_tokens, std::size_t hash_bytes) {
    if (block_tokens == 0) throw nb::value_error("block_tokens must not be 0");
    if (hash_bytes > sizeof(Hash)) throw nb::value_error("a hash has 32 bytes");
    const TokenIds ids(tokens.ptr());
    const keys::Words words = ids.all();
    std::vector<Hash> hashes(words.size() / block_tokens);
    nb::bytes joined = new_bytes(hashes.size() * hash_bytes);
    char* const first = bytes_memory(joined.ptr());
    std::optional<nb::gil_scoped_release> released;
    if (words.size() > max_tokens_with_gil) released.emplace();
    keys::block_hashes(words, block_tokens, hashes);
    for (std::size_t at = 0; at < hashes.size(); ++at) {
        std::memcpy(first + at * hash_bytes, hashes[at].data(), hash_bytes);
    }
    released.reset();
    return joined;
}

nb::bytes blake3(const nb::bytes& input) {
    keys::Hasher hasher;
    hasher.add(bytes_of(input));
    const Hash hash = hasher.finish();
    return nb::bytes(hash.data(), hash.size());
}

}  // namespace

void bind_keys(nb::module_& module) {
    module.def("chunk_keys", &chunk_keys, nb::arg("parent"), nb::arg("tokens"), nb::arg("chunk_tokens"),
               nb::arg("tail"), nb::arg("extras"));
    module.def("block_hashes", &block_hashes, nb::arg("tokens"), nb::arg("block_tokens"), nb::arg("hash_bytes"));
    module.def("encode_tokens", &encode_tokens, nb::arg("tokens"), nb::arg("start"), nb::arg("stop"));
    module.def("blake3", &blake3, nb::arg("data"));
}

}  // namespace kvtier::bindings
