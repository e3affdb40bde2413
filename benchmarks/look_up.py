"""Measure a lookup as in vLLM's scheduler: hash a prompt, ask the cache process, receive the leases.

::

    python -m benchmarks.look_up                # a prompt of 32,768 tokens
    python -m benchmarks.look_up --runs 20
    python -m benchmarks.look_up --policy lru   # with another eviction policy than kvtier's default
    python -m benchmarks.look_up --pool redis   # an unknown prompt is also looked up in a real Redis

All chunks are READY in the first tier of a real cache process. The limits are a plain round trip of as many
bytes over a Unix socket to a process that does nothing else, and the same after as long a pause. The next
line is for comparison on a busy machine: a round trip of two processes that compute, one after the other, for
as long as engine and cache process do for a lookup, what these do after the answer included. The CPU time of
both processes includes that of releasing the leases.

Reserving, confirming and committing as many chunks is measured as well: besides the copy, that is the cost of
a store and a load for the engine. With a pool, a prompt unknown to this host is looked up there before the
answer is final. The last line is the lookup of an engine that spans hosts, over TCP on loopback through a
second cache process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.cache_process import serving
from benchmarks.common import confirm, parse, reserve, show
from kvtier.bridge import protocol
from kvtier.bridge.client import LookupState, SchedulerBridge, WorkerBridge, status
from kvtier.bridge.protocol import Hello, RequestInfo
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.memory.keys import KEY_BYTES, ChunkKey, block_hashes, chunk_keys, encode_tokens, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query
from kvtier.testing.servers import free_port
from tests.rigs.servers import SERVERS

AnswerT = TypeVar("AnswerT")
Row = tuple[str, float, float, float, float | str]

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
PAUSE_SECONDS = 0.01
PAYLOAD_BYTES = 16 << 10
ANSWER_BYTES_PER_CHUNK = 10
COMPUTE_BYTES = 4
"""At the beginning of a question: for how many microseconds to compute the answer."""
NAMESPACE = bytes(32)
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (PAYLOAD_BYTES // 16,)),))
ROOT = root_key(NAMESPACE)
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a lookup, including hashing and the socket.")
    parser.add_argument("--tokens", type=int, default=32_768, help="default: %(default)s")
    parser.add_argument("--runs", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--policy", help="eviction policy of the tier; default: that of kvtier")
    parser.add_argument("--pool", choices=SERVERS, help="add a tier on a real server of this kind")
    options = parse(parser, runs=2, tokens=2048)
    tokens = random.Random(0).choices(range(100_000), k=options.tokens)
    address = f"127.0.0.1:{free_port()}"
    with (
        pool_tiers(options.pool) as pools,
        cache_process(pools, address, options.policy) as path,
        cache_process([], f"127.0.0.1:{free_port()}", options.policy) as elsewhere,
    ):
        worker, scheduler = WorkerBridge(hello("worker"), path), SchedulerBridge(hello("scheduler"), path)
        worker.connect()
        scheduler.connect()
        rows = measure(scheduler, worker, tokens, options.runs, status(path)["pid"])
        scheduler.close()
        remote = SchedulerBridge(msgspec.structs.replace(hello("scheduler"), to=address), elsewhere)
        remote.connect()
        rows.append(measure_remote(remote, tokens, options.runs))
        remote.close()
        worker.close()
    show(
        f"a prompt of {options.tokens:,} tokens, {options.runs} runs of each call",
        ("call", "median µs", "p99 µs", "CPU µs", "CPU µs of the cache process"),
        rows,
    )


def measure(
    scheduler: SchedulerBridge, worker: WorkerBridge, tokens: list[int], runs: int, cache: int
) -> list[Row]:
    encoded = encode_tokens(tokens)
    keys = chunk_keys(ROOT, tokens, CHUNK_TOKENS)
    store_all(scheduler, worker, keys)

    def hash_and_look_up() -> LookupState:
        encoded = encode_tokens(tokens)
        block_tags = block_tags_of(block_hashes(encoded, BLOCK_TOKENS))
        return look_up(scheduler, chunk_keys(ROOT, encoded, CHUNK_TOKENS), block_tags)

    def socket_only() -> LookupState:
        return look_up(scheduler, keys)

    def explained() -> LookupState:
        return look_up(scheduler, keys, described=RequestInfo())

    def release(found: LookupState) -> None:
        assert len(found.leases) == len(keys)
        scheduler.cancel(found.call.ticket)

    def report(found: LookupState) -> None:
        release(found)
        hits = {"ram": len(tokens)}
        scheduler.end(protocol.Outcome(found.call.ticket, "request", len(tokens), 0, hits))
        scheduler.send_outcomes()

    def pause(found: LookupState) -> None:
        release(found)
        time.sleep(PAUSE_SECONDS)

    def reserve_and_abandon() -> None:
        fresh = [ChunkKey(os.urandom(KEY_BYTES)) for _ in keys]
        reserved = reserve(scheduler, ROOT, fresh, CHUNK_TOKENS)
        scheduler.abandon(reserved.granted)

    ticket = scheduler.look_up(Query(keys, len(tokens)))
    assert ticket is not None
    lookup = scheduler.found(ticket, wait=5)
    assert lookup is not None

    def confirm_all() -> None:
        assert confirm(worker, lookup.leases)

    def look_up_unknown() -> None:
        fresh = [ChunkKey(os.urandom(KEY_BYTES)) for _ in keys]
        block_tags = random.randbytes(len(tokens) // BLOCK_TOKENS)
        ticket = scheduler.look_up(Query(fresh, len(tokens), block_tags=PromptTags(ROOT, block_tags, BLOCKS)))
        assert ticket is not None
        unknown = scheduler.found(ticket, wait=5)
        while unknown is not None and not unknown.final:
            unknown = scheduler.found(ticket)
        assert unknown is not None
        assert not unknown.leases
        scheduler.cancel(ticket)

    with echo_process(len(keys) * ANSWER_BYTES_PER_CHUNK) as round_trip:
        question = bytes(len(keys) * KEY_BYTES)
        complete = timed("lookup: hashing and the socket", hash_and_look_up, runs, release, cache)
        ours, theirs = complete[3], int(complete[4] or 0)
        demanding = theirs.to_bytes(COMPUTE_BYTES) + question[COMPUTE_BYTES:]

        def compute_as_long() -> None:
            compute(ours / 1e6)
            round_trip(demanding)

        return [
            complete,
            timed(f"  {PAUSE_SECONDS * 1000:g} ms after the last one", hash_and_look_up, runs, pause, cache),
            timed("  conversion of the tokens only", lambda: encode_tokens(tokens), runs),
            timed("  hashing of chunks only", lambda: chunk_keys(ROOT, encoded, CHUNK_TOKENS), runs),
            timed("  hashing of blocks only", lambda: block_hashes(encoded, BLOCK_TOKENS), runs),
            timed("  socket only", socket_only, runs, release, cache),
            timed("  the same, explained and reported", explained, runs, report, cache),
            timed("limit: plain round trip of as many bytes", lambda: round_trip(question), runs),
            timed(
                "  after as long a pause",
                lambda: round_trip(question),
                runs,
                lambda _: time.sleep(PAUSE_SECONDS),
            ),
            timed("  with the computing of a lookup, in turns", compute_as_long, runs),
            timed("lookup of an unknown prompt", look_up_unknown, runs),
            timed("reserve and abandon all chunks", reserve_and_abandon, runs),
            timed("confirm all chunks", confirm_all, runs),
        ]


def measure_remote(scheduler: SchedulerBridge, tokens: list[int], runs: int) -> Row:
    """Measure the lookup of an engine on several hosts, through the cache process of the scheduler's host."""
    keys = chunk_keys(ROOT, tokens, CHUNK_TOKENS)

    def release(found: LookupState) -> None:
        assert len(found.leases) == len(keys)
        scheduler.cancel(found.call.ticket)

    return timed("socket only, of another host", lambda: look_up(scheduler, keys), runs, release)


