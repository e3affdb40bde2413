// Lists of moves in pinned memory, which kernels read directly.
#pragma once

#include <cstddef>
#include <vector>

#include "calls.hpp"
#include "kernel.hpp"

namespace kvtier::cuda {

// A pool that only grows: allocating and freeing pinned memory takes milliseconds and may wait for the whole device,
// the engine's kernels included (CUDA C++ Programming Guide, "Implicit Synchronization").
class MoveLists {
public:
    static constexpr std::size_t moves_each = 2048;

    // The first lists are allocated at once: enough for some GiB in flight.
    MoveLists() { grow(); }
    ~MoveLists() {
        for (Move* const slab : slabs_) ignore(cudaFreeHost(slab));
    }
    MoveLists(const MoveLists&) = delete;
    MoveLists& operator=(const MoveLists&) = delete;

    Move* take() {
        if (free_.empty()) grow();
        Move* const list = free_.back();
        free_.pop_back();
        return list;
    }

    // Take lists back that no kernel reads any more.
    void put(std::vector<Move*>& lists) {
        free_.insert(free_.end(), lists.begin(), lists.end());
        lists.clear();
    }

private:
    static constexpr std::size_t lists_each = 128;

    void grow() {
        Move* slab = nullptr;
        check(cudaHostAlloc(reinterpret_cast<void**>(&slab), lists_each * moves_each * sizeof(Move),
                            cudaHostAllocMapped),
              "cudaHostAlloc");
        slabs_.push_back(slab);
        for (std::size_t list = 0; list < lists_each; ++list) free_.push_back(slab + list * moves_each);
    }

    std::vector<Move*> slabs_;
    std::vector<Move*> free_;
};

}  // namespace kvtier::cuda
