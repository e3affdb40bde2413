"""A stand-in for an engine in its own process: bridges of a scheduler and workers, and KV on a device.

Needs torch, but not vLLM.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bridge import protocol
from kvtier.bridge.client import LookupState, SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Role, Run
from kvtier.memory.keys import ChunkKey, chunk_key, chunk_keys, encode_tokens, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query
from tests.rigs.bridges import wait_for_reply
from tests.rigs.forks import forks
from tests.rigs.waiting import wait_until

CHUNK = 64
BLOCK = 16
PAGES = (16384, 8192)
"""Bytes of a page, per layer."""
CHUNKS, TAIL = 6, 20
TOKENS = CHUNKS * CHUNK + TAIL
NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)
TIMEOUT_SECONDS = 90.0


class Result(NamedTuple):
    """The result of a lookup and load."""

    sources: list[str]
    """The tier of each found chunk."""
    confirmed: bool
    intact: bool
    """Whether the loaded bytes are those of the prompt."""


def keys_of(prompt: int) -> list[ChunkKey]:
    """Return the keys of a prompt's whole chunks, and of the partial one at its end."""
    tokens = [prompt * 10_000 + token for token in range(TOKENS)]
    keys = list(chunk_keys(ROOT, tokens, CHUNK))
    return [*keys, chunk_key(keys[-1], encode_tokens(tokens[CHUNKS * CHUNK :]), b"")]


