// Conversion of Python's token ids to 32-bit words.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvtier/chunk_keys.hpp"

namespace kvtier::bindings {

// Accepts a sequence of integers, an array or a buffer of them, or `bytes` with little-endian 32-bit words; the object
// must outlive it. Raises TypeError for non-integers, OverflowError for integers that do not fit into 32 bits, and
// ValueError for bytes whose length is not a multiple of 4. Requires the GIL.
class TokenIds {
   public:
    explicit TokenIds(PyObject* object);
    ~TokenIds();
    TokenIds(const TokenIds&) = delete;
    TokenIds& operator=(const TokenIds&) = delete;

    // Does not require the GIL.
    keys::Words all() const { return {words_, size_}; }

   private:
    bool take_buffer(PyObject* object);
    void take_words();
    void take_items(PyObject* object);
    template <typename Integer>
    void take_integers();
    std::span<std::uint32_t> make_words(std::size_t count);

    Py_buffer buffer_{};
    std::size_t size_ = 0;
    const std::uint32_t* words_ = nullptr;
    std::unique_ptr<std::uint32_t[]> own_;
};

// Encode the token ids in [start, stop) as little-endian 32-bit words. Creates no slice of a list, which would take as
// long as encoding it. Accepts and raises the same as TokenIds.
nanobind::bytes encode_tokens(nanobind::handle tokens, std::size_t start, std::size_t stop);

}  // namespace kvtier::bindings
