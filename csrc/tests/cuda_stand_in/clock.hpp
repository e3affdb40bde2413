// Which operations happen before which: a vector clock with one entry per stream.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_stand_in {

// A position in the order of all operations: for each stream, the number of its last operation before it.
class Clock {
public:
    bool includes(std::size_t stream, std::uint64_t number) const {
        return stream < last_.size() && last_[stream] >= number;
    }

    void include(std::size_t stream, std::uint64_t number) {
        if (stream >= last_.size()) last_.resize(stream + 1);
        last_[stream] = std::max(last_[stream], number);
    }

    void join(const Clock& other) {
        for (std::size_t stream = 0; stream < other.last_.size(); ++stream) include(stream, other.last_[stream]);
    }

private:
    std::vector<std::uint64_t> last_;
};

}  // namespace cuda_stand_in
