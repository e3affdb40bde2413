"""Each synchronization of the CUDA layer, and what its removal looks like. test_mutations.py removes them."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One place in the code, and what to put there instead."""

    name: str
    path: str
    old: str
    new: str
    in_worker: bool = False
    """Whether the tests of the worker find it, instead of those of the copies."""


PAGES, FLIGHT, CALLS, PINNED = (
    f"src/cuda/{name}" for name in ("device_pages.cpp", "flight.hpp", "calls.hpp", "pinned.cpp")
)

CPP = (
    Mutation(
        "the engine's stream is not recorded",
        PAGES,
        'check(cudaEventRecord(flight->completed, engine), "cudaEventRecord");',
        "",
    ),
    Mutation(
        "a copy does not wait for the engine",
        PAGES,
        'check(cudaStreamWaitEvent(flight->stream, flight->completed, 0), "cudaStreamWaitEvent");',
        "",
    ),
    Mutation(
        "the engine does not wait for a save that is held",
        PAGES,
        'check(cudaStreamWaitEvent(stream, found->second->completed, 0), "cudaStreamWaitEvent");',
        "",
    ),
    Mutation(
        "the engine goes on if CUDA cannot hold it",
        PAGES,
        "        // What comes next may change the pages. done() still reports an error of the copy.\n"
        "        ignore(found->second->wait());\n",
        "",
    ),
    Mutation(
        "a load does not wait for saves of its pages",
        PAGES,
        "for (const Ticket ticket : after) hold(flight->stream, ticket);",
        "static_cast<void>(after);",
    ),
    Mutation(
        "the engine waits for every save",
        PAGES,
        "        in_flight_.emplace(next_, std::move(flight));",
        '        check(cudaStreamWaitEvent(engine, flight->completed, 0), "cudaStreamWaitEvent");\n'
        "        in_flight_.emplace(next_, std::move(flight));",
    ),
    Mutation(
        "a list of moves that is too short is freed",
        PAGES,
        "        lists_.push_back(moves);",
        "        for (Move* const old : lists_) ignore(cudaFreeHost(old));\n        lists_ = {moves};",
    ),
    Mutation(
        "the end of a copy is not recorded",
        PAGES,
        'check(cudaEventRecord(flight.completed, flight.stream), "cudaEventRecord");',
        "",
    ),
    Mutation(
        "the end of a copy is recorded in the stream of the other direction",
        PAGES,
        'check(cudaEventRecord(flight.completed, flight.stream), "cudaEventRecord");',
        "check(cudaEventRecord(flight.completed, streams_[direction == Direction::into_engine].get()), "
        '"cudaEventRecord");',
    ),
    Mutation(
        "a copy is done at once",
        PAGES,
        "const cudaError_t state = cudaEventQuery(found->second->completed);",
        "const cudaError_t state = cudaSuccess;",
    ),
    Mutation(
        "wait() does not wait",
        PAGES,
        "retire(ticket, found->second->wait());",
        "retire(ticket, cudaSuccess);",
    ),
    Mutation(
        "the destructor does not wait",
        PAGES,
        "for (auto& [ticket, flight] : in_flight_) ignore(flight->wait());",
        "",
    ),
    Mutation(
        "a copy without a ticket is not waited for",
        PAGES,
        "flight->wait_for_stream();  // Without a ticket, nobody else would wait for what has been started.",
        "",
    ),
    Mutation(
        "a copy with a failed query is not waited for",
        PAGES,
        "if (state != cudaSuccess) found->second->wait_for_stream();",
        "",
    ),
    Mutation(
        "a copy with a failed wait is not waited for",
        FLIGHT,
        "if (state != cudaSuccess) wait_for_stream();",
        "",
    ),
    Mutation(
        "a list of moves is shared by all batches",
        PAGES,
        "flight.moves.room(moves.size())",
        "[&] { static MoveList all; return all.room(moves.size()); }()",
    ),
    Mutation(
        "streams are lost if the second cannot be created",
        PAGES,
        "        owned.reset(stream);",
        "        if (&owned == &streams_[1]) owned.reset(stream);",
    ),
    Mutation(
        "the error of a query stays",
        PAGES,
        "if (state == cudaErrorNotReady) {\n        static_cast<void>(cudaGetLastError());",
        "if (state == cudaErrorNotReady) {",
    ),
    Mutation(
        "ignored errors stay",
        CALLS,
        "if (error != cudaSuccess) static_cast<void>(cudaGetLastError());",
        "static_cast<void>(error);",
    ),
    Mutation(
        "reported errors stay",
        CALLS,
        "static_cast<void>(cudaGetLastError());  // Clear it,",
        "// Clear it,",
    ),
    Mutation(
        "threads that pin use device 0",
        PINNED,
        'check(cudaSetDevice(device), "cudaSetDevice");',
        "static_cast<void>(device);",
    ),
    Mutation(
        "the arena stays pinned",
        PINNED,
        "ignore(cudaHostUnregister(memory_.data()));",
        "",
    ),
    Mutation(
        "the arena is pinned for one device only",
        PINNED,
        "cudaHostRegisterPortable | cudaHostRegisterMapped",
        "cudaHostRegisterMapped",
    ),
    Mutation(
        "kernels get addresses of the host",
        PAGES,
        "const std::ptrdiff_t shift = arena.on_device().data() - arena.on_host().data();",
        "const std::ptrdiff_t shift = 0;",
    ),
    Mutation(
        "a copy runs on the current device",
        PAGES,
        "    const OnDevice current(device_);\n    std::unique_ptr<Flight> flight",
        "    std::unique_ptr<Flight> flight",
    ),
)

