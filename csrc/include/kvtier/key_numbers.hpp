// The controller's table: which number each chunk key has. A number stands for a set of places.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kvtier/key_hash.hpp"

namespace kvtier::holders {

using Number = std::uint32_t;

inline constexpr Number no_number = 0;  // That of a key that is not in the table.
inline constexpr std::size_t key_bytes = 32;

// Joined keys. Others than a whole number of them throw `std::invalid_argument`.
class Keys {
   public:
    explicit Keys(std::span<const std::uint8_t> joined);

    std::size_t size() const { return joined_.size() / key_bytes; }
    const std::uint8_t* operator[](std::size_t at) const { return joined_.data() + at * key_bytes; }

   private:
    std::span<const std::uint8_t> joined_;
};

// So many keys that had one number have another one now.
struct Moved {
    Number before, after;
    std::uint64_t keys;
};

// From the key at `start` on, the keys have this number.
struct Run {
    std::size_t start;
    Number number;
};

// For a hundred million keys in about 45 bytes each: 36 for key and number, and 5 to 11 for places.
//
// Whole keys, so that no key is taken for another one. They lie in blocks, which never move, and are found by a hash
// table with linear probing whose places have 4 bytes: the number of the entry, and a part of the hash that spares
// most looks at other keys. The table is split into rows by the hash. A row grows at once, at 98,000 keys in half a
// millisecond; each does at another load, so that they do not all grow in the same call. Not thread-safe.
class KeyNumbers {
   public:
    static constexpr std::size_t rows = 1024;

    KeyNumbers() = default;
    KeyNumbers(const KeyNumbers&) = delete;
    KeyNumbers& operator=(const KeyNumbers&) = delete;

    // Number of keys.
    std::size_t size() const { return size_; }

    // Find the numbers of as many keys. Their cache misses overlap, here and below.
    void find(const Keys& keys, std::span<Number> numbers) const;

    // Return the runs of equal numbers, up to the first key that has none, which is a run as well.
    std::vector<Run> runs(const Keys& keys) const;

    // Give each key the number that `next` returns for its present one, `no_number` for keys that are not here, and
    // erase keys for which it is `no_number`. `next` is called once for each number that is met. If there are
    // `max_keys` already, further ones are not added, but counted in `dropped`.
    std::vector<Moved> change(const Keys& keys, const std::function<Number(Number)>& next, std::size_t max_keys,
                              std::size_t& dropped);

    // Change the numbers of all keys in a row of this table to `targets[number]`, and erase those for which that is
    // `no_number`. Numbers beyond `targets` stay. Memory that is no longer needed is freed. A row beyond the table throws
    // `std::out_of_range`.
    std::vector<Moved> sweep(std::size_t row, std::span<const Number> targets);

   private:
    struct Entry {
        std::array<std::uint8_t, key_bytes> key;
        Number number;
    };
    using Place = std::uint32_t;  // Part of the hash, and 1 + the number of the entry; `vacant` or `erased`.

    struct Row {
        std::vector<Place> places;  // None, or a power of two.
        std::vector<std::unique_ptr<Entry[]>> blocks;
        std::size_t entries = 0;
        std::size_t used = 0;  // Places that are not vacant.
    };

    struct Found {
        std::size_t place;
        bool known;
    };

    static Entry& entry(const Row& row, std::size_t number);
    Found locate(const Row& row, std::uint64_t hash, const std::uint8_t* key) const;
    const Place* first_place(std::uint64_t hash) const;
    const Entry* first_entry(std::uint64_t hash) const;
    void prepare(const Keys& keys, std::size_t start, std::span<std::uint64_t> hashes) const;
    Number number_of(std::uint64_t hash, const std::uint8_t* key) const;
    bool insert(Row& row, std::uint64_t hash, const std::uint8_t* key, Number number);
    void erase(Row& row, std::size_t place);
    void make_room(Row& row);
    void place_all(Row& row, std::size_t places);
    static void free_blocks(Row& row);
    std::size_t limit(const Row& row) const;

    KeyHash hash_;
    std::array<Row, rows> rows_;
    std::size_t size_ = 0;
};

}  // namespace kvtier::holders
