// Queued transfers. A request may wait for a read but never for a write, so reads go first; but every fourth transfer
// is a write if any is queued, because a disk that is read all the time must be written, too.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "kvtier/disk/transfer.hpp"

namespace kvtier::disk {

class Waiting {
public:
    bool empty() const { return reads_.empty() && writes_.empty(); }

    void push(Transfer* transfer) { (transfer->writes() ? writes_ : reads_).push_back(transfer); }

    // Remove and return the next one. Not if empty().
    Transfer* pop() {
        const bool write = reads_.empty() || (!writes_.empty() && reads_before_ == kReadsBefore);
        reads_before_ = write || writes_.empty() ? 0 : reads_before_ + 1;
        std::deque<Transfer*>& next = write ? writes_ : reads_;
        Transfer* transfer = next.front();
        next.pop_front();
        return transfer;
    }

    // Remove and return the transfers of a batch.
    std::vector<Transfer*> remove(std::uint64_t batch) {
        std::vector<Transfer*> removed;
        for (std::deque<Transfer*>* one : {&reads_, &writes_}) {
            std::erase_if(*one, [&](Transfer* transfer) {
                if (transfer->batch != batch) return false;
                removed.push_back(transfer);
                return true;
            });
        }
        return removed;
    }

private:
    static constexpr unsigned kReadsBefore = 3;

    std::deque<Transfer*> reads_;
    std::deque<Transfer*> writes_;
    unsigned reads_before_ = 0;  // reads that have overtaken the first write
};

}  // namespace kvtier::disk
