"""A look-up as vLLM's scheduler makes it: hash a prompt, ask the cache process, have the leases.

::

    python benchmarks/look_up.py                # a prompt of 32,768 tokens
    python benchmarks/look_up.py --runs 20
    python benchmarks/look_up.py --pool redis   # what a prompt that nobody holds waits for a real Redis

All chunks are READY in the first tier of a real cache process. The limit is a bare round trip of as many
bytes over a Unix socket to a process that does nothing else. Reserving, confirming and committing as many
chunks are measured beside it: they are what a store and a load cost the engine besides the copy. With a pool,
a prompt of which this host knows nothing is asked for there before the answer is final.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import confirm, reserve, show
from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge, status
from kvtier.bridge.protocol import Hello
from kvtier.errors import ChannelError
from kvtier.keys import KEY_BYTES, ChunkKey, chunk_keys, root_key
from kvtier.layout import ChunkLayout, GroupLayout
from kvtier.testing.servers import SERVERS

AnswerT = TypeVar("AnswerT")

CHUNK_TOKENS = 256
PAYLOAD_BYTES = 16 << 10
ANSWER_BYTES_A_CHUNK = 10
NAMESPACE = bytes(32)
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(32, (PAYLOAD_BYTES // 8,)),))
ROOT = root_key(NAMESPACE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A look-up, hashing and the socket included.")
    parser.add_argument("--tokens", type=int, default=32_768, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--pool", choices=SERVERS, help="a tier on a real server of this kind, below memory")
    options = parser.parse_args(arguments)
    tokens = random.Random(0).choices(range(100_000), k=options.tokens)
    with pool_tiers(options.pool) as pools, cache_process(pools) as path:
        worker, scheduler = WorkerBridge(hello("worker"), path), SchedulerBridge(hello("scheduler"), path)
        worker.connect()
        scheduler.connect()
        rows = measure(scheduler, worker, tokens, options.runs)
        scheduler.close()
        worker.close()
    show(
        f"a prompt of {options.tokens:,} tokens, {len(rows)} kinds of calls, {options.runs} runs each",
        ("call", "median µs", "99 % µs"),
        rows,
    )


def measure(
    scheduler: SchedulerBridge, worker: WorkerBridge, tokens: list[int], runs: int
) -> list[tuple[str, float, float]]:
    keys = chunk_keys(ROOT, tokens, CHUNK_TOKENS)
    hold(scheduler, worker, keys)

    def whole() -> list[int]:
        return look_up(scheduler, chunk_keys(ROOT, tokens, CHUNK_TOKENS))

    def socket_only() -> list[int]:
        return look_up(scheduler, keys)

    def give_back(leases: list[int]) -> None:
        assert len(leases) == len(keys)
        scheduler.release(leases)

    def store_and_forget() -> None:
        fresh = [ChunkKey(os.urandom(KEY_BYTES)) for _ in keys]
        granted = reserve(scheduler, ROOT, fresh, CHUNK_TOKENS)
        scheduler.abandon([slot.lease for slot in granted if slot is not None])

    ticket = scheduler.look_up(keys, len(tokens))
    assert ticket is not None
    finding = scheduler.found(ticket, wait=5)
    assert finding is not None

    def confirm_all() -> None:
        assert confirm(worker, finding.leases)

    def unknown() -> None:
        fresh = [ChunkKey(os.urandom(KEY_BYTES)) for _ in keys]
        asked = scheduler.look_up(fresh, len(tokens))
        assert asked is not None
        found = scheduler.found(asked, wait=5)
        while found is not None and not found.final:
            found = scheduler.found(asked)
        assert found is not None
        assert not found.leases
        scheduler.take(asked)

    with echo(len(keys) * ANSWER_BYTES_A_CHUNK) as ask:
        question = bytes(len(keys) * KEY_BYTES)
        return [
            timed("look-up: hashing and the socket", whole, runs, give_back),
            timed("  hashing alone", lambda: chunk_keys(ROOT, tokens, CHUNK_TOKENS), runs),
            timed("  the socket alone", socket_only, runs, give_back),
            timed("limit: a bare round trip of as many bytes", lambda: ask(question), runs),
            timed("look-up of a prompt that nobody holds", unknown, runs),
            timed("reserve all chunks, and abandon them", store_and_forget, runs),
            timed("confirm all chunks", confirm_all, runs),
        ]


def hold(scheduler: SchedulerBridge, worker: WorkerBridge, keys: Sequence[ChunkKey]) -> None:
    """Have all chunks READY, whichever connection asks next."""
    slots = reserve(scheduler, ROOT, keys, CHUNK_TOKENS)
    worker.commit([slot.lease for slot in slots if slot is not None])
    while len(leases := look_up(scheduler, keys)) < len(keys):
        scheduler.release(leases)
        time.sleep(0.01)
    scheduler.release(leases)


def look_up(scheduler: SchedulerBridge, keys: Sequence[ChunkKey]) -> list[int]:
    """Leases of the chunks that are READY."""
    ticket = scheduler.look_up(keys, len(keys) * CHUNK_TOKENS)
    assert ticket is not None
    finding = scheduler.found(ticket, wait=5)
    assert finding is not None
    scheduler.take(ticket)
    return finding.leases


def timed(
    name: str, call: Callable[[], AnswerT], runs: int, end: Callable[[AnswerT], None] = lambda _: None
) -> tuple[str, float, float]:
    """Median and 99th percentile in microseconds, after a tenth of the runs that are not counted.

    ``end`` is not counted, as an engine releases what it was granted only after it has loaded it.
    """
    seconds = []
    for run in range(-(runs // 10) - 1, runs):
        started = time.perf_counter()
        answer = call()
        if run >= 0:
            seconds.append(time.perf_counter() - started)
        end(answer)
    seconds.sort()
    return name, statistics.median(seconds) * 1e6, seconds[int(0.99 * (runs - 1))] * 1e6


def hello(role: protocol.Role) -> Hello:
    return Hello(protocol.VERSION, "benchmark", role, 0, LAYOUT, NAMESPACE)


@contextmanager
def pool_tiers(kind: str | None) -> Iterator[list[dict[str, Any]]]:
    """The tier of a real server that runs meanwhile, or none."""
    if kind is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder, SERVERS[kind](Path(folder)) as server:
        yield [{"name": "pool", **server.tier()}]


@contextmanager
def cache_process(pools: Sequence[dict[str, Any]]) -> Iterator[Path]:
    """A `kvtier serve` with memory, and the pools below it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "socket")
        tiers = json.dumps([{"name": "ram", "type": "cpu", "capacity": "256MiB"}, *pools])
        environment = {**os.environ, "KVTIER_TIERS": tiers, "KVTIER_SOCKET": str(path)}
        command = [sys.executable, "-m", "kvtier", "serve", "--log-level", "WARNING"]
        process = subprocess.Popen(command, env=environment)
        try:
            while not answers(path):
                assert process.poll() is None, "the cache process did not start"
                time.sleep(0.05)
            yield path
        finally:
            process.terminate()
            process.wait()


def answers(path: Path) -> bool:
    try:
        return bool(status(path))
    except ChannelError:
        return False


@contextmanager
def echo(answer_bytes: int) -> Iterator[Callable[[bytes], None]]:
    """A process that answers each question at once; and a call that asks it."""
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        ours.close()
        answer = bytes(answer_bytes)
        while question := theirs.recv(1 << 18):
            if len(question):
                theirs.sendall(answer)
        os._exit(0)
    theirs.close()

    def ask(question: bytes) -> None:
        ours.sendall(question)
        received = 0
        while received < answer_bytes:
            received += len(ours.recv(1 << 18))

    try:
        yield ask
    finally:
        ours.close()
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
