"""Store, look up and retrieve a prompt through the engine-side API of both, over paged CPU tensors.

kvtier: the work of both sides of its connector for a request. The prompt is hashed, the scheduler's bridge
reserves or looks up, the worker copies between the blocks and the arena of a real cache process, and commits
or confirms. A store ends when a lookup finds the prompt. LMCache: its cache engine, in the engine's process.
A lookup begins with a list of token ids, as vLLM has them, and ends when its leases, or LMCache's pins, are
released.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.cache_process import is_ready
from benchmarks.common import reserve
from benchmarks.compare.pairs import Pair
from benchmarks.compare.tiers import LMCACHE
from benchmarks.peer import run_script
from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello
from kvtier.integrations.vllm.copies import ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout, Region
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.lab.demo.server import start_cache
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
TOKEN_LAYER_BYTES = 4096
"""K and V of 8 heads with 128 elements of two bytes."""
CALLS = ("store", "look_up", "retrieve")
TIMEOUT_SECONDS = 60


class Engine:
    """An engine's KV memory with one prompt, and the parts of kvtier's connector that move bytes."""

    def __init__(self, socket: Path, layers: int, tokens: int) -> None:
        page = BLOCK_TOKENS * TOKEN_LAYER_BYTES
        blocks = tokens // BLOCK_TOKENS + 1
        names = [f"layer {layer}" for layer in range(layers)]
        layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (page,) * layers),))
        regions = (tuple(Region(name, 0, page, page, blocks) for name in names),)
        model = ModelLayout(layout, bytes(32), regions, group_ids=(0,), layers=(tuple(names),))
        hello = [
            Hello(protocol.VERSION, "benchmark", role, 0, layout, model.namespace)
            for role in ("worker", "scheduler")
        ]
        self._bridge = WorkerBridge(hello[0], socket)
        self._scheduler = SchedulerBridge(hello[1], socket)
        self._bridge.connect()
        self._scheduler.connect()
        self._worker = WorkerSide(model, self._bridge, 0)
        self._caches = {name: torch.randint(0, 250, (blocks, page), dtype=torch.uint8) for name in names}
        self._worker.register(self._caches)
        generator = torch.Generator().manual_seed(0)
        self._blocks = (1 + torch.randperm(blocks - 1, generator=generator)).tolist()
        self._tokens = torch.randint(0, 100_000, (tokens,), generator=generator).tolist()
        self._root = root_key(model.namespace)

    def store(self) -> float:
        started = time.perf_counter()
        keys = chunk_keys(self._root, self._tokens, CHUNK_TOKENS)
        reserved = reserve(self._scheduler, self._root, keys, CHUNK_TOKENS)
        if not all(reserved.leases):
            raise SystemExit("kvtier has no room for the prompt")
        self._worker.save([self._job(reserved.leases, reserved.offsets)])
        while self._found(keys) < len(keys):
            if time.perf_counter() > started + TIMEOUT_SECONDS:
                raise SystemExit("kvtier did not store the prompt")
        return time.perf_counter() - started

    def look_up(self) -> float:
        started = time.perf_counter()
        keys = chunk_keys(self._root, self._tokens, CHUNK_TOKENS)
        if self._found(keys) < len(keys):
            raise SystemExit("kvtier did not find the prompt")
        return time.perf_counter() - started

    def retrieve(self) -> float:
        before = self._stamps()
        for cache in self._caches.values():
            cache[self._blocks[0]] = 0
            cache[self._blocks[-1]] = 0
        started = time.perf_counter()
        keys = chunk_keys(self._root, self._tokens, CHUNK_TOKENS)
        ticket = self._scheduler.look_up(Query(keys, len(self._tokens)))
        lookup = None if ticket is None else self._scheduler.found(ticket, wait=TIMEOUT_SECONDS)
        if ticket is None or lookup is None or len(lookup.leases) < len(keys):
            raise SystemExit("kvtier did not find the prompt")
        self._worker.load([self._job(lookup.leases, lookup.offsets)])
        loaded: set[str] = set()
        while not loaded:
            _, loaded, failed = self._worker.take_results()
        self._scheduler.cancel(ticket)
        seconds = time.perf_counter() - started
        if failed or not all(map(torch.equal, before, self._stamps())):
            raise SystemExit("kvtier returned wrong contents")
        return seconds

    def forget(self) -> None:
        if self._scheduler.clear(TIMEOUT_SECONDS) is None:
            raise SystemExit("kvtier did not clear its memory")

    def close(self) -> None:
        self._scheduler.close()
        self._worker.close()

    def _found(self, keys: Sequence[ChunkKey]) -> int:
        ticket = self._scheduler.look_up(Query(keys, len(self._tokens)))
        lookup = None if ticket is None else self._scheduler.found(ticket, wait=TIMEOUT_SECONDS)
        if ticket is None or lookup is None:
            raise SystemExit("the cache process did not answer")
        self._scheduler.cancel(ticket)
        return len(lookup.leases)

    def _job(self, leases: Sequence[int], offsets: Sequence[int]) -> Job:
        chunk_blocks = CHUNK_TOKENS // BLOCK_TOKENS
        chunks = [
            ChunkCopy(
                lease,
                offset,
                CHUNK_TOKENS,
                (self._blocks[index * chunk_blocks : (index + 1) * chunk_blocks],),
            )
            for index, (lease, offset) in enumerate(zip(leases, offsets, strict=True))
        ]
        assert self._bridge.epoch is not None
        return Job("benchmark", self._bridge.epoch, chunks, last=True)

    def _stamps(self) -> list[torch.Tensor]:
        return [
            cache[block].clone()
            for cache in self._caches.values()
            for block in (self._blocks[0], self._blocks[-1])
        ]


@contextmanager
def engine(layers: int, tokens: int) -> Iterator[Engine]:
    """Run a cache process with room for one prompt; yield an engine connected to it."""
    capacity = int(layers * tokens * TOKEN_LAYER_BYTES * 1.25)
    with tempfile.TemporaryDirectory() as folder:
        socket, settings = Path(folder, "socket"), Path(folder, "kvtier.yaml")
        settings.write_text(
            f"socket: {socket}\nlog_level: WARNING\nreserve_share: 1\n"
            f"tiers: [{{name: ram, type: cpu, capacity: {capacity}}}]\n"
        )
        server = start_cache(settings, Path(folder, "log"))
        try:
            server.wait_until(lambda: is_ready(socket), TIMEOUT_SECONDS)
            opened = Engine(socket, layers, tokens)
            yield opened
            opened.close()
        finally:
            server.stop()


def compare(layers: int, tokens: int, pairs: int) -> list[Pair]:
    """Return a pair for each call."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sizes = ["--chunk-bytes", 1 << 20, "--chunks", 1, "--layers", layers, "--tokens", tokens]
    with engine(layers, tokens) as ours, run_script(LMCACHE, "--folder", ".", *sizes) as theirs:
        for turn in range(pairs + 1):
            for name in ("kvtier", "LMCache")[:: 1 if turn % 2 else -1]:
                for call in CALLS:
                    took = getattr(ours, call)() if name == "kvtier" else theirs.ask("engine", call)
                    if turn:
                        seconds[call][name].append(took)
                ours.forget() if name == "kvtier" else theirs.ask("engine", "forget")
    length = layers * tokens * TOKEN_LAYER_BYTES
    return [
        Pair(
            f"{tokens:,} tokens, {layers} layers",
            call.replace("_", ""),
            by_side["kvtier"],
            by_side["LMCache"],
            0 if call == "look_up" else length,
        )
        for call, by_side in seconds.items()
    ]
