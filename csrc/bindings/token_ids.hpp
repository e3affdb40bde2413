// Token ids as Python has them, as words.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "kvtier/chunk_keys.hpp"

namespace kvtier::bindings {

// Takes a sequence of integers, an array or a buffer of them, or `bytes` that are little-endian words already;
// the object must outlive it. What is no integer raises TypeError, what does not fit into 32 bits OverflowError,
// half a word ValueError: some here, some when it is read.
class TokenIds {
   public:
    // With the GIL.
    explicit TokenIds(PyObject* object);
    ~TokenIds();
    TokenIds(const TokenIds&) = delete;
    TokenIds& operator=(const TokenIds&) = delete;

    std::size_t size() const { return size_; }

    // At most `keys::tokens_a_read` at a time. With the GIL, unless `convert_all` was called.
    keys::Words read(std::size_t at, std::size_t count);

    // From now on they are read without the GIL. With the GIL.
    void convert_all();

    // Once `convert_all` was called.
    keys::Words all() const { return {words_, size_}; }

   private:
    bool take_buffer(PyObject* object);
    void take_words();
    template <typename Integer>
    void take_integers();
    void read_items(std::size_t at, std::span<std::uint32_t> words) const;
    std::span<std::uint32_t> make_words(std::size_t count);

    Py_buffer buffer_{};
    nanobind::object sequence_;
    std::size_t size_ = 0;
    const std::uint32_t* words_ = nullptr;
    std::unique_ptr<std::uint32_t[]> own_;
    std::array<std::uint32_t, keys::tokens_a_read> some_;
};

}  // namespace kvtier::bindings
