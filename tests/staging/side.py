"""What stands for an engine, in a process of its own: bridges of its scheduler and workers, KV on a device.

Needs torch, and nothing of vLLM.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.bridge import protocol
from kvtier.bridge.client import Finding, SchedulerBridge, Slot, WorkerBridge
from kvtier.bridge.protocol import Hello, Role, Run
from kvtier.keys import ChunkKey, chunk_key, chunk_keys, encode_tokens, join_keys, root_key
from kvtier.layout import ChunkLayout, GroupLayout
from tests.bridge.conftest import answer

CHUNK = 64
BLOCK = 16
PAGES = (16384, 8192)
"""Bytes of a page, in each layer."""
CHUNKS, TAIL = 6, 20
TOKENS = CHUNKS * CHUNK + TAIL
NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)
ANSWER_SECONDS = 90.0


class Result(NamedTuple):
    """What came of a look-up."""

    sources: list[str]
    """The tier of each chunk that was found."""
    confirmed: bool
    whole: bool
    """Whether the bytes that were loaded are those of the prompt."""


def keys_of(prompt: int) -> list[ChunkKey]:
    """Of a prompt's whole chunks, and of the partial one at its end."""
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
        # The last one completes the buffers of all: the others may not wait for theirs before.
        for buffer in self._buffers[:-1]:
            buffer.ask(self._device, seconds=0)
        self._buffers[-1].ask(self._device)
        self._tickets: dict[int, int] = {}

    def _hello(self, role: Role, rank: int) -> Hello:
        return Hello(protocol.VERSION, "engine", role, rank, self._layout, NAMESPACE)

    def refresh(self) -> list[int]:
        """What a worker does in every step; the number of each rank's buffer, 0 where none is open."""
        for worker, buffer in zip(self._workers, self._buffers, strict=True):
            worker.poll()
            buffer.refresh()
        return [buffer.number for buffer in self._buffers]

    def _pages(self, prompt: int, rank: int) -> list[list[Any]]:
        """The KV of a prompt, as an engine has it: block 0 is nobody's."""
        generator = self._torch.Generator().manual_seed(prompt * 10 + rank)
        blocks = 1 + -(-TOKENS // BLOCK)
        pages = [
            self._torch.randint(0, 256, (blocks, length), dtype=self._torch.uint8, generator=generator)
            for length in PAGES
        ]
        return [[page.to(self._device) for page in pages]]

    def _copy(self, slot: Slot, at: int, rank: int, pages: list[list[Any]], *, out: bool) -> bool:
        from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy, page_copies

        tokens = CHUNK if at < CHUNKS else TAIL
        memory = self._buffers[rank].memory(slot.staging) if slot.staging else self._workers[rank].arena
        if memory is None:
            return False
        blocks = [1 + at * CHUNK // BLOCK + block for block in range(-(-tokens // BLOCK))]
        copies = page_copies(self._layout, rank, pages, NULL_BLOCK)
        copy = copies.save if out else copies.load
        copies.wait(copy(memory, [ChunkCopy(slot.lease, slot.offset, tokens, (blocks,), slot.staging)]))
        return True

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

    def hand_over(self, prompt: int, to: str) -> None:
        """What a scheduler does when a request comes that says so."""
        ticket = self._scheduler.hand_over(to, ROOT, keys_of(prompt), TOKENS)
        assert ticket is not None
        self._tickets[prompt] = ticket

    def store(self, prompt: int, first: int, last: int) -> dict[str, int]:
        """Compute some chunks, and put them where they are to be: how many are in which memory."""
        self.refresh()
        keys = keys_of(prompt)
        wanted = keys[first:last]
        tokens = TAIL if last > CHUNKS else CHUNK
        parent = keys[first - 1] if first else ROOT
        joined = join_keys(wanted)
        runs = [Run(parent, joined, tokens, self._tickets[prompt]), Run(parent, joined, tokens)]
        rooms = answer(self._scheduler, self._scheduler.reserve(runs))
        slots = [(at, slot) for room in rooms for at, slot in enumerate(room, first) if slot is not None]
        for rank, worker in enumerate(self._workers):
            pages = self._pages(prompt, rank)
            copied = [slot.lease for at, slot in slots if self._copy(slot, at, rank, pages, out=True)]
            self._wait_for_device()
            worker.commit(copied)
        staged = sum(1 for _, slot in slots if slot.staging)
        return {"staged": staged, "stored": len(slots) - staged}

    def end(self, prompt: int, complete: bool) -> int:
        """The request is over; how many tokens the other side has, as far as is known a moment later."""
        ticket = self._tickets.pop(prompt)
        told = self._scheduler.handed_over(ticket) if ticket in self._scheduler._handing else None
        self._scheduler.end_hand_over(ticket, complete=complete)
        return -1 if told is None else told.tokens

    def look_up(self, prompt: int, seconds: float) -> int:
        """Ask for a prompt that is handed over."""
        keys = keys_of(prompt)
        ticket = self._scheduler.look_up(keys, TOKENS, expect_chunks=len(keys), expect_seconds=seconds)
        assert ticket is not None
        return ticket

    def cancel(self, ticket: int) -> None:
        """Look it up no longer."""
        self._scheduler.cancel(ticket)

    def load(self, prompt: int, ticket: int) -> tuple[Any, ...]:
        """Wait for a look-up, load what it has found, and compare."""
        finding = self._found(ticket)
        self._scheduler.take(ticket)
        self.refresh()
        welcome = self._scheduler.welcome
        assert welcome is not None
        whole = confirmed = True
        for rank, worker in enumerate(self._workers):
            right = self._pages(prompt, rank)
            loaded = [[self._torch.zeros_like(page) for page in right[0]]]
            chunks = enumerate(zip(finding.leases, finding.offsets, finding.sources, strict=True))
            for at, (lease, offset, source) in chunks:
                staging = finding.staging if source == self._scheduler.staging_source else 0
                whole &= self._copy(Slot(lease, offset, staging), at, rank, loaded, out=False)
            self._wait_for_device()
            confirmed &= answer(worker, worker.confirm(finding.leases))
            stop = 1 + -(-min(len(finding.leases) * CHUNK, TOKENS) // BLOCK)
            for page, mine in zip(right[0], loaded[0], strict=True):
                whole &= bool(self._torch.equal(page[1:stop], mine[1:stop]))
        self._scheduler.release(finding.leases)
        return [welcome.tiers[source] for source in finding.sources], confirmed, whole

    def _found(self, ticket: int) -> Finding:
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            finding = self._scheduler.found(ticket, 0.05)
            assert finding is not None
            if finding.final:
                return finding
            time.sleep(0.005)
        raise TimeoutError("no final answer")


def _serve(connection: Connection, path: str, device: str, ranks: int) -> None:
    try:
        side = _Side(path, device, ranks)
        connection.send((None, all(side.refresh())))
        while True:
            call, arguments = connection.recv()
            connection.send((None, getattr(side, call)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        connection.send((traceback.format_exc(), None))


class Side:
    """An engine in a process of its own. Calls wait for their answers, and raise what went wrong there."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self._connection = connection
        self.staged: bool = self._answer()
        """Whether it had buffers from the start."""

    def __getattr__(self, call: str) -> Any:
        def ask(*arguments: object) -> Any:
            self._connection.send((call, arguments))
            return self._answer()

        return ask

    def _answer(self) -> Any:
        assert self._connection.poll(ANSWER_SECONDS), "no answer"
        error, answer = self._connection.recv()
        assert error is None, error
        return answer

    def fetch(self, prompt: int, seconds: float = 30.0) -> Result:
        """Look a prompt up and load it."""
        return Result(*self.load(prompt, self.look_up(prompt, seconds)))

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()


@contextmanager
def side(path: Path, device: str, ranks: int = 1) -> Iterator[Side]:
    """An engine beside a running cache process."""
    # Forked from one that has imported torch, and has asked it for nothing: CUDA begins in the child.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
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
