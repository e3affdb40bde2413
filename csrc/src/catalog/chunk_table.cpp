#include "kvtier/chunk_table.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

namespace kvtier::catalog {

namespace {

constexpr std::size_t group = 16;  // Keys to look up when a run ends.

template <typename Column>
void check(Rows rows, const Column& column) {
    for (const std::uint32_t row : rows) {
        if (row >= column.size()) throw std::out_of_range("a row is beyond a column");
    }
}

std::size_t place_of(Row row, std::size_t size) {
    if (row < 0 || static_cast<std::size_t>(row) >= size) throw std::out_of_range("a row is beyond a column");
    return static_cast<std::size_t>(row);
}

bool is_parent(std::size_t row, std::span<const std::span<Count>> children) {
    return std::any_of(children.begin(), children.end(),
                       [row](const std::span<Count>& counts) { return row < counts.size() && counts[row] != 0; });
}

}  // namespace

void ChunkTable::prefix(std::span<const Key> keys, std::uint8_t among, const Columns& columns,
                        std::vector<Row>& rows) const {
    const std::size_t known = std::min(columns.ready.size(), columns.keys.size() / key_bytes);
    std::array<Row, group> found;
    while (rows.size() < keys.size()) {
        // Chunks that were stored together are in consecutive rows. The row of a chunk that is in no tier may have
        // its former key.
        if (!rows.empty()) {
            const std::size_t next = static_cast<std::size_t>(rows.back()) + 1;
            const Key key = keys[rows.size()];
            if (next < known && (columns.ready[next] & among) != 0 && key != nullptr &&
                std::memcmp(columns.keys.data() + next * key_bytes, key, key_bytes) == 0) {
                rows.push_back(static_cast<Row>(next));
                continue;
            }
        }
        const std::size_t count = std::min(group, keys.size() - rows.size());
        index_.find_all(keys.subspan(rows.size(), count), found, columns.keys);
        for (std::size_t at = 0; at < count; ++at) {
            if (found[at] == no_row || (columns.ready[place_of(found[at], known)] & among) == 0) return;
            rows.push_back(found[at]);
        }
    }
}

void ChunkTable::fill(std::span<const Key> keys, Rows rows, std::span<const std::uint64_t> lengths, Row parent,
                      const Columns& columns, const Description& description) {
    if (keys.size() != rows.size() || lengths.size() != rows.size()) {
        throw std::invalid_argument("keys, rows and lengths must be as many");
    }
    check(rows, columns.parents);
    check(rows, description.lengths);
    check(rows, description.spaces);
    check(rows, description.generations);
    for (std::size_t at = 0; at < rows.size(); ++at) {
        const std::size_t row = rows[at];
        if ((row + 1) * key_bytes > columns.keys.size()) throw std::out_of_range("a row is beyond the column of keys");
        if (keys[at] == nullptr) throw std::invalid_argument("a key must have 32 bytes");
    }
    for (std::size_t at = 0; at < rows.size(); ++at) {
        const std::size_t row = rows[at];
        std::memcpy(columns.keys.data() + row * key_bytes, keys[at], key_bytes);
        columns.parents[row] = parent;
        description.lengths[row] = lengths[at];
        description.spaces[row] = description.space;
        description.generations[row] = description.generation;
        parent = static_cast<Row>(row);
        if (!index_.insert(parent, columns.keys)) {
            while (at > 0) index_.erase(static_cast<Row>(rows[--at]), columns.keys);
            throw std::invalid_argument("a chunk occurs twice");
        }
    }
}

std::uint64_t ChunkTable::enter(Rows rows, std::uint8_t bit, std::span<std::uint8_t> masks, const Columns& columns,
                                std::span<const std::uint64_t> lengths, std::span<std::uint64_t> own_lengths,
                                std::span<Count> children) {
    check(rows, masks);
    check(rows, columns.parents);
    check(rows, lengths);
    if (!own_lengths.empty()) check(rows, own_lengths);
    for (const std::uint32_t row : rows) {
        if (columns.parents[row] >= 0) place_of(columns.parents[row], children.size());
    }
    std::uint64_t bytes = 0;
    for (const std::uint32_t row : rows) {
        masks[row] |= bit;
        bytes += lengths[row];
        if (!own_lengths.empty()) own_lengths[row] = lengths[row];
        if (columns.parents[row] >= 0) ++children[static_cast<std::size_t>(columns.parents[row])];
    }
    return bytes;
}

std::optional<std::uint64_t> ChunkTable::leave(std::span<const Row> rows, std::uint8_t bit, const Columns& columns,
                                               std::span<const std::uint64_t> lengths, std::size_t& failed) {
    const std::size_t size = std::min({columns.ready.size(), columns.pending.size(), lengths.size()});
    const auto unset = static_cast<std::uint8_t>(~bit);
    std::vector<std::uint8_t> were_ready;
    were_ready.reserve(rows.size());
    std::uint64_t bytes = 0;
    for (const Row row : rows) {
        const std::size_t at = row == no_row ? 0 : place_of(row, size);
        if (row == no_row || ((columns.ready[at] | columns.pending[at]) & bit) == 0) {
            failed = were_ready.size();
            for (std::size_t undo = 0; undo < failed; ++undo) {
                auto& masks = were_ready[undo] != 0 ? columns.ready : columns.pending;
                masks[static_cast<std::size_t>(rows[undo])] |= bit;
            }
            return std::nullopt;
        }
        were_ready.push_back(columns.ready[at] & bit);
        columns.ready[at] &= unset;
        columns.pending[at] &= unset;
        bytes += lengths[at];
    }
    return bytes;
}

std::vector<Row> ChunkTable::release(Rows rows, std::size_t tier, const Columns& columns,
                                     std::span<const std::span<Count>> children) {
    check(rows, columns.parents);
    check(rows, columns.ready);
    check(rows, columns.pending);
    const std::span<Count> counts = children[tier];
    std::vector<std::uint32_t> above;
    above.reserve(rows.size());
    for (const std::uint32_t row : rows) {
        if (columns.parents[row] < 0) continue;
        const std::size_t parent = place_of(columns.parents[row], counts.size());
        if (counts[parent] != 0) --counts[parent];
        above.push_back(static_cast<std::uint32_t>(parent));
    }
    const bool may_free_parents = parents_only > 0;
    std::vector<Row> freed;
    freed.reserve(rows.size());
    for (const std::uint32_t row : rows) {
        if ((columns.ready[row] | columns.pending[row]) != 0) continue;
        if (is_parent(row, children)) {
            columns.parents[row] = no_row;
            ++parents_only;
        } else if (index_.erase(static_cast<Row>(row), columns.keys)) {
            freed.push_back(static_cast<Row>(row));
        }
    }
    // Chunks that have just left are freed above, if they have no children left.
    if (may_free_parents) free_parents(above, columns, children, freed);
    return freed;
}

void ChunkTable::free_parents(Rows rows, const Columns& columns, std::span<const std::span<Count>> children,
                              std::vector<Row>& freed) {
    check(rows, columns.ready);
    check(rows, columns.pending);
    for (const std::uint32_t row : rows) {
        if ((columns.ready[row] | columns.pending[row]) != 0 || is_parent(row, children)) continue;
        // Otherwise the row was freed together with its last child's.
        if (!index_.erase(static_cast<Row>(row), columns.keys)) continue;
        freed.push_back(static_cast<Row>(row));
        --parents_only;
    }
}

}  // namespace kvtier::catalog
