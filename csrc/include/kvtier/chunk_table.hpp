// Batch operations of kvtier/catalog/table.py on the flat columns of the catalog. See there for their meaning.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvtier/key_rows.hpp"

namespace kvtier::catalog {

using Rows = std::span<const std::uint32_t>;
using Count = std::uint32_t;

// The columns, without those of single tiers. Their length is the number of rows. Not owned.
struct Columns {
    std::span<std::uint8_t> keys;
    std::span<Row> parents;
    std::span<std::uint8_t> ready, pending;  // Bit masks of tiers.
};

// What `ChunkTable::fill` writes besides the columns.
struct Description {
    std::span<std::uint64_t> lengths;
    std::span<std::uint32_t> spaces, generations;
    std::uint32_t space, generation;
};

// A row outside of the columns throws `std::out_of_range`, before the batch has changed anything unless the columns are
// corrupt. Not thread-safe.
class ChunkTable {
   public:
    std::int64_t parents_only = 0;  // Rows of chunks that are in no tier, but the parent of one that is.

    const KeyRows& index() const { return index_; }

    // Append the rows of the leading keys that are READY in a tier of `among`.
    void prefix(std::span<const Key> keys, std::uint8_t among, const Columns& columns, std::vector<Row>& rows) const;

    // Describe consecutive chunks in vacant rows. Throws `std::invalid_argument`, and indexes none, if a key is
    // indexed already or occurs twice.
    void fill(std::span<const Key> keys, Rows rows, std::span<const std::uint64_t> lengths, Row parent,
              const Columns& columns, const Description& description);

    // Set a bit in the masks of rows, and count the children of their parents. Return the sum of the lengths.
    static std::uint64_t enter(Rows rows, std::uint8_t bit, std::span<std::uint8_t> masks, const Columns& columns,
                               std::span<const std::uint64_t> lengths, std::span<std::uint64_t> own_lengths,
                               std::span<Count> children);

    // Clear a bit in both masks of the rows. Return the sum of the lengths; or nothing, and change nothing, if one of
    // the rows does not have it, is `no_row`, or occurs twice. That is at `failed` then.
    static std::optional<std::uint64_t> leave(std::span<const Row> rows, std::uint8_t bit, const Columns& columns,
                                              std::span<const std::uint64_t> lengths, std::size_t& failed);

    // After `leave`: uncount the children in `tier`, and free rows that are in no tier any more, except for parents.
    // Return the freed rows.
    std::vector<Row> release(Rows rows, std::size_t tier, const Columns& columns,
                             std::span<const std::span<Count>> children);

    // Append to `freed` those of the rows that are in no tier and no parents, and free them.
    void free_parents(Rows rows, const Columns& columns, std::span<const std::span<Count>> children,
                      std::vector<Row>& freed);

   private:
    KeyRows index_;
};

// One tier, as `select` sees it.
struct Tier {
    std::span<const Row> parents;
    std::span<const std::uint64_t> lengths;
    std::span<const Count> children;
    std::span<const std::uint8_t> ready;
    std::uint8_t mask;  // Only chunks that are READY in one of these tiers may leave.
};

using IsRow = std::function<bool(Row)>;

// How much to choose: see `select_victims` in kvtier/catalog/selection.py. A negative number is no limit.
struct Wanted {
    std::int64_t bytes;
    std::int64_t limit;
    std::int64_t deferred;
    bool whole = true;  // False if the order leaves out the chunks that the policy prefers to new ones.
};

// Choose victims in the order of `next`, which returns `no_row` at the end. `is_pinned` and `is_leased` may be empty.
std::vector<Row> select(const std::function<Row()>& next, const Tier& tier, const IsRow& is_pinned,
                        const IsRow& is_leased, Wanted wanted);

}  // namespace kvtier::catalog
