#include "kvtier/key_rows.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace kvtier::catalog {

namespace {

constexpr std::size_t group = 16;  // Keys whose cache misses overlap.
constexpr std::size_t first_places = 8;

std::uint32_t tag_of(std::uint64_t hash) {
    return static_cast<std::uint32_t>(hash >> 32);
}

}  // namespace

Key key_at(KeyColumn column, std::int64_t row) {
    if (row < 0 || (static_cast<std::size_t>(row) + 1) * key_bytes > column.size()) {
        throw std::out_of_range("a row is beyond the column of keys");
    }
    return column.data() + static_cast<std::size_t>(row) * key_bytes;
}

// Return the place of a key, or the empty one where the search for it ends. The table must not be empty.
std::size_t KeyRows::probe(const Table& table, std::uint32_t tag, Key key, KeyColumn column) const {
    const std::size_t mask = table.places.size() - 1;
    for (std::size_t at = tag & mask;; at = (at + 1) & mask) {
        const Place& place = table.places[at];
        if (place.row == no_row) return at;
        if (place.hash == tag && std::memcmp(key_at(column, place.row), key, key_bytes) == 0) return at;
    }
}

Row KeyRows::find(Key key, KeyColumn column) const {
    if (key == nullptr) return no_row;
    const std::uint64_t hashed = hash_(key);
    const Table& among = table(hashed);
    return among.places.empty() ? no_row : among.places[probe(among, tag_of(hashed), key, column)].row;
}

void KeyRows::find_all(std::span<const Key> keys, std::span<Row> rows, KeyColumn column) const {
    std::array<std::uint64_t, group> hashes;
    for (std::size_t start = 0; start < keys.size(); start += group) {
        const std::size_t count = std::min(group, keys.size() - start);
        for (std::size_t at = 0; at < count; ++at) {
            if (keys[start + at] == nullptr) continue;
            hashes[at] = hash_(keys[start + at]);
            const std::vector<Place>& places = table(hashes[at]).places;
            if (!places.empty()) __builtin_prefetch(&places[tag_of(hashes[at]) & (places.size() - 1)]);
        }
        for (std::size_t at = 0; at < count; ++at) {
            if (keys[start + at] == nullptr) continue;
            const std::vector<Place>& places = table(hashes[at]).places;
            if (places.empty()) continue;
            const Place& place = places[tag_of(hashes[at]) & (places.size() - 1)];
            if (place.row != no_row) __builtin_prefetch(key_at(column, place.row));
        }
        for (std::size_t at = 0; at < count; ++at) {
            const Key key = keys[start + at];
            const Table* among = key == nullptr ? nullptr : &table(hashes[at]);
            rows[start + at] = among == nullptr || among->places.empty()
                                   ? no_row
                                   : among->places[probe(*among, tag_of(hashes[at]), key, column)].row;
        }
    }
}

bool KeyRows::insert(Row row, KeyColumn column) {
    const Key key = key_at(column, row);
    const std::uint64_t hashed = hash_(key);
    Table& into = table(hashed);
    if ((into.used + 1) * 4 > into.places.size() * 3) grow(into);
    Place& place = into.places[probe(into, tag_of(hashed), key, column)];
    if (place.row != no_row) return false;
    place = {tag_of(hashed), row};
    ++into.used;
    return true;
}

bool KeyRows::erase(Row row, KeyColumn column) {
    const Key key = key_at(column, row);
    const std::uint64_t hashed = hash_(key);
    Table& from = table(hashed);
    if (from.places.empty()) return false;
    std::size_t hole = probe(from, tag_of(hashed), key, column);
    if (from.places[hole].row != row) return false;
    const std::size_t mask = from.places.size() - 1;
    // Move back what would no longer be found behind the hole (Knuth, The Art of Computer Programming 6.4, R).
    for (std::size_t at = (hole + 1) & mask; from.places[at].row != no_row; at = (at + 1) & mask) {
        const std::size_t home = from.places[at].hash & mask;
        if (((at - home) & mask) < ((at - hole) & mask)) continue;
        from.places[hole] = from.places[at];
        hole = at;
    }
    from.places[hole].row = no_row;
    --from.used;
    return true;
}

void KeyRows::grow(Table& table) {
    std::vector<Place> places(std::max(first_places, 2 * table.places.size()), Place{0, no_row});
    const std::size_t mask = places.size() - 1;
    for (const Place& place : table.places) {
        if (place.row == no_row) continue;
        std::size_t at = place.hash & mask;
        while (places[at].row != no_row) at = (at + 1) & mask;
        places[at] = place;
    }
    table.places.swap(places);
}

}  // namespace kvtier::catalog
