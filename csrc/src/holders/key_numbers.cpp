#include "kvtier/key_numbers.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

namespace kvtier::holders {

namespace {

constexpr std::size_t group = 32;  // Keys whose cache misses overlap.
constexpr std::size_t block_entries = 64;
constexpr std::size_t first_places = 16;
constexpr unsigned entry_bits = 20;
constexpr std::uint32_t entry_mask = (1u << entry_bits) - 1;
constexpr std::size_t max_entries = entry_mask - 1;

constexpr std::uint32_t vacant = 0;
constexpr std::uint32_t erased = 1u << entry_bits;  // A part of a hash without an entry.

// Three parts of the hash, that do not overlap: bits 0 to 9, 10 to 21 and 32 to 63.
std::size_t row_of(std::uint64_t hash) { return hash % KeyNumbers::rows; }
std::uint32_t tag_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 10) << entry_bits; }
std::size_t home_of(std::uint64_t hash) { return static_cast<std::size_t>(hash >> 32); }

std::size_t entry_of(std::uint32_t place) { return (place & entry_mask) - 1; }

bool has_entry(std::uint32_t place) { return (place & entry_mask) != 0; }

bool may_be(std::uint32_t place, std::uint32_t tag) { return has_entry(place) && (place & ~entry_mask) == tag; }

// What `next` returned for the numbers of one call, and how many keys it concerned.
class Transitions {
   public:
    explicit Transitions(const std::function<Number(Number)>& next) : next_(next) {}

    Moved& from(Number before) {
        if (last_ < moved_.size() && moved_[last_].before == before) return moved_[last_];
        const auto known = index_.find(before);
        if (known != index_.end()) {
            last_ = known->second;
        } else {
            const Moved met{before, next_(before), 0};
            index_.emplace(before, moved_.size());
            last_ = moved_.size();
            moved_.push_back(met);
        }
        return moved_[last_];
    }

    std::vector<Moved> changed() {
        std::erase_if(moved_, [](const Moved& moved) { return moved.keys == 0 || moved.before == moved.after; });
        return std::move(moved_);
    }

   private:
    const std::function<Number(Number)>& next_;
    std::unordered_map<Number, std::size_t> index_;
    std::vector<Moved> moved_;
    std::size_t last_ = 0;
};

}  // namespace

Keys::Keys(std::span<const std::uint8_t> joined) : joined_(joined) {
    if (joined.size() % key_bytes != 0) throw std::invalid_argument("not a whole number of keys");
}

KeyNumbers::Entry& KeyNumbers::entry(const Row& row, std::size_t number) {
    return row.blocks[number / block_entries][number % block_entries];
}

// Return the place of a key, or the one that it gets. The row must have places.
KeyNumbers::Found KeyNumbers::locate(const Row& row, std::uint64_t hash, const std::uint8_t* key) const {
    const std::size_t mask = row.places.size() - 1;
    const std::uint32_t tag = tag_of(hash);
    std::size_t free = row.places.size();
    for (std::size_t at = home_of(hash) & mask;; at = (at + 1) & mask) {
        const Place place = row.places[at];
        if (place == vacant) return {free < row.places.size() ? free : at, false};
        if (place == erased) {
            if (free == row.places.size()) free = at;
        } else if (may_be(place, tag) && std::memcmp(entry(row, entry_of(place)).key.data(), key, key_bytes) == 0) {
            return {at, true};
        }
    }
}

// The place where the search for a key begins; nullptr if the row has none.
const KeyNumbers::Place* KeyNumbers::first_place(std::uint64_t hash) const {
    const std::vector<Place>& places = rows_[row_of(hash)].places;
    return places.empty() ? nullptr : &places[home_of(hash) & (places.size() - 1)];
}

// The entry that a search looks at first; nullptr if there is none.
const KeyNumbers::Entry* KeyNumbers::first_entry(std::uint64_t hash) const {
    const Row& row = rows_[row_of(hash)];
    if (row.places.empty()) return nullptr;
    const std::size_t mask = row.places.size() - 1;
    const std::uint32_t tag = tag_of(hash);
    std::size_t at = home_of(hash) & mask;
    while (row.places[at] != vacant && !may_be(row.places[at], tag)) at = (at + 1) & mask;
    return row.places[at] == vacant ? nullptr : &entry(row, entry_of(row.places[at]));
}

