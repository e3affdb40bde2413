// Token ids as Python has them, as words.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "kvtier/chunk_keys.hpp"

namespace kvtier::bindings {

// Takes a sequence of integers, an array or a buffer of them, or `bytes` that are little-endian words already;
// the object must outlive it. Raises TypeError for what is no integer, OverflowError for what does not fit into
// 32 bits, ValueError for half a word. With the GIL.
class TokenIds {
   public:
    explicit TokenIds(PyObject* object);
    ~TokenIds();
    TokenIds(const TokenIds&) = delete;
    TokenIds& operator=(const TokenIds&) = delete;

    // Without the GIL, too.
    keys::Words all() const { return {words_, size_}; }

   private:
    bool take_buffer(PyObject* object);
    void take_words();
    template <typename Integer>
    void take_integers();
    void take_items(PyObject* object);
    std::span<std::uint32_t> make_words(std::size_t count);

    Py_buffer buffer_{};
    std::size_t size_ = 0;
    const std::uint32_t* words_ = nullptr;
    std::unique_ptr<std::uint32_t[]> own_;
};

}  // namespace kvtier::bindings