class _Side:
    def __init__(self, path: str, device: str, ranks: int) -> None:
        import torch

        from kvtier.integrations.vllm import staging

        staging.ON_DEVICES.add("cpu")
        self._torch = torch
        self._device = torch.device(device)
        self._layout = ChunkLayout(CHUNK, (GroupLayout(BLOCK, PAGES),), ranks, device)
        self._scheduler = SchedulerBridge(self._hello("scheduler", 0), Path(path))
        self._scheduler.connect()
        self._workers = [WorkerBridge(self._hello("worker", rank), Path(path)) for rank in range(ranks)]
        self._buffers = [staging.StagingBuffer(worker) for worker in self._workers]
        for worker in self._workers:
            worker.connect()
        # The buffers are created once all ranks have requested theirs, so only the last one waits.
        for buffer in self._buffers[:-1]:
            buffer.request(self._device, seconds=0)
        self._buffers[-1].request(self._device)
        self._tickets: dict[int, int] = {}

    def _hello(self, role: Role, rank: int) -> Hello:
        return Hello(protocol.VERSION, "engine", role, rank, self._layout, NAMESPACE)

    def refresh(self) -> list[int]:
        """Poll, as workers do in every step. Return the number of each rank's buffer, 0 if none is open."""
        for worker, buffer in zip(self._workers, self._buffers, strict=True):
            worker.poll()
            buffer.refresh()
        opened = [buffer._opened for buffer in self._buffers]
        return [0 if each is None else each.number for each in opened]

    def _pages(self, prompt: int, rank: int) -> list[list[Any]]:
        """Return the KV of a prompt as an engine has it. Block 0 is the null block."""
        generator = self._torch.Generator().manual_seed(prompt * 10 + rank)
        blocks = 1 + -(-TOKENS // BLOCK)
        pages = [
            self._torch.randint(0, 256, (blocks, length), dtype=self._torch.uint8, generator=generator)
            for length in PAGES
        ]
        return [[page.to(self._device) for page in pages]]

    def _copy(
        self, staging: int, offset: int, at: int, rank: int, pages: list[list[Any]], *, save: bool
    ) -> bool:
        from kvtier.integrations.vllm.copies import ChunkCopy, page_copies

        tokens = CHUNK if at < CHUNKS else TAIL
        memory = self._buffers[rank].memory(staging) if staging else self._workers[rank].arena
        if memory is None:
            return False
        blocks = [1 + at * CHUNK // BLOCK + block for block in range(-(-tokens // BLOCK))]
        copies = page_copies(self._layout, rank, pages)
        copy = copies.save if save else copies.load
        ticket = copy(memory, [ChunkCopy(0, offset, tokens, (blocks,), staging)])
        wait_until(lambda: copies.done(ticket))
        return True

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

    def transfer_kv(self, prompt: int, to: str) -> None:
        """Start a KV transfer, as a scheduler does for a request with a KV transfer."""
        ticket = self._scheduler.transfer_kv(to, ROOT, keys_of(prompt), TOKENS)
        assert ticket is not None
        self._tickets[prompt] = ticket

    def store(self, prompt: int, first: int, last: int) -> dict[str, int]:
        """Compute some chunks and save them. Return the number of chunks per kind of memory."""
        self.refresh()
        keys = keys_of(prompt)
        stored_keys = keys[first:last]
        tokens = TAIL if last > CHUNKS else CHUNK
        parent = keys[first - 1] if first else ROOT
        joined_keys = join_keys(stored_keys)
        runs = [Run(parent, joined_keys, tokens, self._tickets[prompt]), Run(parent, joined_keys, tokens)]
        reserved = wait_for_reply(self._scheduler, self._scheduler.reserve(runs))
        count = len(stored_keys)
        for rank, worker in enumerate(self._workers):
            pages = self._pages(prompt, rank)
            copied = []
            for index, (lease, offset) in enumerate(zip(reserved.leases, reserved.offsets, strict=True)):
                staging = reserved.staging if index < count else 0
                if lease and self._copy(staging, offset, first + index % count, rank, pages, save=True):
                    copied.append(lease)
            self._wait_for_device()
            worker.commit(copied)
        staged = count - reserved.leases[:count].count(0)
        return {"staged": staged, "stored": len(reserved.granted) - staged}

    def end(self, prompt: int, complete: bool) -> int:
        """End the KV transfer. Return the number of tokens known to be at the receiver, or -1 if unknown."""
        ticket = self._tickets.pop(prompt)
        result = None
        with suppress(KeyError):  # It has ended.
            result = self._scheduler.transferred(ticket)
        self._scheduler.end_kv_transfer(ticket, complete=complete)
        return -1 if result is None else result.tokens

    def look_up(self, prompt: int, seconds: float) -> int:
        """Look up a prompt that is being transferred."""
        keys = keys_of(prompt)
        ticket = self._scheduler.look_up(Query(keys, TOKENS, expect_chunks=len(keys), expect_seconds=seconds))
        assert ticket is not None
        return ticket

    def cancel(self, ticket: int) -> None:
        """Cancel a lookup."""
        self._scheduler.cancel(ticket)

    def load(self, prompt: int, ticket: int) -> tuple[Any, ...]:
        """Wait for a lookup, load the found chunks, and compare their bytes."""
        lookup = self._wait_for_result(ticket)
        self.refresh()
        welcome = self._scheduler.welcome
        assert welcome is not None
        intact = confirmed = True
        for rank, worker in enumerate(self._workers):
            expected = self._pages(prompt, rank)
            loaded = [[self._torch.zeros_like(page) for page in expected[0]]]
            chunks = enumerate(zip(lookup.offsets, lookup.sources, strict=True))
            for at, (offset, source) in chunks:
                staging = lookup.found.staging if source == self._scheduler.staging_source else 0
                intact &= self._copy(staging, offset, at, rank, loaded, save=False)
            self._wait_for_device()
            confirmed &= wait_for_reply(worker, worker.confirm(lookup.leases))
            stop = 1 + -(-min(len(lookup.leases) * CHUNK, TOKENS) // BLOCK)
            for page, actual in zip(expected[0], loaded[0], strict=True):
                intact &= bool(self._torch.equal(page[1:stop], actual[1:stop]))
        self._scheduler.cancel(ticket)
        return [welcome.tiers[source] for source in lookup.sources], confirmed, intact

    def _wait_for_result(self, ticket: int) -> LookupState:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            lookup = self._scheduler.found(ticket, 0.05)
            assert lookup is not None
            if lookup.final:
                return lookup
            time.sleep(0.005)
        raise TimeoutError("no final answer")


def _serve(connection: Connection, path: str, device: str, ranks: int) -> None:
    try:
        side = _Side(path, device, ranks)
        connection.send((None, all(side.refresh())))
        while True:
            method, arguments = connection.recv()
            connection.send((None, getattr(side, method)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        connection.send((traceback.format_exc(), None))


class Side:
    """An engine in its own process. Method calls block until they return, and fail on an error there."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self._connection = connection
        self.staged: bool = self._answer()
        """Whether all ranks have buffers right after the start."""

    def __getattr__(self, method: str) -> Any:
        def request(*arguments: object) -> Any:
            self._connection.send((method, arguments))
            return self._answer()

        return request

    def _answer(self) -> Any:
        assert self._connection.poll(TIMEOUT_SECONDS), "no answer"
        error, answer = self._connection.recv()
        assert error is None, error
        return answer

    def fetch(self, prompt: int, seconds: float = 30.0) -> Result:
        """Look a prompt up and load it."""
        return Result(*self.load(prompt, self.look_up(prompt, seconds)))

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        self.process.kill()
        self.process.join()


@contextmanager
def side(path: Path, device: str, ranks: int = 1) -> Iterator[Side]:
    """Run an engine that uses a running cache process."""
    # Forked from a process that has imported but not used torch: CUDA is initialized in the child.
    context = forks(["torch"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, str(path), device, ranks), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Side(process, ours)
    finally:
        ours.close()
        process.join(1)
        process.kill()
        process.join()
