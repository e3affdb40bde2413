// The stand-in itself: it reports each misuse, in every order of execution.

#include "check.hpp"
#include "setting.hpp"

using namespace cuda_stand_in;

namespace {

constexpr Pace paces[] = {Pace::early, Pace::late, Pace::random};

// Whether `misuse` is reported in these words, at any pace. Nothing else may be.
bool reported(const std::string& words, void (*misuse)(Engine& engine, std::span<std::byte> arena)) {
    for (const Pace pace : paces) {
        reset(pace, 1);
        const Mapped memory(64 << 10);
        {
            Engine engine;
            cudaHostRegister(memory.bytes().data(), memory.bytes().size(), cudaHostRegisterPortable);
            misuse(engine, memory.bytes());
            synchronize();
            cudaHostUnregister(memory.bytes().data());
        }
        if (joined(finish()) != (words.empty() ? "" : words + "\n")) {
            std::fprintf(stderr, "instead of %s: %s", words.c_str(), joined(finish()).c_str());
            return false;
        }
    }
    return true;
}

void save(Engine& engine, std::span<std::byte> arena, cudaStream_t stream) {
    cudaMemcpyAsync(arena.data(), engine.memory().data(), page_bytes, cudaMemcpyDefault, stream);
}

cudaStream_t other_stream() {
    cudaStream_t stream = nullptr;
    cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
    return stream;
}

cudaEvent_t event_after(cudaStream_t stream) {
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventRecord(event, stream);
    return event;
}

}  // namespace

TEST(what_is_ordered_is_accepted) {
    CHECK(reported("", [](Engine& engine, std::span<std::byte> arena) {
        const cudaStream_t other = other_stream();
        engine.fill(1);
        cudaStreamWaitEvent(other, event_after(engine.stream()), 0);
        save(engine, arena, other);
        const cudaEvent_t saved = event_after(other);
        cudaStreamWaitEvent(engine.stream(), saved, 0);
        engine.fill(2);
        while (cudaEventQuery(saved) == cudaErrorNotReady) continue;
        on_host(arena, true);
    }));
}

TEST(a_copy_that_does_not_wait_for_the_engine) {
    CHECK(reported("a copy by the copy engines does not wait for a kernel of the engine on the same memory",
                   [](Engine& engine, std::span<std::byte> arena) {
                       engine.fill(1);
                       save(engine, arena, other_stream());
                   }));
}

TEST(a_kernel_that_does_not_wait_for_the_copy) {
    CHECK(reported("a kernel of the engine does not wait for a copy by the copy engines on the same memory",
                   [](Engine& engine, std::span<std::byte> arena) {
                       save(engine, arena, other_stream());
                       engine.fill(1);
                   }));
}

TEST(a_wait_is_for_the_record_at_its_time) {
    CHECK(reported("a kernel of the engine does not wait for a copy by the copy engines on the same memory",
                   [](Engine& engine, std::span<std::byte> arena) {
                       const cudaStream_t other = other_stream();
                       const cudaEvent_t event = event_after(other);
                       cudaStreamWaitEvent(engine.stream(), event, 0);
                       save(engine, arena, other);
                       cudaEventRecord(event, other);
                       engine.fill(1);
                   }));
}

TEST(the_host_reads_too_early) {
    CHECK(reported("the host does not wait for a copy by the copy engines",
                   [](Engine& engine, std::span<std::byte> arena) {
                       save(engine, arena, engine.stream());
                       on_host(arena, false);
                   }));
}

TEST(blocks_are_freed_during_a_copy) {
    CHECK(reported("freeing device memory does not wait for a copy by the copy engines",
                   [](Engine& engine, std::span<std::byte> arena) {
                       save(engine, arena, engine.stream());
                       free_device(engine.memory().data());
                       synchronize();
                       add_device(engine.memory());
                   }));
}

TEST(pinned_memory_is_unregistered_during_a_copy) {
    CHECK(reported("unregistering pinned memory does not wait for a copy by the copy engines",
                   [](Engine& engine, std::span<std::byte> arena) {
                       save(engine, arena, engine.stream());
                       cudaHostUnregister(arena.data());
                       synchronize();
                       cudaHostRegister(arena.data(), arena.size(), cudaHostRegisterPortable);
                   }));
}

TEST(pinned_memory_is_freed_during_a_copy) {
    CHECK(reported("freeing pinned memory does not wait for a copy by the copy engines",
                   [](Engine& engine, std::span<std::byte>) {
                       void* list = nullptr;
                       cudaHostAlloc(&list, page_bytes, cudaHostAllocMapped);
                       save(engine, {static_cast<std::byte*>(list), page_bytes}, engine.stream());
                       cudaFreeHost(list);
                   }));
}

TEST(memory_that_is_not_pinned) {
    CHECK(reported("a copy by the copy engines accesses memory that is neither on the device nor pinned",
                   [](Engine& engine, std::span<std::byte>) {
                       std::vector<std::byte> ordinary(page_bytes);
                       save(engine, ordinary, engine.stream());
                   }));
}

TEST(an_event_is_used_after_its_end) {
    CHECK(reported("an event is used that does not exist", [](Engine& engine, std::span<std::byte>) {
        const cudaEvent_t event = event_after(engine.stream());
        cudaEventDestroy(event);
        cudaEventSynchronize(event);
    }));
}

TEST(a_failed_operation_fails_all_later_calls) {
    reset(Pace::late);
    Engine engine;
    fail_operation(1);
    engine.fill(1);
    const cudaEvent_t event = event_after(engine.stream());
    CHECK(cudaEventSynchronize(event) == cudaErrorIllegalAddress);
    CHECK(cudaEventQuery(event) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(engine.memory()[0] == std::byte{0});
}

int main() { return kvtier::test::run(); }
