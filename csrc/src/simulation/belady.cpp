#include <algorithm>
#include <queue>
#include <stdexcept>

#include "kvtier/simulation.hpp"

namespace kvtier::simulation {

std::span<const Number> Requests::chunks(std::size_t turn, std::span<const Number> all) const {
    const std::size_t request = order[turn];
    if (request >= ends.size()) throw std::out_of_range("there is no such request");
    const std::uint64_t start = request == 0 ? 0 : ends[request - 1];
    if (start > ends[request] || ends[request] > all.size()) throw std::out_of_range("a request has no such chunks");
    return all.subspan(start, ends[request] - start);
}

void next_uses(const Requests& requests, std::span<const Number> chunks, std::uint64_t numbers,
               std::span<Number> uses) {
    if (uses.size() != chunks.size()) throw std::invalid_argument("chunks and their uses must be as many");
    const auto never = static_cast<Number>(requests.order.size());
    std::vector<Number> upcoming(numbers, never);
    for (Number turn = never; turn-- > 0;) {
        const std::span<const Number> asked = requests.chunks(turn, chunks);
        Number* use = uses.data() + (asked.data() - chunks.data());
        for (const Number chunk : asked) {
            if (chunk >= numbers) throw std::out_of_range("there is no such chunk");
            *use++ = upcoming[chunk];
            upcoming[chunk] = turn;
        }
    }
}

std::uint64_t belady_hits(const Requests& requests, std::span<const Number> uses, std::uint64_t capacity,
                          std::size_t interval, const std::function<void()>& advance) {
    const std::size_t never = requests.order.size();
    std::vector<std::uint64_t> held(never);  // By request: chunks in the cache that it uses next.
    std::priority_queue<Number> latest;      // Those with any.
    std::uint64_t total = 0, hits = 0;
    for (std::size_t turn = 0; turn < never; ++turn) {
        hits += held[turn];
        total -= held[turn];
        held[turn] = 0;
        for (const Number use : requests.chunks(turn, uses)) {
            if (use == never) continue;
            if (use <= turn || use > never) throw std::out_of_range("a next use is none");
            if (held[use]++ == 0) latest.push(use);
            ++total;
        }
        while (total > capacity) {
            const Number last = latest.top();
            const std::uint64_t surplus = std::min(held[last], total - capacity);
            held[last] -= surplus;
            total -= surplus;
            if (held[last] == 0) latest.pop();
        }
        if (interval != 0 && turn % interval == interval - 1) advance();
    }
    return hits;
}

}  // namespace kvtier::simulation