// Hash keys, and prefetch what they are compared with. One function: GCC removes the calls of one that only prefetches.
void KeyNumbers::prepare(const Keys& keys, std::size_t start, std::span<std::uint64_t> hashes) const {
    for (std::size_t at = 0; at < hashes.size(); ++at) {
        hashes[at] = hash_(keys[start + at]);
        __builtin_prefetch(first_place(hashes[at]));
    }
    for (const std::uint64_t hash : hashes) {
        const Entry* first = first_entry(hash);
        __builtin_prefetch(first);
        if (first != nullptr) __builtin_prefetch(&first->number);  // Often in the next cache line.
    }
}

Number KeyNumbers::number_of(std::uint64_t hash, const std::uint8_t* key) const {
    const Row& row = rows_[row_of(hash)];
    if (row.places.empty()) return no_number;
    const Found found = locate(row, hash, key);
    return found.known ? entry(row, entry_of(row.places[found.place])).number : no_number;
}

void KeyNumbers::find(const Keys& keys, std::span<Number> numbers) const {
    if (numbers.size() != keys.size()) throw std::invalid_argument("keys and numbers must be as many");
    std::array<std::uint64_t, group> hashes;
    for (std::size_t start = 0; start < keys.size(); start += group) {
        const std::size_t count = std::min(group, keys.size() - start);
        prepare(keys, start, std::span(hashes).first(count));
        for (std::size_t at = 0; at < count; ++at) numbers[start + at] = number_of(hashes[at], keys[start + at]);
    }
}

std::vector<Run> KeyNumbers::runs(const Keys& keys) const {
    std::vector<Run> runs;
    std::array<Number, 4 * group> numbers;
    for (std::size_t start = 0; start < keys.size(); start += numbers.size()) {
        const std::size_t count = std::min(numbers.size(), keys.size() - start);
        find(Keys({keys[start], count * key_bytes}), std::span(numbers).first(count));
        for (std::size_t at = 0; at < count; ++at) {
            if (runs.empty() || numbers[at] != runs.back().number) runs.push_back({start + at, numbers[at]});
            if (numbers[at] == no_number) return runs;
        }
    }
    return runs;
}

std::vector<Moved> KeyNumbers::change(const Keys& keys, const std::function<Number(Number)>& next,
                                      std::size_t max_keys, std::size_t& dropped) {
    Transitions transitions(next);
    std::array<std::uint64_t, group> hashes;
    for (std::size_t start = 0; start < keys.size(); start += group) {
        const std::size_t count = std::min(group, keys.size() - start);
        prepare(keys, start, std::span(hashes).first(count));
        for (std::size_t at = 0; at < count; ++at) {
            const std::uint8_t* key = keys[start + at];
            Row& row = rows_[row_of(hashes[at])];
            const Found found = row.places.empty() ? Found{0, false} : locate(row, hashes[at], key);
            Entry* known = found.known ? &entry(row, entry_of(row.places[found.place])) : nullptr;
            Moved& moved = transitions.from(known != nullptr ? known->number : no_number);
            if (moved.after == moved.before) continue;
            if (known == nullptr) {
                if (size_ >= max_keys || !insert(row, hashes[at], key, moved.after)) {
                    ++dropped;
                    continue;
                }
            } else if (moved.after == no_number) {
                erase(row, found.place);
            } else {
                known->number = moved.after;
            }
            ++moved.keys;
        }
    }
    return transitions.changed();
}

