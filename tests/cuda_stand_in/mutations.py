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


PAGES, LANE, FLIGHT, CALLS, PINNED = (
    f"src/cuda/{name}" for name in ("device_pages.cpp", "lane.hpp", "flight.hpp", "calls.hpp", "pinned.cpp")
)

CPP = (
    Mutation("the engine's stream is not recorded", PAGES, "record(flight->completed, engine);", ""),
    Mutation(
        "a copy does not wait for the engine",
        PAGES,
        "wait_for(flight->completed, flight->lane->kernels);",
        "",
    ),
    Mutation(
        "the engine does not wait for a save that is held",
        PAGES,
        "wait_for(found->second->completed, stream);",
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
        "for (const Ticket ticket : after) hold(flight->lane->kernels, ticket);",
        "static_cast<void>(after);",
    ),
    Mutation(
        "the engine waits for every save",
        PAGES,
        "        in_flight_.emplace(next_, std::move(flight));",
        "        wait_for(flight->completed, engine);\n        in_flight_.emplace(next_, std::move(flight));",
    ),
    Mutation("the end of a copy is not recorded", PAGES, "record(flight.completed, lane.drains());", ""),
    Mutation(
        "the end of a direct copy is not recorded",
        PAGES,
        "record(flight.completed, flight.lane->kernels);",
        "",
    ),
    Mutation(
        "a copy ends with the first of its streams",
        PAGES,
        "record(flight.completed, lane.drains());",
        "record(flight.completed, lane.fills());",
    ),
    Mutation("a buffer is filled while it is drained", PAGES, "wait_for(buffer.drained, lane.fills());", ""),
    Mutation("a buffer is drained while it is filled", PAGES, "wait_for(buffer.filled, lane.drains());", ""),
    Mutation(
        "the two directions share a lane",
        PAGES,
        "flight->lane = lane_of(direction).get();",
        "flight->lane = lanes_[0].get();",
    ),
    Mutation(
        "slices of the arena are joined across gaps",
        PAGES,
        "slices.back().held + slices.back().length == slice.held",
        "true",
    ),
    Mutation(
        "pages begin anew in each buffer", PAGES, "            at_ += length;", "            at_ = length;"
    ),
    Mutation("a full device is an error", LANE, "if (error != cudaErrorMemoryAllocation) check", "check"),
    Mutation(
        "half of the buffers are enough", LANE, "buffers[0].memory && buffers[1].memory", "buffers[0].memory"
    ),
    Mutation("buffers stay on the device", LANE, "if (buffer.memory) ignore(cudaFree(buffer.memory));", ""),
    Mutation(
        "an error leaves half a lane",
        LANE,
        "            destroy();\n            throw;",
        "            throw;",
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
        "flight->lane->synchronize();  // Without a ticket, nobody else waits for what has been started.",
        "",
    ),
    Mutation(
        "a copy with a failed query is not waited for",
        PAGES,
        "if (state != cudaSuccess) found->second->lane->synchronize();",
        "",
    ),
    Mutation(
        "a copy with a failed wait is not waited for",
        FLIGHT,
        "if (state != cudaSuccess) lane->synchronize();",
        "",
    ),
    Mutation(
        "a list of moves is used again during its copy",
        PAGES,
        "        in_flight_.emplace(next_, std::move(flight));",
        "        lists_->put(flight->lists);\n        in_flight_.emplace(next_, std::move(flight));",
    ),
    Mutation("lists of moves are not used again", PAGES, "    lists_->put(free_.back()->lists);\n", ""),
    Mutation("a list has room for one move too many", PAGES, "count < list.size()", "count <= list.size()"),
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
        "reported errors stay", CALLS, "static_cast<void>(cudaGetLastError());  // Clear it,", "// Clear it,"
    ),
    Mutation(
        "threads that pin use device 0",
        PINNED,
        'check(cudaSetDevice(device), "cudaSetDevice");',
        "static_cast<void>(device);",
    ),
    Mutation("the arena stays pinned", PINNED, "ignore(cudaHostUnregister(memory_.data()));", ""),
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

COPIES, WORKER, STAGING, IN_FLIGHT = (
    f"kvtier.integrations.vllm.{name}" for name in ("copies", "worker", "staging", "in_flight")
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
        "if not self._copies.done(batch.tickets):",
        "if False:",
    ),
    Mutation(
        "a step does not wait for saves of blocks that it writes", IN_FLIGHT, "*self._reading(written), ", ""
    ),
    Mutation("a step does not wait for states", IN_FLIGHT, ", *self._states", ""),
    Mutation(
        "a step that writes before its hooks waits for nothing",
        IN_FLIGHT,
        "            if self._writes_before_hooks:\n                self._copies.hold(ticket)\n",
        "",
    ),
    Mutation("a step waits for all saves", IN_FLIGHT, "self._reading(written)", "self.reads"),
    Mutation(
        "a load does not wait for saves of its blocks",
        IN_FLIGHT,
        "self._reading(_blocks_of(chunks)) if self.reads else ()",
        "()",
    ),
    Mutation(
        "a finished request is reported during its copies",
        WORKER,
        "busy = {job.request_id for batch in self._saving for job in batch.jobs}",
        "busy = set()",
    ),
    Mutation("saves in flight are not bounded", IN_FLIGHT, "if not self._admits(chunks):", "if False:"),
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
        "states are copied last", IN_FLIGHT, "part, length = states, MAX_PART_BYTES", "part, length = [], 0"
    ),
    Mutation("young saves count", IN_FLIGHT, " if ticket not in young", ""),
    Mutation("saves are copied as one", IN_FLIGHT, "if length + size > MAX_PART_BYTES:", "if False:"),
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
