#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>

#include "kvtier/simulation.hpp"

namespace kvtier::simulation {

namespace {

__extension__ using Product = unsigned __int128;

constexpr std::uint64_t max_number = std::numeric_limits<Number>::max();

// Numbers ids from 0, by their first use: a hash table with linear probing, at most half full, which only grows.
class FirstUses {
   public:
    FirstUses() {
        std::random_device random;
        seed_ = (std::uint64_t{random()} << 32) | random();
    }

    Number of(std::uint64_t id) {
        if (2 * (ids_.size() + 1) > places_.size()) grow();
        Number& place = places_[find(id)];
        if (place == 0) {
            if (ids_.size() == max_number) throw std::length_error("too many different chunks");
            ids_.push_back(id);
            place = static_cast<Number>(ids_.size());
        }
        return place - 1;
    }

    std::uint64_t size() const { return ids_.size(); }

   private:
    // Return the place of an id, or the empty one where the search for it ends.
    std::size_t find(std::uint64_t id) const {
        const Product product = static_cast<Product>(id ^ seed_) * 0x9E3779B97F4A7C15u;
        const std::size_t mask = places_.size() - 1;
        std::size_t at = static_cast<std::size_t>(product ^ (product >> 64)) & mask;
        while (places_[at] != 0 && ids_[places_[at] - 1] != id) at = (at + 1) & mask;
        return at;
    }

    void grow() {
        places_.assign(2 * places_.size(), 0);
        for (std::size_t number = 0; number < ids_.size(); ++number) {
            places_[find(ids_[number])] = static_cast<Number>(number + 1);
        }
    }

    std::uint64_t seed_;
    std::vector<Number> places_ = std::vector<Number>(512);  // Numbers from 1; 0 if empty.
    std::vector<std::uint64_t> ids_;
};

// Number the chunks, without those that a request had before. `number_of` returns the number of an id.
template <typename NumberOf>
Numbered number(std::span<const std::uint64_t> ids, std::span<std::uint64_t> ends, std::span<Number> numbered,
                NumberOf number_of) {
    std::vector<Number> last;  // By number: the last request that has it, counted from 1.
    Numbered result{};
    std::uint64_t at = 0;
    for (std::size_t request = 0; request < ends.size(); ++request) {
        for (const std::uint64_t stop = ends[request]; at < stop; ++at) {
            const Number chunk = number_of(ids[at]);
            if (chunk >= last.size()) last.resize(std::size_t{chunk} + 1);
            if (last[chunk] == request + 1) continue;
            result.unique += last[chunk] == 0;
            last[chunk] = static_cast<Number>(request + 1);
            numbered[result.kept++] = chunk;
        }
        ends[request] = result.kept;
    }
    return result;
}

void check(std::span<const std::uint64_t> ids, std::span<const std::uint64_t> ends, std::span<const Number> numbered) {
    const bool ordered = std::is_sorted(ends.begin(), ends.end());
    if (!ordered || ends.empty() || ends.back() != ids.size() || numbered.size() != ids.size()) {
        throw std::invalid_argument("chunks and the ends of requests do not fit together");
    }
    if (ends.size() >= max_number) throw std::invalid_argument("too many requests");
}

}  // namespace

Numbered number_chunks(std::span<const std::uint64_t> ids, std::span<std::uint64_t> ends, std::uint64_t max_vacant,
                       std::span<Number> numbered) {
    check(ids, ends, numbered);
    const std::uint64_t highest = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
    FirstUses first_uses;
    if (highest >= max_number || highest >= max_vacant * ids.size()) {
        Numbered result =
            number(ids, ends, numbered, [&first_uses](std::uint64_t id) { return first_uses.of(id); });
        result.numbers = first_uses.size();
        return result;
    }
    Numbered result = number(ids, ends, numbered, [](std::uint64_t id) { return static_cast<Number>(id); });
    result.numbers = highest + 1;
    if (highest >= max_vacant * result.kept) {  // Fewer chunks are left.
        for (Number& chunk : numbered.first(result.kept)) chunk = first_uses.of(chunk);
        result.numbers = first_uses.size();
    }
    return result;
}

}  // namespace kvtier::simulation