COPIES, WORKER, STAGING, READS = (
    f"kvtier.integrations.vllm.{name}" for name in ("cuda_copies", "worker", "staging", "reads")
)

PYTHON = (
    Mutation(
        "close() does not wait for copies",
        COPIES,
        "for ticket in list(self._in_flight):",
        "for ticket in []:",
    ),
    Mutation(
        "close() leaves unpinning to the last reference",
        COPIES,
        "            self._pinning.unpin()\n            self._pinning = None",
        "            self._pinning = None",
    ),
    Mutation(
        "unpinning does not wait for pinning",
        COPIES,
        '"""Unregister the arena. Blocks until it is, and before that until registering has ended."""\n'
        "        self._ended.wait()",
        '""""""',
    ),
    Mutation(
        "a replaced arena is unpinned during copies", COPIES, "tickets &= self._in_flight", "tickets = set()"
    ),
    Mutation("pinning uses device 0", COPIES, "native.cuda.use_device(self._device)", "pass"),
    Mutation("a failure at shutdown is forgotten", COPIES, "self._failed[ticket] = str(error)", "pass"),
    Mutation("a copy is done at once", COPIES, "done = bool(self._memory.done(ticket))", "done = True"),
    Mutation(
        "chunks are committed before their copies",
        WORKER,
        "if not all(self._copies.done(ticket) for ticket in batch.tickets):",
        "if False:",
    ),
    Mutation(
        "a step does not wait for saves of blocks that it writes", WORKER, "*self._reads.of(written), ", ""
    ),
    Mutation("a step does not wait for states", WORKER, ", *self._reads.of_states()", ""),
    Mutation(
        "a step that writes before its hooks waits for nothing",
        WORKER,
        "            if self._hooks_are_late:\n                self._copies.hold(ticket)\n",
        "",
    ),
    Mutation("a step waits for all saves", WORKER, "self._reads.of(written)", "self._reads._by_ticket"),
    Mutation(
        "a load does not wait for saves of its blocks",
        WORKER,
        "self._reads.of(blocks_of(chunks)) if self._copies.deferred else ()",
        "()",
    ),
    Mutation(
        "a finished request is reported during its copies",
        WORKER,
        "busy = {job.request_id for batch in self._saving for job in batch.jobs}",
        "busy = set()",
    ),
    Mutation("saves in flight are not bounded", WORKER, "if not self._reads.admits(chunks):", "if False:"),
    Mutation(
        "what is not saved is not counted",
        WORKER,
        'self._stats.add("not_stored_chunks", sum(not chunk.staging for chunk in chunks))',
        "pass",
    ),
    Mutation(
        "hold() holds nothing", COPIES, "self._memory.hold(self._stream(), ticket)", "pass", in_worker=True
    ),
    Mutation("a load has no order", COPIES, ", after=list(after)", "", in_worker=True),
    Mutation(
        "states are copied last", READS, "part, length = states, MAX_PART_BYTES", "part, length = [], 0"
    ),
    Mutation("saves are copied as one", READS, "if length + size > MAX_PART_BYTES:", "if False:"),
    Mutation("shutdown does not wait for copies", WORKER, "self._copies.close()", "pass"),
    Mutation(
        "a staging buffer is closed during copies", STAGING, "            torch.cuda.synchronize()\n", ""
    ),
    Mutation(
        "a staging buffer is opened without a context",
        STAGING,
        "torch.cuda.synchronize()  # Makes",
        "# Makes",
    ),
)
