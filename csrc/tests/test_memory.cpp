#include "kvtier/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"

using kvtier::large_page_bytes;
using kvtier::LargePages;

namespace {

// A memfd and its mapping, closed and unmapped at the end.
class Memory {
public:
    explicit Memory(std::size_t length) : file_(::memfd_create("test", MFD_CLOEXEC)), length_(length) {
        CHECK(::ftruncate(file_, static_cast<off_t>(length)) == 0);
        bytes_ = static_cast<std::uint8_t*>(
            ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0));
        CHECK(bytes_ != MAP_FAILED);
    }
    ~Memory() {
        ::munmap(bytes_, length_);
        ::close(file_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    int file() const { return file_; }
    std::uint8_t* bytes() const { return bytes_; }
    std::size_t length() const { return length_; }

private:
    int file_;
    std::size_t length_;
    std::uint8_t* bytes_ = nullptr;
};

std::uint8_t pattern(std::size_t at) {
    return static_cast<std::uint8_t>(at / 4096 * 7 + at);
}

bool has_pattern(const Memory& memory) {
    for (std::size_t at = 0; at < memory.length(); at += 509) {
        if (memory.bytes()[at] != pattern(at)) return false;
    }
    return true;
}

}  // namespace

TEST(what_lies_in_memory_stays) {
    const Memory memory(8 * large_page_bytes + 4096);
    for (std::size_t at = 0; at < memory.length(); ++at) memory.bytes()[at] = pattern(at);
    LargePages pages(memory.file(), memory.length());
    pages.reach(1);
    pages.wait();
    CHECK(pages.taken() <= 8 * large_page_bytes);
    CHECK(pages.taken() % large_page_bytes == 0);
    CHECK(has_pattern(memory));
}

TEST(memory_is_used_meanwhile) {
    const Memory memory(32 * large_page_bytes);
    std::vector<std::thread> users;
    LargePages pages(memory.file(), memory.length());
    pages.reach(0);
    for (unsigned user = 0; user < 2; ++user) {
        users.emplace_back([&, user] {
            const std::size_t half = memory.length() / 2;
            for (std::size_t at = user * half; at < (user + 1) * half; ++at) memory.bytes()[at] = pattern(at);
        });
    }
    for (std::thread& user : users) user.join();
    pages.wait();
    CHECK(has_pattern(memory));
}

TEST(no_more_is_taken_than_is_near) {
    const Memory memory(2 * LargePages::ahead);
    LargePages pages(memory.file(), memory.length());
    pages.wait();
    CHECK(pages.taken() == 0);
    pages.reach(0);
    pages.wait();
    CHECK(pages.taken() <= LargePages::ahead);
    pages.reach(3 * large_page_bytes + 1);
    pages.reach(large_page_bytes);
    pages.wait();
    CHECK(pages.taken() <= LargePages::ahead + 3 * large_page_bytes);
}

TEST(less_than_a_large_page_is_left_alone) {
    const Memory memory(large_page_bytes - 4096);
    LargePages pages(memory.file(), memory.length());
    pages.reach(memory.length());
    pages.wait();
    CHECK(pages.taken() == 0);
}

TEST(it_ends_in_the_midst_and_once) {
    const Memory memory(LargePages::ahead);
    LargePages pages(memory.file(), memory.length());
    pages.reach(memory.length());
    const int next = ::dup(memory.file());
    ::close(next);
    pages.close();
    pages.close();
    CHECK(::dup(memory.file()) < next);  // its own is closed
    pages.reach(memory.length());
    pages.wait();
}

TEST(memory_that_is_unmapped_and_closed_meanwhile_is_none_of_its_business) {
    std::optional<Memory> memory(std::in_place, LargePages::ahead);
    LargePages pages(memory->file(), memory->length());
    pages.reach(0);
    memory.reset();
    pages.wait();
}

TEST(what_is_no_file_is_refused) {
    CHECK_THROWS(std::system_error, LargePages(-1, large_page_bytes));
    CHECK_THROWS(std::system_error, (kvtier::map_over(nullptr, -1, 4096), 0));
}

TEST(what_has_no_large_pages_stays_as_it_is) {
    char name[] = "/tmp/kvtier-test-memory-XXXXXX";
    const int file = ::mkstemp(name);
    ::unlink(name);
    CHECK(::ftruncate(file, large_page_bytes) == 0);
    LargePages pages(file, large_page_bytes);
    pages.reach(large_page_bytes);
    pages.wait();
    CHECK(pages.taken() <= large_page_bytes);
    ::close(file);
}

TEST(a_file_is_mapped_where_it_is_wanted) {
    const Memory memory(2 * 4096);
    std::memset(memory.bytes(), 7, memory.length());
    void* place = ::mmap(nullptr, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    auto* bytes = static_cast<std::byte*>(place);
    kvtier::map_over(bytes + 4096, memory.file(), 2 * 4096);
    CHECK(bytes[0] == std::byte{0});
    CHECK(bytes[4096] == std::byte{7});
    bytes[3 * 4096 - 1] = std::byte{9};
    CHECK(memory.bytes()[2 * 4096 - 1] == 9);
    ::munmap(place, 3 * 4096);
}

int main() { return kvtier::test::run(); }
