"""An engine that behaves well: stores chunks whose bytes follow from their keys, and checks what it reads."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.errors import ChannelError
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query
from kvtier.testing.noise import noise

CHUNK_TOKENS = 64
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(16, (16_384,)),))
PAYLOAD_BYTES = LAYOUT.payload_bytes(CHUNK_TOKENS)
NAMESPACE = bytes(range(32))
ROOT = root_key(NAMESPACE)
CHUNKS = 10
"""Of each prompt."""
RECENT = 80
"""Prompts that are read again: about as many as memory and disks hold."""
ANSWER_SECONDS = 30.0
PAUSE_SECONDS = 0.05


def prompt(number: int) -> list[ChunkKey]:
    """Return the keys of a prompt. No two prompts begin alike."""
    first = number * CHUNKS * CHUNK_TOKENS
    return list(chunk_keys(ROOT, range(first, first + CHUNKS * CHUNK_TOKENS), CHUNK_TOKENS))


def store(socket: Path, keys: list[ChunkKey]) -> int:
    """Store a prompt as a new engine; return how many chunks had room. Raises :class:`ChannelError`."""
    with connected(socket) as (worker, scheduler):
        call = scheduler.reserve([protocol.Run(ROOT, join_keys(keys), CHUNK_TOKENS)])
        reserved = scheduler.await_reply(call, ANSWER_SECONDS)
        if reserved is None:
            raise ChannelError("no answer to a reservation")
        worker.fill(reserved.granted)
        assert worker.arena is not None
        for key, lease, offset in zip(keys, reserved.leases, reserved.offsets, strict=True):
            if lease:
                worker.arena.view(offset + HEADER_BYTES, PAYLOAD_BYTES)[:] = noise(key, PAYLOAD_BYTES)
        worker.commit(reserved.granted)
        # Answered after the commit.
        worker.await_reply(worker.confirm([]), ANSWER_SECONDS)
        return len(reserved.granted)


def read(socket: Path, keys: list[ChunkKey]) -> tuple[Counter[str], int]:
    """Look a prompt up; return how many chunks were found in each tier, and how many had wrong bytes.

    Raises :class:`ChannelError`.
    """
    with connected(socket) as (worker, scheduler):
        ticket = scheduler.look_up(Query(keys, len(keys) * CHUNK_TOKENS))
        if ticket is None:
            raise ChannelError("the cache process takes no lookup")
        found = scheduler.found(ticket, ANSWER_SECONDS)
        scheduler.wait(lambda: found is not None and found.final, ANSWER_SECONDS)
        if found is None or not found.final:
            raise ChannelError("no answer to a lookup")
        assert worker.arena is not None
        views = [worker.arena.view(offset + HEADER_BYTES, PAYLOAD_BYTES) for offset in found.offsets]
        copies = [bytes(view) for view in views]
        for view in views:
            view.release()
        held = worker.await_reply(worker.confirm(found.leases), ANSWER_SECONDS)
        scheduler.cancel(ticket)
        if not held:
            return Counter(), 0
        assert scheduler.welcome is not None
        tiers = Counter(scheduler.welcome.tiers[source] for source in found.sources)
        right = [copy == noise(key, PAYLOAD_BYTES) for key, copy in zip(keys, copies, strict=False)]
        return tiers, right.count(False)


@contextmanager
def connected(socket: Path) -> Iterator[tuple[WorkerBridge, SchedulerBridge]]:
    """Connect as a new engine within the block. Raises :class:`ChannelError`."""
    name = f"engine-{threading.get_ident()}-{time.monotonic_ns()}"
    worker = WorkerBridge(protocol.Hello(protocol.VERSION, name, "worker", 0, LAYOUT, NAMESPACE), socket)
    hello = protocol.Hello(protocol.VERSION, name, "scheduler", 0, LAYOUT, NAMESPACE)
    scheduler = SchedulerBridge(hello, socket)
    with ExitStack() as stack:
        for client in (worker, scheduler):
            stack.callback(client.close)
            client.connect()
            client.expect_answers_within(ANSWER_SECONDS)
        yield worker, scheduler


class Work:
    """Stores and reads prompts at all cache processes in a thread, until it is stopped."""

    def __init__(self, sockets: list[Path], counts: Counter[str]) -> None:
        self.prompts = 0
        """Prompts with lower numbers have been stored, at the cache process of their number."""
        self.wrong: list[str] = []
        """A line for each prompt that was read with wrong bytes."""
        self._sockets = sockets
        self._counts = counts
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, generator: random.Random) -> None:
        """Begin, with prompts that the generator chooses."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, args=(generator,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the operation in progress."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def store(self) -> tuple[Path, int]:
        """Store the next prompt; return where, and its number. Raises :class:`ChannelError`."""
        number, self.prompts = self.prompts, self.prompts + 1
        socket = self._sockets[number % len(self._sockets)]
        self._counts["chunks stored"] += store(socket, prompt(number))
        return socket, number

    def read(self, socket: Path, number: int) -> int:
        """Read a prompt; return how many chunks were found. Raises :class:`ChannelError`."""
        tiers, wrong = read(socket, prompt(number))
        found = tiers.total()
        self._counts.update({f"chunks read from {tier}": count for tier, count in tiers.items()})
        self._counts["misses"] += CHUNKS - found
        if wrong:
            self.wrong.append(f"{wrong} of {found} chunks of prompt {number} have wrong bytes on {socket}")
        return found

    def _run(self, generator: random.Random) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            try:
                if not self.prompts or generator.random() < 0.4:
                    self.store()
                else:
                    first = max(0, self.prompts - RECENT)
                    self.read(generator.choice(self._sockets), generator.randrange(first, self.prompts))
            except ChannelError:
                self._counts["operations interrupted"] += 1
