// What a transfer asks of the kernel, with the test in the kernel's place: every answer that may come.
#include <fcntl.h>

#include <cerrno>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvtier/disk/transfer.hpp"

using kvtier::disk::kMiss;
using kvtier::disk::kOk;
using kvtier::disk::kPageBytes;
using kvtier::disk::kPatientBytes;
using kvtier::disk::Request;
using kvtier::disk::Transfer;
using Kind = Request::Kind;

namespace {

constexpr std::size_t kLength = 4 * kPageBytes;
constexpr int kDescriptor = 7;

alignas(kPageBytes) std::byte memory[kLength + 512];

Transfer writing(std::size_t shift = 0, bool direct = true) {
    return Transfer::writing("/a/one.kv", "/a/one.1.tmp", memory + shift, kLength, direct);
}

Transfer reading(std::size_t shift = 0, bool direct = true) {
    return Transfer::reading("/a/one.kv", memory + shift, kLength, direct);
}

// Answer one request after another, and return what was asked, `nothing` not among it.
std::vector<Kind> asked(Transfer& transfer, const std::vector<std::int64_t>& answers) {
    std::vector<Kind> kinds;
    for (const std::int64_t answer : answers) {
        kinds.push_back(transfer.request().kind);
        transfer.answer(answer);
    }
    return kinds;
}

using Kinds = std::vector<Kind>;

}  // namespace

TEST(a_write_gets_its_name_last) {
    Transfer transfer = writing();
    Request request = transfer.request();
    CHECK(request.kind == Kind::open && std::string(request.path) == "/a/one.1.tmp");
    CHECK(request.flags == (O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT));
    transfer.answer(kDescriptor);
    request = transfer.request();
    CHECK(request.kind == Kind::write && request.descriptor == kDescriptor && request.memory == memory);
    CHECK(request.length == kLength && request.offset == 0);
    transfer.answer(kLength);
    CHECK(transfer.request().kind == Kind::close);
    transfer.answer(0);
    request = transfer.request();
    CHECK(request.kind == Kind::rename && std::string(request.path) == "/a/one.1.tmp");
    CHECK(std::string(request.other_path) == "/a/one.kv");
    transfer.answer(0);
    CHECK(transfer.finished() && transfer.outcome() == kOk);
}

TEST(a_read_looks_at_the_length_first_and_notes_the_use) {
    Transfer transfer = reading();
    CHECK(transfer.request().flags == (O_RDONLY | O_CLOEXEC | O_DIRECT));
    const Kinds kinds = asked(transfer, {kDescriptor, kLength, kLength, 0, 0});
    CHECK(kinds == Kinds{Kind::open, Kind::measure, Kind::read, Kind::touch, Kind::close});
    CHECK(transfer.finished() && transfer.outcome() == kOk);
}

TEST(a_file_that_is_not_there_is_a_miss) {
    Transfer transfer = reading();
    transfer.answer(-ENOENT);
    CHECK(transfer.finished() && transfer.outcome() == kMiss);
}

TEST(a_file_of_another_length_is_a_miss_and_is_not_read) {
    for (const std::int64_t length : {kLength - 1, kLength + 1, std::size_t{0}}) {
        Transfer transfer = reading();
        const Kinds kinds = asked(transfer, {kDescriptor, length, 0});
        CHECK(kinds == Kinds{Kind::open, Kind::measure, Kind::close});
        CHECK(transfer.finished() && transfer.outcome() == kMiss);
    }
}

TEST(a_file_that_ends_while_it_is_read_is_a_miss) {
    Transfer transfer = reading();
    asked(transfer, {kDescriptor, kLength, kPageBytes, 0, 0});
    CHECK(transfer.finished() && transfer.outcome() == kMiss);
}

TEST(a_use_that_cannot_be_noted_is_no_failure) {
    Transfer transfer = reading();
    asked(transfer, {kDescriptor, kLength, kLength, -EROFS, 0});
    CHECK(transfer.finished() && transfer.outcome() == kOk);
}

TEST(a_read_that_fails_at_any_point) {
    const std::vector<std::vector<std::int64_t>> ways = {
        {-EACCES}, {kDescriptor, -EACCES, 0}, {kDescriptor, kLength, -EACCES, 0},
        {kDescriptor, kLength, kPageBytes, -EACCES, 0}};
    for (const auto& way : ways) {
        Transfer transfer = reading();
        asked(transfer, way);
        CHECK(transfer.finished() && transfer.outcome() == EACCES);
    }
}

TEST(what_ends_within_a_page_goes_on_through_the_page_cache) {
    for (const bool writes : {true, false}) {
        Transfer transfer = writes ? writing() : reading();
        transfer.answer(kDescriptor);
        if (!writes) transfer.answer(kLength);
        transfer.answer(kPageBytes + 1000);
        CHECK(transfer.request().kind == Kind::use_cache);
        transfer.answer(0);
        const Request rest = transfer.request();
        CHECK(rest.offset == kPageBytes + 1000 && rest.memory == memory + rest.offset);
        CHECK(rest.length == kLength - rest.offset);
        transfer.answer(500);
        CHECK(transfer.request().kind == (writes ? Kind::write : Kind::read));
        CHECK(transfer.request().offset == kPageBytes + 1500);
    }
}

TEST(what_ends_between_pages_goes_on_as_it_began) {
    Transfer transfer = writing();
    asked(transfer, {kDescriptor, kPageBytes});
    CHECK(transfer.request().kind == Kind::write && transfer.request().offset == kPageBytes);
}