// Insert a key that is not in the row. Return false if the row is full, which takes a billion keys.
bool KeyNumbers::insert(Row& row, std::uint64_t hash, const std::uint8_t* key, Number number) {
    if (row.entries >= max_entries) return false;
    if (row.entries == row.blocks.size() * block_entries) {
        row.blocks.emplace_back(new Entry[block_entries]);
    }
    if (row.used + 1 > limit(row)) make_room(row);
    Entry& added = entry(row, row.entries);
    std::memcpy(added.key.data(), key, key_bytes);
    added.number = number;
    Place& place = row.places[locate(row, hash, key).place];
    row.used += place == vacant;
    place = tag_of(hash) | static_cast<Place>(++row.entries);
    ++size_;
    return true;
}

void KeyNumbers::erase(Row& row, std::size_t place) {
    const std::size_t hole = entry_of(row.places[place]), last = row.entries - 1;
    row.places[place] = erased;
    if (hole != last) {
        // The last entry moves to the hole.
        const Entry& moved = entry(row, last);
        const std::uint64_t hash = hash_(moved.key.data());
        const std::size_t mask = row.places.size() - 1;
        std::size_t at = home_of(hash) & mask;
        while (row.places[at] != (tag_of(hash) | static_cast<Place>(last + 1))) at = (at + 1) & mask;
        row.places[at] = tag_of(hash) | static_cast<Place>(hole + 1);
        entry(row, hole) = moved;
    }
    --row.entries;
    --size_;
    free_blocks(row);
}

// Keep one block more than needed, so that a key that comes and goes does not allocate each time.
void KeyNumbers::free_blocks(Row& row) {
    const std::size_t needed = (row.entries + block_entries - 1) / block_entries;
    if (row.blocks.size() > needed + 1) row.blocks.resize(needed + 1);
}

// The places that may be in use: between 65 and 85 %, other for each row.
std::size_t KeyNumbers::limit(const Row& row) const {
    const auto number = static_cast<std::size_t>(&row - rows_.data());
    return row.places.size() * (65 * rows + 20 * number) / (100 * rows);
}

void KeyNumbers::make_room(Row& row) {
    // If many places are of erased keys, it is enough to clear them.
    const bool grows = row.entries + 1 > limit(row) * 7 / 8;
    place_all(row, std::max(first_places, grows ? 2 * row.places.size() : row.places.size()));
}

void KeyNumbers::place_all(Row& row, std::size_t places) {
    std::vector<Place>(places, vacant).swap(row.places);
    const std::size_t mask = places - 1;
    std::array<std::uint64_t, group> hashes;
    for (std::size_t start = 0; start < row.entries; start += group) {
        const std::size_t count = std::min(group, row.entries - start);
        for (std::size_t at = 0; at < count; ++at) {
            hashes[at] = hash_(entry(row, start + at).key.data());
            __builtin_prefetch(&row.places[home_of(hashes[at]) & mask], 1);
        }
        for (std::size_t at = 0; at < count; ++at) {
            std::size_t place = home_of(hashes[at]) & mask;
            while (row.places[place] != vacant) place = (place + 1) & mask;
            row.places[place] = tag_of(hashes[at]) | static_cast<Place>(start + at + 1);
        }
    }
    row.used = row.entries;
}

std::vector<Moved> KeyNumbers::sweep(std::size_t number, std::span<const Number> targets) {
    if (number >= rows) throw std::out_of_range("no such row");
    Row& row = rows_[number];
    const std::function<Number(Number)> next = [targets](Number before) { return targets[before]; };
    Transitions transitions(next);
    std::size_t kept = 0;
    for (std::size_t at = 0; at < row.entries; ++at) {
        const Entry& swept = entry(row, at);
        Number after = swept.number;
        if (after < targets.size() && targets[after] != after) {
            Moved& moved = transitions.from(after);
            ++moved.keys;
            after = moved.after;
        }
        if (after == no_number) continue;
        Entry& target = entry(row, kept);
        if (kept++ != at) target = swept;
        target.number = after;
    }
    if (kept < row.entries) {
        size_ -= row.entries - kept;
        row.entries = kept;
        free_blocks(row);
        std::size_t places = row.places.size();
        while (places > first_places && kept <= places / 4) places /= 2;
        place_all(row, places);
    }
    return transitions.changed();
}

}  // namespace kvtier::holders
