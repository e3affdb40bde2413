// Tests of the engine on a real folder. Without io_uring, only the error of the constructor is tested.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <system_error>

#include "check.hpp"
#include "kvtier/checksum.hpp"
#include "kvtier/disk/engine.hpp"

namespace fs = std::filesystem;

using kvtier::disk::Engine;
using kvtier::disk::Finished;
using kvtier::disk::kMiss;
using kvtier::disk::kOk;
using kvtier::disk::kPageBytes;
using kvtier::disk::Transfer;

namespace {

class Folder {
public:
    Folder() {
        std::string name = (fs::current_path() / "kvtier-disk-XXXXXX").string();
        root_ = ::mkdtemp(name.data());
    }
    ~Folder() { fs::remove_all(root_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::string path(int number, const char* end = ".kv") const {
        return (root_ / ("f" + std::to_string(number % 3)) / (std::to_string(number) + end)).string();
    }
    std::size_t files() const {
        std::size_t count = 0;
        for (const auto& entry : fs::recursive_directory_iterator(root_)) count += entry.is_regular_file();
        return count;
    }

private:
    fs::path root_;
};

// A value of /proc/self/status, in KiB.
std::size_t kibibytes(const std::string& name) {
    std::ifstream status("/proc/self/status");
    std::string word;
    std::size_t found = 0;
    while (status >> word) {
        if (word == name) status >> found;
    }
    return found;
}

// The number of registered io_uring buffers of 256 MiB in this process: lines "index: address/length" of fdinfo.
std::size_t pinned_parts() {
    std::size_t found = 0;
    for (const auto& entry : fs::directory_iterator("/proc/self/fdinfo")) {
        std::ifstream info(entry.path());
        bool buffers = false;
        for (std::string line; std::getline(info, line);) {
            buffers = line[0] == ' ' ? buffers : line.rfind("UserBufs:", 0) == 0;
            found += buffers && line.rfind("/268435456") != std::string::npos;
        }
    }
    return found;
}

bool may_lock(std::size_t length) {
    rlimit limit{};
    return ::geteuid() == 0 || (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur >= length);
}

class Memory {
public:
    explicit Memory(std::size_t length) : length_(length) {
        start_ = static_cast<std::byte*>(
            ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    ~Memory() { ::munmap(start_, length_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::byte* at(std::size_t offset) const { return start_ + offset; }
    void fill(unsigned seed) const {
        for (std::size_t place = 0; place < length_; ++place) {
            seed = seed * 1664525U + 1013904223U;
            start_[place] = static_cast<std::byte>(seed >> 24U);
        }
    }
    bool same(const Memory& other) const { return std::memcmp(start_, other.start_, length_) == 0; }

private:
    std::byte* start_;
    std::size_t length_;
};

std::vector<Finished> wait_for(Engine& engine, std::size_t count) {
    std::vector<Finished> all;
    while (all.size() < count) {
        pollfd waiting{engine.event_fd(), POLLIN, 0};
        ::poll(&waiting, 1, -1);
        for (Finished& one : engine.take_finished()) all.push_back(std::move(one));
    }
    return all;
}

std::vector<int> run(Engine& engine, std::vector<Transfer> transfers) {
    const std::uint64_t number = engine.submit(std::move(transfers));
    std::vector<Finished> finished = wait_for(engine, 1);
    CHECK(finished.size() == 1 && finished.front().batch == number);
    return finished.front().outcomes;
}

Transfer writing(const Folder& folder, int number, std::byte* memory, std::size_t length,
                 bool direct = true) {
    return Transfer::writing(folder.path(number), folder.path(number, ".1.tmp"), memory, length, direct);
}

Transfer reading(const Folder& folder, int number, std::byte* memory, std::size_t length,
                 bool direct = true) {
    return Transfer::reading(folder.path(number), memory, length, direct);
}

using Outcomes = std::vector<int>;

}  // namespace

TEST(reads_return_what_was_written) {
    const Folder folder;
    constexpr std::size_t kPart = 64 * kPageBytes;
    constexpr int kCount = 20;
    const Memory source(kPart * kCount);
    source.fill(1);
    for (const unsigned depth : {1U, 4U, 64U}) {
        for (const bool direct : {true, false}) {
            const Memory target(kPart * kCount);
            Engine engine(depth);
            std::vector<Transfer> writes;
            std::vector<Transfer> reads;
            for (int number = 0; number < kCount; ++number) {
                writes.push_back(writing(folder, number, source.at(kPart * number), kPart, direct));
                reads.push_back(reading(folder, number, target.at(kPart * number), kPart, direct));
            }
            CHECK(run(engine, std::move(writes)) == Outcomes(kCount, kOk));
            CHECK(folder.files() == kCount);
            CHECK(run(engine, std::move(reads)) == Outcomes(kCount, kOk));
            CHECK(source.same(target));
        }
    }
}

// More objects than the depth, of several parts each. One is damaged in its last part, one is no chunk object.
TEST(chunk_objects_are_verified_as_they_arrive) {
    const Folder folder;
    constexpr std::size_t kObject = kvtier::disk::kDirectReadBytes + kPageBytes;
    constexpr std::size_t kHeader = 448;
    constexpr int kCount = 6;
    const Memory source(kObject * kCount);
    source.fill(3);
    for (int number = 0; number < kCount - 1; ++number) {
        std::byte* object = source.at(kObject * number);
        const std::uint16_t algorithm = 1;
        const std::uint64_t payload = kObject - kHeader;
        std::memcpy(object, "KVTIER\r\n\x03", 10);
        std::memcpy(object + 10, &algorithm, sizeof algorithm);
        std::memcpy(object + 24, &payload, sizeof payload);
        const auto digest = kvtier::xxh3_128({object + kHeader, payload});
        std::memcpy(object + 128, digest.data(), digest.size());
    }
    *source.at(kObject * 2 - 1) ^= std::byte{1};
    Outcomes expected(kCount, kvtier::disk::kVerified);
    expected[1] = expected[kCount - 1] = kOk;
    for (const bool direct : {true, false}) {
        const Memory target(kObject * kCount);
        Engine engine(2);
        std::vector<Transfer> writes;
        std::vector<Transfer> reads;
        for (int number = 0; number < kCount; ++number) {
            writes.push_back(writing(folder, number, source.at(kObject * number), kObject, direct));
            reads.push_back(reading(folder, number, target.at(kObject * number), kObject, direct));
        }
        CHECK(run(engine, std::move(writes)) == Outcomes(kCount, kOk));
        CHECK(run(engine, std::move(reads)) == expected);
        CHECK(source.same(target));
    }
}

TEST(unaligned_memory) {
    const Folder folder;
    const Memory source(3 * kPageBytes);
    const Memory target(3 * kPageBytes);
    source.fill(2);
    Engine engine(2);
    for (const std::size_t length : {std::size_t{1}, kPageBytes - 1, kPageBytes, 2 * kPageBytes + 5}) {
        CHECK(run(engine, {writing(folder, 1, source.at(7), length)}) == Outcomes{kOk});
        CHECK(run(engine, {reading(folder, 1, target.at(7), length)}) == Outcomes{kOk});
        CHECK(std::memcmp(source.at(7), target.at(7), length) == 0);
    }
}

TEST(registered_memory) {
    const Folder folder;
    constexpr std::size_t kLength = 4 * kPageBytes;
    constexpr std::size_t kBorder = std::size_t{256} << 20;  // boundary between two registered parts
    const Memory kept(kBorder + kLength);
    const Memory other(kLength);
    Engine engine(2);
    engine.keep(kept.at(0), kBorder + kLength);
    for (std::byte* memory : {kept.at(0), kept.at(kBorder - kLength / 2), kept.at(kBorder), other.at(0)}) {
        for (std::size_t place = 0; place < kLength; ++place) memory[place] = static_cast<std::byte>(place / 7);
        CHECK(run(engine, {writing(folder, 1, memory, kLength)}) == Outcomes{kOk});
        std::memset(memory, 0, kLength);
        CHECK(run(engine, {reading(folder, 1, memory, kLength)}) == Outcomes{kOk});
        for (std::size_t place = 0; place < kLength; ++place) {
            if (memory[place] != static_cast<std::byte>(place / 7)) return CHECK(!"other bytes");
        }
    }
}

TEST(a_part_is_pinned_when_it_is_resident) {
    const Folder folder;
    constexpr std::size_t kPart = std::size_t{256} << 20;
    const Memory kept(2 * kPart);
    Engine engine(2);
    engine.keep(kept.at(0), 2 * kPart);
    CHECK(run(engine, {writing(folder, 1, kept.at(0), kPageBytes)}) == Outcomes{kOk});
    // Pinning did not fault in unused memory, for which the request would have had to wait.
    CHECK(kibibytes("VmRSS:") < (kPart >> 10));
    CHECK(pinned_parts() == 0);
    for (std::size_t place = 0; place < kPart; place += kPageBytes) *kept.at(place) = std::byte{1};
    CHECK(run(engine, {writing(folder, 1, kept.at(0), kPageBytes)}) == Outcomes{kOk});
    CHECK(pinned_parts() == 1 || !may_lock(kPart));
}

TEST(every_file_has_its_own_outcome) {
    const Folder folder;
    const Memory memory(2 * kPageBytes);
    Engine engine(4);
    std::byte* page = memory.at(0);
    fs::create_directories(folder.path(3));
    const std::vector<int> written =
        run(engine, {writing(folder, 1, page, kPageBytes), writing(folder, 3, page, kPageBytes),
                       writing(folder, 2, page, kPageBytes)});
    CHECK(written == Outcomes{kOk, EISDIR, kOk});
    const std::vector<int> read =
        run(engine, {reading(folder, 1, page, kPageBytes), reading(folder, 4, page, kPageBytes),
                       reading(folder, 2, page, 2 * kPageBytes), reading(folder, 5, page, kPageBytes)});
    CHECK(read == Outcomes{kOk, kMiss, kMiss, kMiss});
    CHECK(folder.files() == 2);
}

TEST(file_size_limit) {
    const Folder folder;
    const Memory memory(8 * kPageBytes);
    Engine engine(2);
    ::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{2 * kPageBytes, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    const std::vector<int> outcomes =
        run(engine, {writing(folder, 1, memory.at(0), 8 * kPageBytes),
                       writing(folder, 2, memory.at(0), kPageBytes)});
    ::setrlimit(RLIMIT_FSIZE, &before);
    CHECK(outcomes == Outcomes{EFBIG, kOk});
    CHECK(folder.files() == 1);
}

TEST(batches_finish_independently) {
    const Folder folder;
    constexpr int kBatches = 50;
    const Memory memory(kPageBytes);
    Engine engine(3);
    std::map<std::uint64_t, std::size_t> lengths;
    for (int batch = 0; batch < kBatches; ++batch) {
        std::vector<Transfer> transfers;
        for (int number = 0; number < batch % 4; ++number) {
            const int name = batch * 10 + number;
            transfers.push_back(Transfer::writing(folder.path(name), folder.path(name, ".tmp"), memory.at(0),
                                                  kPageBytes, true));
        }
        const std::size_t length = transfers.size();
        lengths[engine.submit(std::move(transfers))] = length;
    }
    for (const Finished& one : wait_for(engine, kBatches)) {
        CHECK(one.outcomes == Outcomes(lengths.at(one.batch), kOk));
        lengths.erase(one.batch);
    }
    CHECK(lengths.empty());
}

TEST(a_cancelled_batch_drops_transfers_that_have_not_started) {
    constexpr std::size_t kPart = 64 * kPageBytes;
    constexpr int kCount = 64;
    const Memory memory(kPart);
    std::ptrdiff_t dropped = 0;
    // One attempt is enough unless this thread is preempted until all transfers have finished.
    for (int attempt = 0; attempt < 100 && dropped == 0; ++attempt) {
        const Folder folder;
        Engine engine(1);
        std::vector<Transfer> transfers;
        for (int number = 0; number < kCount; ++number) {
            transfers.push_back(writing(folder, number, memory.at(0), kPart));
        }
        const std::uint64_t number = engine.submit(std::move(transfers));
        engine.cancel(number);
        engine.cancel(number + 1);  // unknown batch
        const Finished finished = wait_for(engine, 1).front();
        CHECK(finished.batch == number && finished.outcomes.size() == kCount);
        dropped = std::count(finished.outcomes.begin(), finished.outcomes.end(), ECANCELED);
        const auto written = std::count(finished.outcomes.begin(), finished.outcomes.end(), kOk);
        CHECK(dropped + written == kCount);
        CHECK(folder.files() == static_cast<std::size_t>(written));
        engine.cancel(number);  // finished batch
        CHECK(run(engine, {writing(folder, 1, memory.at(0), kPart)}) == Outcomes{kOk});
    }
    CHECK(dropped > 0);
}

TEST(closing_waits_for_transfers_in_flight) {
    const Folder folder;
    constexpr std::size_t kPart = 256 * kPageBytes;
    constexpr int kCount = 16;
    const Memory memory(kPart * kCount);
    memory.fill(3);
    auto engine = std::make_unique<Engine>(2);
    std::vector<Transfer> transfers;
    for (int number = 0; number < kCount; ++number) {
        transfers.push_back(writing(folder, number, memory.at(kPart * number), kPart));
    }
    engine->submit(std::move(transfers));
    engine->close();
    engine->close();
    const std::vector<Finished> finished = engine->take_finished();
    CHECK(finished.size() == 1 && finished.front().outcomes == Outcomes(kCount, kOk));
    CHECK(folder.files() == kCount);
    engine.reset();
}

TEST(multiple_threads_submit) {
    const Folder folder;
    const Memory memory(kPageBytes);
    Engine engine(4);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            for (int turn = 0; turn < 25; ++turn) {
                const int name = thread * 100 + turn;
                std::vector<Transfer> one;
                one.push_back(writing(folder, name, memory.at(0), kPageBytes));
                engine.submit(std::move(one));
            }
        });
    }
    const std::vector<Finished> finished = wait_for(engine, 100);
    for (std::thread& thread : threads) thread.join();
    CHECK(std::all_of(finished.begin(), finished.end(),
                      [](const Finished& one) { return one.outcomes == Outcomes{kOk}; }));
    CHECK(folder.files() == 100);
}

int main() {
    try {
        const Engine engine(1);
    } catch (const std::system_error& error) {
        std::printf("io_uring is not available: %s\n", error.what());
        return 0;
    }
    return kvtier::test::run();
}
