#include "kvtier/threads.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"

using kvtier::parallel_for;

namespace {

bool each_once(std::size_t count, unsigned threads) {
    std::vector<std::atomic<int>> calls(count);
    parallel_for(count, threads, [&](std::size_t at) { ++calls[at]; });
    for (const auto& called : calls) {
        if (called != 1) return false;
    }
    return true;
}

}  // namespace

TEST(each_piece_runs_once) {
    for (const std::size_t count : {0, 1, 2, 7, 1000}) {
        for (const unsigned threads : {0, 1, 2, 4, 16}) CHECK(each_once(count, threads));
    }
}

TEST(writes_of_helpers_are_visible_without_a_lock) {
    for (int round = 0; round < 200; ++round) {
        std::vector<std::size_t> plain(64);
        parallel_for(plain.size(), 4, [&](std::size_t at) { plain[at] = at; });
        for (std::size_t at = 0; at < plain.size(); ++at) CHECK(plain[at] == at);
    }
}

TEST(concurrent_callers_complete) {
    std::atomic<int> good{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int round = 0; round < 50; ++round) good += each_once(40, 3);
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(good == 200);
}

TEST(nested_calls_complete) {
    std::atomic<int> calls{0};
    parallel_for(4, 2, [&](std::size_t) { parallel_for(4, 2, [&](std::size_t) { ++calls; }); });
    CHECK(calls == 16);
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not support fork in a multi-threaded process.
TEST(a_forked_child_starts_its_own_helpers) {
    CHECK(each_once(100, 3));
    const pid_t child = fork();
    if (child == 0) _exit(each_once(100, 3) ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

TEST(useful_threads_are_bounded) {
    CHECK(kvtier::useful_threads() >= 1);
    CHECK(kvtier::useful_threads() <= 8);
}

TEST(spare_threads_depend_on_the_load) {
    using kvtier::spare_threads;
    CHECK(spare_threads("0.10 0.20 0.30 1/345 678\n", 4) == 4);
    CHECK(spare_threads("0.10 0.20 0.30 3/345 678\n", 4) == 4);
    CHECK(spare_threads("0.10 0.20 0.30 4/345 678\n", 4) == 3);
    CHECK(spare_threads("0.10 0.20 0.30 6/345 678\n", 4) == 1);
    CHECK(spare_threads("0.10 0.20 0.30 2/345 678\n", 2) == 2);  // An engine's thread spins after its work.
    CHECK(spare_threads("0.10 0.20 0.30 3/345 678\n", 2) == 1);
    CHECK(spare_threads("0.10 0.20 0.30 1/345 678\n", 1) == 1);
    CHECK(spare_threads("99.0 99.0 99.0 25/345 678\n", 4) == 1);
    CHECK(spare_threads("0.10 0.20 0.30 0/345 678\n", 4) == 4);  // The caller is not counted.
    for (const char* other : {"", "/", "x/3", "0.10 0.20 0.30", "1 2 3 4x/5"}) {
        CHECK(spare_threads(other, 4) == 4);
    }
    CHECK(spare_threads() >= 1);
}

int main() { return kvtier::test::run(); }