def store_all(scheduler: SchedulerBridge, worker: WorkerBridge, keys: Sequence[ChunkKey]) -> None:
    """Store all chunks, and wait until they are READY for all connections."""
    worker.commit(reserve(scheduler, ROOT, keys, CHUNK_TOKENS).granted)
    while len((found := look_up(scheduler, keys)).leases) < len(keys):
        scheduler.cancel(found.call.ticket)
        time.sleep(0.01)
    scheduler.cancel(found.call.ticket)


def look_up(
    scheduler: SchedulerBridge,
    keys: Sequence[ChunkKey],
    block_tags: bytes = b"",
    described: RequestInfo | None = None,
) -> LookupState:
    """Look up the keys; return what has been granted, which the caller cancels."""
    prompt = PromptTags(ROOT, block_tags, BLOCKS) if block_tags else None
    ticket = scheduler.look_up(Query(keys, len(keys) * CHUNK_TOKENS, block_tags=prompt), described)
    assert ticket is not None
    lookup = scheduler.found(ticket, wait=5)
    assert lookup is not None
    return lookup


def timed(
    name: str,
    call: Callable[[], AnswerT],
    runs: int,
    cleanup: Callable[[AnswerT], None] = lambda _: None,
    cache: int | None = None,
) -> Row:
    """Return the name, median, 99th percentile and CPU time in microseconds, without 10 % warm-up runs.

    ``cleanup`` is not timed, because an engine releases leases only after the load. ``cache``: the id of the
    process whose CPU time is measured as well.
    """
    seconds = []
    before = 0.0, 0.0
    for run in range(-(runs // 10) - 1, runs):
        if run == 0:
            before = time.process_time(), cpu_seconds(cache)
        started = time.perf_counter()
        answer = call()
        if run >= 0:
            seconds.append(time.perf_counter() - started)
        cleanup(answer)
    ours, theirs = time.process_time() - before[0], cpu_seconds(cache) - before[1]
    seconds.sort()
    median, p99 = statistics.median(seconds), seconds[int(0.99 * (runs - 1))]
    return name, median * 1e6, p99 * 1e6, ours / runs * 1e6, theirs / runs * 1e6 if theirs else ""


def cpu_seconds(process: int | None) -> float:
    """Return the CPU time of the main thread of a process, exactly; 0 without a process."""
    if process is None:
        return 0.0
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


def hello(role: protocol.Role) -> Hello:
    return Hello(protocol.VERSION, "benchmark", role, 0, LAYOUT, NAMESPACE)


@contextmanager
def pool_tiers(kind: str | None) -> Iterator[list[dict[str, Any]]]:
    """Run a real server; yield its tier. Yields no tier if ``kind`` is ``None``."""
    if kind is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder, SERVERS[kind](Path(folder)) as server:
        yield [{"name": "pool", **server.tier()}]


@contextmanager
def cache_process(
    pools: Sequence[dict[str, Any]], listen: str = "", policy: str | None = None
) -> Iterator[Path]:
    """Run `kvtier serve` with a memory tier and the pools below it; yield its socket.

    ``listen``: its address for schedulers of other hosts, if any. ``policy``: the tier's eviction policy.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "socket")
        eviction = {"eviction": policy} if policy else {}
        tiers = json.dumps([{"name": "ram", "type": "cpu", "capacity": "256MiB", **eviction}, *pools])
        variables = {"KVTIER_TIERS": tiers}
        if listen:
            variables |= {"KVTIER_PEER__LISTEN": listen, "KVTIER_PEER__SECRET": "sixteen or more characters"}
        with serving(path, variables):
            yield path


@contextmanager
def echo_process(answer_bytes: int) -> Iterator[Callable[[bytes], None]]:
    """Run a process that answers each request; yield a function for one round trip.

    It computes for as many microseconds as the first :data:`COMPUTE_BYTES` name.
    """
    ours, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        ours.close()
        answer = bytes(answer_bytes)
        while question := theirs.recv(1 << 18):
            compute(int.from_bytes(question[:COMPUTE_BYTES]) / 1e6)
            theirs.sendall(answer)
        os._exit(0)
    theirs.close()

    def round_trip(question: bytes) -> None:
        ours.sendall(question)
        received = 0
        while received < answer_bytes:
            received += len(ours.recv(1 << 18))

    try:
        yield round_trip
    finally:
        ours.close()
        os.waitpid(process, 0)


def compute(seconds: float) -> None:
    """Use that much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


if __name__ == "__main__":
    main()
