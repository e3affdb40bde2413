// Tests of the requests of a transfer, with simulated results of the kernel.
#include <fcntl.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "kvtier/disk/transfer.hpp"
#include "kvtier/disk/waiting.hpp"

using kvtier::disk::kMiss;
using kvtier::disk::kOk;
using kvtier::disk::kPageBytes;
using kvtier::disk::kOffloadBytes;
using kvtier::disk::Request;
using kvtier::disk::Transfer;
using kvtier::disk::Waiting;
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

// Answer the next requests with the given results, and return their kinds.
std::vector<Kind> answer_all(Transfer& transfer, const std::vector<std::int64_t>& answers) {
    std::vector<Kind> kinds;
    for (const std::int64_t answer : answers) {
        kinds.push_back(transfer.request().kind);
        transfer.answer(answer);
    }
    return kinds;
}

using Kinds = std::vector<Kind>;

}  // namespace

TEST(a_write_is_renamed_last) {
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

TEST(a_read_checks_the_length_first_and_updates_the_time_stamp) {
    Transfer transfer = reading();
    CHECK(transfer.request().flags == (O_RDONLY | O_CLOEXEC | O_DIRECT));
    const Kinds kinds = answer_all(transfer, {kDescriptor, kLength, kLength, 0, 0});
    CHECK(kinds == Kinds{Kind::open, Kind::measure, Kind::read, Kind::touch, Kind::close});
    CHECK(transfer.finished() && transfer.outcome() == kOk);
}

TEST(a_missing_file_is_a_miss) {
    Transfer transfer = reading();
    transfer.answer(-ENOENT);
    CHECK(transfer.finished() && transfer.outcome() == kMiss);
}

TEST(a_file_of_another_length_is_a_miss_and_is_not_read) {
    for (const std::int64_t length : {kLength - 1, kLength + 1, std::size_t{0}}) {
        Transfer transfer = reading();
        const Kinds kinds = answer_all(transfer, {kDescriptor, length, 0});
        CHECK(kinds == Kinds{Kind::open, Kind::measure, Kind::close});
        CHECK(transfer.finished() && transfer.outcome() == kMiss);
    }
}

TEST(a_file_truncated_during_the_read_is_a_miss) {
    Transfer transfer = reading();
    answer_all(transfer, {kDescriptor, kLength, kPageBytes, 0, 0});
    CHECK(transfer.finished() && transfer.outcome() == kMiss);
}

TEST(a_failed_time_stamp_update_is_ignored) {
    Transfer transfer = reading();
    answer_all(transfer, {kDescriptor, kLength, kLength, -EROFS, 0});
    CHECK(transfer.finished() && transfer.outcome() == kOk);
}

TEST(a_read_can_fail_at_any_point) {
    const std::vector<std::vector<std::int64_t>> ways = {
        {-EACCES}, {kDescriptor, -EACCES, 0}, {kDescriptor, kLength, -EACCES, 0},
        {kDescriptor, kLength, kPageBytes, -EACCES, 0}};
    for (const auto& way : ways) {
        Transfer transfer = reading();
        answer_all(transfer, way);
        CHECK(transfer.finished() && transfer.outcome() == EACCES);
    }
}

TEST(a_transfer_that_ends_within_a_page_continues_through_the_page_cache) {
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

TEST(a_transfer_that_ends_at_a_page_boundary_continues_with_direct_io) {
    Transfer transfer = writing();
    answer_all(transfer, {kDescriptor, kPageBytes});
    CHECK(transfer.request().kind == Kind::write && transfer.request().offset == kPageBytes);
}

TEST(clearing_direct_io_can_fail) {
    Transfer transfer = reading();
    answer_all(transfer, {kDescriptor, kLength, 1000, -EBADF, 0});
    CHECK(transfer.finished() && transfer.outcome() == EBADF);
}

TEST(unaligned_memory_or_lengths_use_the_page_cache) {
    CHECK((writing(512).request().flags & O_DIRECT) == 0);
    CHECK((reading(512).request().flags & O_DIRECT) == 0);
    CHECK((reading(0, false).request().flags & O_DIRECT) == 0);
    CHECK((Transfer::reading("/a/one.kv", memory, kLength - 1, true).request().flags & O_DIRECT) == 0);
    Transfer transfer = writing(512);
    answer_all(transfer, {kDescriptor, 1000});
    CHECK(transfer.request().kind == Kind::write);
}

TEST(large_buffered_requests_are_offloaded) {
    for (const bool direct : {true, false}) {
        for (const std::size_t length : {kOffloadBytes - 1, kOffloadBytes}) {
            Transfer transfer = Transfer::reading("/a", nullptr, length, direct);
            answer_all(transfer, {kDescriptor, static_cast<std::int64_t>(length)});
            const bool is_aligned = length % kPageBytes == 0;
            CHECK(transfer.request().kind == Kind::read);
            CHECK(transfer.request().offload == (length >= kOffloadBytes && !(direct && is_aligned)));
        }
    }
}

TEST(interrupted_and_blocking_requests_are_repeated) {
    for (const int error : {EINTR, EAGAIN}) {
        Transfer transfer = writing();
        transfer.answer(-error);
        CHECK(transfer.request().kind == Kind::open && transfer.request().offload);
        transfer.answer(kDescriptor);
        CHECK(transfer.request().kind == Kind::write && !transfer.request().offload);
        answer_all(transfer, {kPageBytes, -error});
        CHECK(transfer.request().offset == kPageBytes && transfer.request().offload);
        answer_all(transfer, {3 * kPageBytes, 0, -error, 0});
        CHECK(transfer.finished() && transfer.outcome() == kOk);
    }
}

TEST(an_interrupted_close_is_not_repeated) {
    Transfer transfer = writing();
    answer_all(transfer, {kDescriptor, kLength, -EINTR});
    CHECK(transfer.request().kind == Kind::rename);
}

TEST(a_folder_is_created_once) {
    Transfer transfer = writing();
    transfer.answer(-ENOENT);
    CHECK(transfer.request().kind == Kind::make_folder && std::string(transfer.request().path) == "/a");
    transfer.answer(-EEXIST);  // another transfer created it first
    CHECK(transfer.request().kind == Kind::open);
    transfer.answer(-ENOENT);
    CHECK(transfer.finished() && transfer.outcome() == ENOENT);
}

TEST(creating_the_folder_can_fail) {
    Transfer transfer = writing();
    answer_all(transfer, {-ENOENT, -EROFS});
    CHECK(transfer.finished() && transfer.outcome() == EROFS);
}

TEST(a_failed_write_leaves_no_file) {
    const std::vector<std::vector<std::int64_t>> ways = {
        {kDescriptor, -ENOSPC, 0},              // first write
        {kDescriptor, kPageBytes, -ENOSPC, 0},  // second write
        {kDescriptor, kLength, -ENOSPC},        // close
        {kDescriptor, kLength, 0, -ENOSPC},     // rename
    };
    for (const auto& way : ways) {
        Transfer transfer = writing();
        answer_all(transfer, way);
        CHECK(transfer.request().kind == Kind::unlink);
        CHECK(std::string(transfer.request().path) == "/a/one.1.tmp");
        transfer.answer(-EIO);
        CHECK(transfer.finished() && transfer.outcome() == ENOSPC);
    }
}

TEST(a_write_of_zero_bytes_is_an_error) {
    Transfer transfer = writing();
    answer_all(transfer, {kDescriptor, 0, 0, 0});
    CHECK(transfer.finished() && transfer.outcome() == EIO);
}

TEST(a_failed_open_leaves_no_file_to_remove) {
    Transfer transfer = writing();
    transfer.answer(-ENOSPC);
    CHECK(transfer.finished() && transfer.outcome() == ENOSPC);
}

TEST(requests_do_not_exceed_the_kernel_limit) {
    const std::size_t length = 2 * kvtier::disk::kMaxRequestBytes + kPageBytes;
    Transfer transfer = Transfer::writing("/a/one.kv", "/a/one.1.tmp", memory, length, true);
    transfer.answer(kDescriptor);
    CHECK(transfer.request().length == kvtier::disk::kMaxRequestBytes);
}

TEST(reads_are_in_parts) {
    for (const bool direct : {true, false}) {
        const std::size_t part = direct ? kvtier::disk::kDirectReadBytes : kvtier::disk::kReadBytes;
        const std::size_t length = part + kPageBytes;
        const std::unique_ptr<std::byte, decltype(&std::free)> bytes(
            static_cast<std::byte*>(std::aligned_alloc(kPageBytes, length)), &std::free);
        std::memset(bytes.get(), 0, length);
        Transfer transfer = Transfer::reading("/a/one.kv", bytes.get(), length, direct);
        answer_all(transfer, {kDescriptor, static_cast<std::int64_t>(length)});
        CHECK(transfer.request().length == part && transfer.request().offset == 0);
        transfer.answer(static_cast<std::int64_t>(part));
        CHECK(transfer.request().length == kPageBytes && transfer.request().offset == part);
        CHECK(transfer.request().memory == bytes.get() + part);
    }
}

TEST(empty_files_are_written_and_read) {
    Transfer written = Transfer::writing("/a/one.kv", "/a/one.1.tmp", memory, 0, true);
    CHECK(answer_all(written, {kDescriptor, 0, 0}) == Kinds{Kind::open, Kind::close, Kind::rename});
    Transfer read = Transfer::reading("/a/one.kv", memory, 0, true);
    CHECK(answer_all(read, {kDescriptor, 0, 0, 0}) == Kinds{Kind::open, Kind::measure, Kind::touch, Kind::close});
    CHECK(read.outcome() == kOk);
}

TEST(reads_go_first_and_writes_are_not_starved) {
    std::vector<Transfer> writes(3, writing());
    std::vector<Transfer> reads(5, reading());
    Waiting waiting;
    for (Transfer& transfer : writes) waiting.push(&transfer);
    for (Transfer& transfer : reads) waiting.push(&transfer);
    const std::vector<Transfer*> expected = {&reads[0], &reads[1], &reads[2],  &writes[0],
                                             &reads[3], &reads[4], &writes[1], &writes[2]};
    for (Transfer* transfer : expected) CHECK(waiting.pop() == transfer);
    CHECK(waiting.empty());
}

TEST(writes_count_only_the_reads_that_overtook_them) {
    std::vector<Transfer> reads(8, reading());
    Transfer write = writing();
    Waiting waiting;
    for (int number = 0; number < 4; ++number) waiting.push(&reads[number]);
    for (int number = 0; number < 4; ++number) CHECK(waiting.pop() == &reads[number]);
    waiting.push(&write);
    for (int number = 4; number < 8; ++number) waiting.push(&reads[number]);
    for (int number = 4; number < 7; ++number) CHECK(waiting.pop() == &reads[number]);
    CHECK(waiting.pop() == &write);
    CHECK(waiting.pop() == &reads[7]);
}

TEST(transfers_of_one_batch_are_removed) {
    std::vector<Transfer> transfers = {reading(), writing(), reading(), writing()};
    Waiting waiting;
    for (std::size_t number = 0; number < transfers.size(); ++number) {
        transfers[number].batch = number / 2;
        waiting.push(&transfers[number]);
    }
    CHECK(waiting.remove(0) == std::vector<Transfer*>{&transfers[0], &transfers[1]});
    CHECK(waiting.remove(7).empty());
    CHECK(waiting.pop() == &transfers[2]);
    CHECK(waiting.pop() == &transfers[3]);
    CHECK(waiting.empty());
}

int main() {
    return kvtier::test::run();
}
