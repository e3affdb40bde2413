#include "kvtier/simulation.hpp"

namespace kvtier::simulation {

namespace {

bool is_digit(char character) {
    return character >= '0' && character <= '9';
}

// Characters from the front. At the end, `next` is 0, which no JSON has.
class Reader {
   public:
    explicit Reader(std::span<const char> text) : text_(text) {}

    // Skip white space, and then a character. Return whether it is there.
    bool take(char character) {
        skip_space();
        if (next() != character) return false;
        ++at_;
        return true;
    }

    // Read an integer without a sign, of at most 64 bits.
    std::optional<std::uint64_t> number() {
        skip_space();
        if (!is_digit(next())) return std::nullopt;
        const bool zero = next() == '0';
        std::uint64_t value = 0;
        std::size_t digits = 0;
        for (; is_digit(next()); ++at_, ++digits) {
            const auto digit = static_cast<std::uint64_t>(next() - '0');
            if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return std::nullopt;
            if (__builtin_add_overflow(value, digit, &value)) return std::nullopt;
        }
        if (zero && digits > 1) return std::nullopt;
        return value;
    }

    bool ended() const { return at_ == text_.size(); }

   private:
    char next() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    void skip_space() {
        while (next() == ' ' || next() == '\t' || next() == '\n' || next() == '\r') ++at_;
    }

    std::span<const char> text_;
    std::size_t at_ = 0;
};

}  // namespace

std::optional<std::vector<std::uint64_t>> parse_ids(std::span<const char> json) {
    Reader reader(json);
    std::vector<std::uint64_t> ids;
    if (!reader.take('[')) return std::nullopt;
    do {
        const std::optional<std::uint64_t> id = reader.number();
        if (!id) return std::nullopt;
        ids.push_back(*id);
    } while (reader.take(','));
    if (!reader.take(']') || !reader.ended()) return std::nullopt;
    return ids;
}

}  // namespace kvtier::simulation
