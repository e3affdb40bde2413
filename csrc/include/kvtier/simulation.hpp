// What kvtier/lab/simulation does for each chunk of a trace. See there for the meaning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvtier::simulation {

using Number = std::uint32_t;

struct Numbered {
    std::uint64_t kept;     // Chunks that the requests have now.
    std::uint64_t numbers;  // All of them are below.
    std::uint64_t unique;
};

// Number the chunks of all requests, without those that a request had before, and correct the ends of the requests.
// Numbers are ids, if all are below `max_vacant` times their count, and otherwise count first uses. `numbered` has as
// many places as `ids`. Throws `std::invalid_argument` if the columns do not fit together.
Numbered number_chunks(std::span<const std::uint64_t> ids, std::span<std::uint64_t> ends, std::uint64_t max_vacant,
                       std::span<Number> numbered);

// Requests in the order of their time. Not owned. What is inconsistent throws `std::out_of_range`.
struct Requests {
    std::span<const std::uint64_t> ends;
    std::span<const Number> order;

    // Where the chunks of the request in a turn begin, and how many there are, of `total`.
    std::span<const Number> chunks(std::size_t turn, std::span<const Number> all) const;
};

// Fill `uses`: for each place in `chunks` the turn that uses its chunk next, or the number of requests.
void next_uses(const Requests& requests, std::span<const Number> chunks, std::uint64_t numbers,
               std::span<Number> uses);

// The hits of Belady's optimum. `advance` is called after every `interval` requests.
std::uint64_t belady_hits(const Requests& requests, std::span<const Number> uses, std::uint64_t capacity,
                          std::size_t interval, const std::function<void()>& advance);

}  // namespace kvtier::simulation
