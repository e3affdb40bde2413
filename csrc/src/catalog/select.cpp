#include <algorithm>
#include <stdexcept>

#include "kvtier/chunk_table.hpp"

namespace kvtier::catalog {

namespace {

// What a selection knows of the rows that it has met: a hash table with linear probing, which only grows.
class Met {
   public:
    struct Entry {
        Row row = no_row;
        Count finished = 0;  // How many of its children are chosen or must stay.
        bool deferred = false;
    };

    // The entry of a row, valid until the next call.
    Entry& of(Row row) {
        if (2 * (used_ + 1) > entries_.size()) grow();
        Entry& entry = entries_[find(row)];
        if (entry.row == no_row) {
            entry.row = row;
            ++used_;
        }
        return entry;
    }

   private:
    std::size_t find(Row row) const {
        const std::size_t mask = entries_.size() - 1;
        std::size_t at = (static_cast<std::uint64_t>(row) * 0x9E3779B97F4A7C15u >> 32) & mask;
        while (entries_[at].row != no_row && entries_[at].row != row) at = (at + 1) & mask;
        return at;
    }

    void grow() {
        std::vector<Entry> former(2 * entries_.size());
        former.swap(entries_);
        for (const Entry& entry : former) {
            if (entry.row != no_row) entries_[find(entry.row)] = entry;
        }
    }

    std::vector<Entry> entries_ = std::vector<Entry>(256);
    std::size_t used_ = 0;
};

}  // namespace

std::vector<Row> select(const std::function<Row()>& next, const Tier& tier, const IsRow& is_pinned,
                        const IsRow& is_leased, Wanted wanted) {
    const std::size_t size =
        std::min({tier.parents.size(), tier.lengths.size(), tier.children.size(), tier.ready.size()});
    std::vector<Row> chosen, deferred;
    Met met;

    const auto place = [size](Row row) {
        if (row < 0 || static_cast<std::size_t>(row) >= size) {
            throw std::out_of_range("the eviction policy has offered a row beyond the columns");
        }
        return static_cast<std::size_t>(row);
    };
    const auto choose = [&](Row row) {
        chosen.push_back(row);
        wanted.bytes -= static_cast<std::int64_t>(tier.lengths[place(row)]);
    };
    // Count a row that is chosen or must stay, and choose what was only waiting for it.
    const auto finish = [&](Row row) {
        for (;;) {
            row = tier.parents[place(row)];
            if (row < 0) return;
            Met::Entry& parent = met.of(row);
            ++parent.finished;
            if (!parent.deferred || parent.finished < tier.children[place(row)]) return;
            if (wanted.bytes <= 0) return;
            parent.deferred = false;
            choose(row);
        }
    };

    for (Row row = next(); row != no_row; row = next()) {
        if (wanted.bytes <= 0 || wanted.limit == 0 || wanted.deferred == 0) return chosen;
        const std::size_t at = place(row);
        if ((tier.ready[at] & tier.mask) != 0 && !(is_pinned && is_pinned(row))) {
            if (!(is_leased && is_leased(row))) {
                if (tier.children[at] != 0) {
                    Met::Entry& entry = met.of(row);
                    if (entry.finished < tier.children[at]) {
                        entry.deferred = true;
                        deferred.push_back(row);
                        --wanted.deferred;
                        continue;
                    }
                }
                choose(row);
            }
            --wanted.limit;
        }
        finish(row);
    }
    // In a corrupt, circular chain every chunk waits for another: it must not stay in the tier for ever.
    if (wanted.whole && chosen.empty() && !deferred.empty()) chosen.push_back(deferred.back());
    return chosen;
}

}  // namespace kvtier::catalog