TEST(a_cache_that_cannot_be_used) {
    Transfer transfer = reading();
    asked(transfer, {kDescriptor, kLength, 1000, -EBADF, 0});
    CHECK(transfer.finished() && transfer.outcome() == EBADF);
}

TEST(memory_or_lengths_that_are_no_pages_go_through_the_page_cache) {
    CHECK((writing(512).request().flags & O_DIRECT) == 0);
    CHECK((reading(512).request().flags & O_DIRECT) == 0);
    CHECK((reading(0, false).request().flags & O_DIRECT) == 0);
    CHECK((Transfer::reading("/a/one.kv", memory, kLength - 1, true).request().flags & O_DIRECT) == 0);
    Transfer transfer = writing(512);
    asked(transfer, {kDescriptor, 1000});
    CHECK(transfer.request().kind == Kind::write);
}

TEST(much_that_goes_through_the_page_cache_is_another_threads) {
    for (const bool direct : {true, false}) {
        for (const std::size_t length : {kPatientBytes - 1, kPatientBytes}) {
            Transfer transfer = Transfer::reading("/a", nullptr, length, direct);
            asked(transfer, {kDescriptor, static_cast<std::int64_t>(length)});
            const bool is_aligned = length % kPageBytes == 0;
            CHECK(transfer.request().kind == Kind::read);
            CHECK(transfer.request().patient == (length >= kPatientBytes && !(direct && is_aligned)));
        }
    }
}

TEST(interrupted_and_impatient_requests_are_asked_again) {
    for (const int error : {EINTR, EAGAIN}) {
        Transfer transfer = writing();
        transfer.answer(-error);
        CHECK(transfer.request().kind == Kind::open && transfer.request().patient);
        transfer.answer(kDescriptor);
        CHECK(transfer.request().kind == Kind::write && !transfer.request().patient);
        asked(transfer, {kPageBytes, -error});
        CHECK(transfer.request().offset == kPageBytes && transfer.request().patient);
        asked(transfer, {3 * kPageBytes, 0, -error, 0});
        CHECK(transfer.finished() && transfer.outcome() == kOk);
    }
}

TEST(a_descriptor_is_closed_once_even_if_that_is_interrupted) {
    Transfer transfer = writing();
    asked(transfer, {kDescriptor, kLength, -EINTR});
    CHECK(transfer.request().kind == Kind::rename);
}

TEST(a_folder_is_made_once) {
    Transfer transfer = writing();
    transfer.answer(-ENOENT);
    CHECK(transfer.request().kind == Kind::make_folder && std::string(transfer.request().path) == "/a");
    transfer.answer(-EEXIST);  // another transfer was faster
    CHECK(transfer.request().kind == Kind::open);
    transfer.answer(-ENOENT);
    CHECK(transfer.finished() && transfer.outcome() == ENOENT);
}

TEST(a_folder_that_cannot_be_made) {
    Transfer transfer = writing();
    asked(transfer, {-ENOENT, -EROFS});
    CHECK(transfer.finished() && transfer.outcome() == EROFS);
}

TEST(a_write_that_fails_leaves_nothing) {
    const std::vector<std::vector<std::int64_t>> ways = {
        {kDescriptor, -ENOSPC, 0},             // the first bytes
        {kDescriptor, kPageBytes, -ENOSPC, 0},  // after some
        {kDescriptor, kLength, -ENOSPC},        // told when it is closed
        {kDescriptor, kLength, 0, -ENOSPC},     // when it is renamed
    };
    for (const auto& way : ways) {
        Transfer transfer = writing();
        asked(transfer, way);
        CHECK(transfer.request().kind == Kind::unlink);
        CHECK(std::string(transfer.request().path) == "/a/one.1.tmp");
        transfer.answer(-EIO);
        CHECK(transfer.finished() && transfer.outcome() == ENOSPC);
    }
}

TEST(a_file_that_takes_no_more_bytes_has_failed) {
    Transfer transfer = writing();
    asked(transfer, {kDescriptor, 0, 0, 0});
    CHECK(transfer.finished() && transfer.outcome() == EIO);
}

TEST(a_file_that_cannot_be_made_leaves_nothing_to_remove) {
    Transfer transfer = writing();
    transfer.answer(-ENOSPC);
    CHECK(transfer.finished() && transfer.outcome() == ENOSPC);
}

TEST(nothing_moves_more_than_the_kernel_takes) {
    const std::size_t length = 2 * kvtier::disk::kMostBytesAtOnce + kPageBytes;
    Transfer transfer = Transfer::writing("/a/one.kv", "/a/one.1.tmp", memory, length, true);
    transfer.answer(kDescriptor);
    CHECK(transfer.request().length == kvtier::disk::kMostBytesAtOnce);
}

TEST(nothing_at_all_is_written_and_read_too) {
    Transfer written = Transfer::writing("/a/one.kv", "/a/one.1.tmp", memory, 0, true);
    CHECK(asked(written, {kDescriptor, 0, 0}) == Kinds{Kind::open, Kind::close, Kind::rename});
    Transfer read = Transfer::reading("/a/one.kv", memory, 0, true);
    CHECK(asked(read, {kDescriptor, 0, 0, 0}) == Kinds{Kind::open, Kind::measure, Kind::touch, Kind::close});
    CHECK(read.outcome() == kOk);
}

int main() {
    return kvtier::test::run();
}
