"""Measure how long it takes until a prompt on a cold disk is in the engine's blocks.

::

    python -m benchmarks.cold_loads               # needs 2 GiB in the folder, 1 GiB of memory
    python -m benchmarks.cold_loads --folder /dev/shm
    python -m benchmarks.cold_loads --small

The hooks of scheduler and worker are called as by vLLM, in steps that compute nothing, with a real cache
process. ``read``: from the request until all chunks are in the memory of the cache process, with nothing
copied. ``copy``: one copy of all of them into the blocks, from memory. ``load``: from the request until the
workers report the load. No load can be faster than the slower of the two; one that copies after it has read
takes the sum. Each prompt is read once per restart of the cache process, with O_DIRECT, so all are cold;
prompts are read and loaded in turn. The disk is that of the folder, at its own speed, or throttled to a
fraction of the speed of the copy. For these rows, a folder in memory is fast enough on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.cache_process import serving
from benchmarks.common import parse, reserve, show
from kvtier.bridge.client import status
from kvtier.integrations.vllm.request import request_root
from kvtier.memory.keys import chunk_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from tests.rigs.stepping import Request, Sides, make_request, scheduled

MIB = 1 << 20
CHUNK_TOKENS, BLOCK_TOKENS, LAYERS = 256, 32, 12
PAGE_BYTES = 64 << 10
"""Those of the model of ``kvtier demo``: a chunk has 6 MiB."""
CHUNK_MIB = CHUNK_TOKENS // BLOCK_TOKENS * LAYERS * PAGE_BYTES // MIB
STEP_SECONDS = 0.001
"""The time that vLLM sleeps after a step that computes nothing."""
SPEEDS = {"not throttled": 0.0, "1/8 of copy": 1 / 8, "1/4 of copy": 1 / 4, "1/2 of copy": 1 / 2}
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (PAGE_BYTES,) * LAYERS),))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure loads from a cold disk.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; default: current folder")
    parser.add_argument("--mib", type=int, default=192, help="of KV per prompt, default: %(default)s")
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    options = parse(parser)
    if options.small:
        options.mib, options.runs = 24, 1
    chunks = options.mib // CHUNK_MIB
    requests = [make_request(chunks * CHUNK_TOKENS) for _ in range(2 * options.runs)]
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder:
        prompts = Prompts(Path(folder), requests, chunks)
        prompts.store()
        copy = prompts.copy()
        for name, multiple in SPEEDS.items():
            rows.append((name, *prompts.measure(copy, multiple)))
    columns = ("", "read ms", "copy ms", "load ms", "load : slower of both", "range")
    show(f"loads of {options.mib} MiB, {options.runs} of each", columns, rows)


class Prompts:
    """Prompts whose chunks are on the disk of a cache process."""

    def __init__(self, folder: Path, requests: Sequence[Request], chunks: int) -> None:
        self._folder = folder
        self._requests = requests
        self._chunks = chunks
        self._bytes = chunks * CHUNK_MIB * MIB

    def store(self) -> None:
        """Store all prompts, and wait until they are on the disk."""
        with self.engine(0) as engine:
            for request in self._requests:
                engine.store(request)
                while status(self._folder / "socket")["pending_bytes"]:
                    time.sleep(0.02)

    def copy(self) -> float:
        """Return the seconds of one copy of a prompt from memory, once its pages have been touched."""
        with self.engine(0) as engine:
            engine.load(self._requests[0])
            return statistics.median(engine.copy(self._chunks) for _ in range(5))

    def measure(self, copy: float, multiple: float) -> tuple[object, ...]:
        """Return the medians of all times in milliseconds, and the ratio."""
        reads: list[float] = []
        loads: list[float] = []
        with self.engine(multiple * self._bytes / copy) as engine:
            for first, second in zip(self._requests[::2], self._requests[1::2], strict=True):
                reads.append(engine.read(first))
                loads.append(engine.load(second))
        ratios = [load / max(read, copy) for read, load in zip(reads, loads, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        read, load = statistics.median(reads), statistics.median(loads)
        return read * 1e3, copy * 1e3, load * 1e3, statistics.median(ratios), spread

    @contextmanager
    def engine(self, bytes_per_second: float, **settings: object) -> Iterator[Engine]:
        """Run a cache process with cold memory, and the hooks of an engine."""
        socket = self._folder / "socket"
        tiers = [
            {"name": "ram", "type": "cpu", "capacity": 3 * self._bytes},
            {"name": "ssd", "type": "disk", "path": str(self._folder / "disk"), "capacity": "64GiB"},
        ]
        with cache_process(socket, bytes_per_second, tiers=tiers, **settings):
            engine = Engine(socket, self._chunks, **settings)
            yield engine
            engine.close()


@contextmanager
def cache_process(socket: Path, bytes_per_second: float, **settings: object) -> Iterator[None]:
    """Run a cache process whose disks and peers deliver at most as fast as given; 0 does not throttle."""
    variables = {f"KVTIER_{name.upper()}": json.dumps(value) for name, value in settings.items()}
    program = str(Path(__file__).with_name("throttled_serve.py"))
    with serving(socket, variables, [program, str(bytes_per_second)]):
        yield


class Engine:
    """Both sides of the connector, and one set of blocks for all prompts."""

    def __init__(self, socket: Path, chunks: int, **settings: object) -> None:
        self._blocks = 1 + chunks * CHUNK_TOKENS // BLOCK_TOKENS
        self._sides = Sides.connect(socket, LAYOUT, self._blocks, **settings)
        self._scheduler, self._bridges = self._sides.scheduler, self._sides.bridges
        self._last: list[Any] = []

    def store(self, request: Request) -> None:
        """Store the chunks of a prompt."""
        scheduler, worker = self._bridges
        root = request_root(namespace("model", LAYOUT), request)
        keys = chunk_keys(root, list(request.all_token_ids), CHUNK_TOKENS)
        reserved = reserve(scheduler, root, keys, CHUNK_TOKENS)
        assert worker.arena is not None
        assert all(reserved.leases)
        for offset in reserved.offsets:
            worker.arena.view(offset + 4096, 64)[:] = os.urandom(64)
        worker.commit(reserved.leases)

    def read(self, request: Request) -> float:
        """Return the seconds until all chunks of a prompt are in the memory of the cache process."""
        started = time.perf_counter()
        self._scheduler.on_new_request(request)
        ticket = self._scheduler._requests[request.request_id].lookup.ticket
        assert ticket is not None
        while (found := self._bridges[0].found(ticket)) is not None and not found.final:
            time.sleep(STEP_SECONDS)
        seconds = time.perf_counter() - started
        assert found is not None
        assert len(found.leases) == request.num_tokens // CHUNK_TOKENS
        self.finish(request)
        return seconds

    def load(self, request: Request) -> float:
        """Return the seconds until all chunks of a prompt are in the blocks."""
        started = time.perf_counter()
        self._last = []
        assert self.start(request) == request.num_tokens
        seconds = time.perf_counter() - started
        self.finish(request)
        return seconds

    def start(self, request: Request) -> int:
        """Look up a prompt, and load what is found, in steps that compute nothing; return its tokens."""
        self._scheduler.on_new_request(request)
        while (tokens := self._ask(request)) and not self._run_load(request, tokens):
            pass  # Some chunks have not arrived: a shorter hit is loaded.
        return tokens

    def _ask(self, request: Request) -> int:
        while (tokens := self._scheduler.matched_tokens(request, 0)[0]) is None:
            self.step(request)
            time.sleep(STEP_SECONDS)
        return tokens

    def _run_load(self, request: Request, tokens: int) -> bool:
        """Load a hit; return whether that has succeeded."""
        table: Any = SimpleNamespace(get_block_ids=lambda: (list(range(1, self._blocks)),))
        self._scheduler.allocated(request, table, tokens)
        while (succeeded := self.step(request)) is None:
            time.sleep(STEP_SECONDS)
        return succeeded

    def step(self, request: Request, count: int = 0) -> bool | None:
        """Run a step that computes ``count`` tokens.

        Returns whether the load of the request has succeeded, ``None`` while it has not ended.
        """
        output: Any = scheduled({request.request_id: count} if count else {})
        metadata = self._scheduler.build_metadata(output)
        self._last += [chunk for job in metadata.loads for chunk in job.chunks]
        results = self._sides.run_worker(metadata)
        succeeded = request.request_id not in results.failed_recving
        return succeeded if request.request_id in results.finished_recving else None

    def copy(self, chunks: int) -> float:
        """Return the seconds of one copy of the chunks that were loaded last."""
        assert len(self._last) >= chunks
        assert self._bridges[1].arena is not None
        started = time.perf_counter()
        self._sides.worker._copies.load(self._bridges[1].arena, self._last[:chunks])
        return time.perf_counter() - started

    def finish(self, request: Request) -> None:
        """Finish a request."""
        self._scheduler.finished(request, ([],))

    def close(self) -> None:
        self._sides.close()


if __name__ == "__main__":
    main()
