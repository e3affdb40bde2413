"""Process that runs LMCache, with the Python of LMCache's environment. Imports nothing of kvtier.

::

    python lmcache_process.py --folder /tmp/x --chunk-bytes 33554432 --chunks 32 --layers 8 --tokens 32768

Reads one request per line of JSON, such as ``["cpu", "put"]``, and answers with a line: the seconds for all
chunks. The tiers are LMCache's own classes, called as by its storage manager. ``engine`` is its
``LMCacheEngine``. LMCache has no connector for CPU tensors: the one here does the same as those that LMCache
ships for devices other than CUDA, ``index_select`` and ``index_copy_`` by slot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

GIB = 1 << 30
TOKENS, BLOCK = 256, 16
HEADS, HEAD = 8, 128
TOKEN_LAYER_BYTES = 2 * HEADS * HEAD * 2
"""K and V, with two bytes per element."""
LOOKUP_KEYS = 128
STAMP = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--chunk-bytes", type=int, required=True, help="whole MiB")
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--threads", type=int, default=4, help="threads of the disk tier")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--tokens", type=int, default=32_768)
    options = parser.parse_args()
    # Output of LMCache goes to standard error, so that it is not read as an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sides: dict[str, Any] = {}
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        kind, call = json.loads(line)
        if call == "close":
            sides.pop(kind).close()
            print(json.dumps(0.0), file=answers)
            continue
        if kind not in sides:
            sides[kind] = SIDES[kind](options)
        print(json.dumps(getattr(sides[kind], call)()), file=answers)
    # A regular exit would deadlock with LMCache's threads.
    os._exit(0)


def metadata_of(layers: int) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name="benchmark",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, TOKENS, HEADS, HEAD),
        chunk_size=TOKENS,
    )


def chunk_keys(kind: str, count: int) -> list[CacheEngineKey]:
    first = int.from_bytes(kind.encode(), "big") * 1000
    return [CacheEngineKey("benchmark", 1, 0, first + index, torch.bfloat16) for index in range(count)]


class Tier:
    """Moves chunks between the memory of an engine and one tier."""

    def __init__(self, options: argparse.Namespace, **settings: object) -> None:
        layers, rest = divmod(options.chunk_bytes, TOKENS * TOKEN_LAYER_BYTES)
        if rest:
            raise SystemExit(f"chunks are whole MiB, not {options.chunk_bytes} bytes")
        self.count = options.chunks
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            max_local_cpu_size=(options.chunks + 1) * options.chunk_bytes / GIB,
            save_unfull_chunk=False,
            **settings,
        )
        self.metadata = metadata_of(layers)
        self.memory = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.keys = chunk_keys("chunk", options.chunks)

    def allocate(self) -> list[MemoryObj]:
        shapes, dtypes = self.metadata.get_shapes(), self.metadata.get_dtypes()
        chunks = [self.memory.allocate(shapes, dtypes, busy_loop=False) for _ in range(self.count)]
        if None in chunks:
            raise SystemExit("LMCache has no memory for the chunks")
        return chunks

    def close(self) -> None:
        """Do nothing: everything is released with the process."""


class Cpu(Tier):
    """LMCache's memory tier. Copies chunks from and to an engine's tensors, as its connectors do."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, local_cpu=True)
        self.engine = [
            torch.randint(0, 250, (options.chunk_bytes,), dtype=torch.uint8) for _ in range(self.count)
        ]

    def put(self) -> float:
        started = time.perf_counter()
        chunks = self.allocate()
        for chunk, source in zip(chunks, self.engine, strict=True):
            raw(chunk).copy_(source)
        self.memory.batched_submit_put_task(self.keys, chunks)
        for chunk in chunks:
            chunk.ref_count_down()
        return time.perf_counter() - started

    def get(self) -> float:
        stamps = [bytes(source[:STAMP].tolist()) for source in self.engine]
        for source in self.engine:
            source[:STAMP] = 0
        started = time.perf_counter()
        for key, target in zip(self.keys, self.engine, strict=True):
            chunk = self.memory.get_blocking(key)
            target.copy_(raw(chunk))
            chunk.ref_count_down()
        seconds = time.perf_counter() - started
        if stamps != [bytes(source[:STAMP].tolist()) for source in self.engine]:
            raise SystemExit("LMCache returned wrong contents")
        return seconds

    def look_up(self) -> float:
        keys = [self.keys[index % self.count] for index in range(LOOKUP_KEYS)]
        started = time.perf_counter()
        held = sum(self.memory.contains(key) for key in keys)
        seconds = time.perf_counter() - started
        if held != len(keys):
            raise SystemExit(f"LMCache found {held} of {len(keys)} keys")
        return seconds

    def forget(self) -> float:
        for key in self.keys:
            self.memory.remove(key)
        return 0.0


class Disk(Tier):
    """LMCache's disk tier. Reads into and writes from LMCache's own memory."""

    def __init__(self, options: argparse.Namespace, direct: bool) -> None:
        folder = os.path.join(options.folder, f"lmcache-{direct}")  # noqa: PTH118 - LMCache takes a string
        extra = {"use_odirect": direct, "disk_io_threads": options.threads}
        super().__init__(
            options, local_cpu=False, local_disk=folder, max_local_disk_size=1000, extra_config=extra
        )
        self.disk = LocalDiskBackend(self.config, loop(), self.memory, dst_device="cpu")
        self.disk.keys_in_request = []
        for index, chunk in enumerate(self.allocate()):
            view = chunk.byte_array.cast("B")
            view[:] = os.urandom(len(view))
            stamp(chunk, index)
            chunk.ref_count_down()

    def put(self) -> float:
        chunks = self.allocate()
        for index, chunk in enumerate(chunks):
            stamp(chunk, index)
        done = threading.Semaphore(0)
        started = time.perf_counter()
        self.disk.batched_submit_put_task(self.keys, chunks, on_complete_callback=lambda _: done.release())
        for _ in chunks:
            done.acquire()
        seconds = time.perf_counter() - started
        for chunk in chunks:
            chunk.ref_count_down()
        return seconds

    def get(self) -> float:
        self.drop_cache()
        for chunk in (cleared := self.allocate()):
            stamp(chunk, -1)
        for chunk in cleared:
            chunk.ref_count_down()
        started = time.perf_counter()
        chunks = self.disk.batched_get_blocking(self.keys)
        seconds = time.perf_counter() - started
        if [read_stamp(chunk) for chunk in chunks] != list(range(self.count)):
            raise SystemExit("LMCache returned wrong contents")
        for chunk in chunks:
            chunk.ref_count_down()
        return seconds

    def look_up(self) -> float:
        keys = [self.keys[index % self.count] for index in range(LOOKUP_KEYS)]
        started = time.perf_counter()
        held = sum(self.disk.contains(key) for key in keys)
        seconds = time.perf_counter() - started
        if held != len(keys):
            raise SystemExit(f"LMCache found {held} of {len(keys)} keys")
        return seconds

    def forget(self) -> float:
        for key in self.keys:
            self.disk.remove(key)
        return 0.0

    def drop_cache(self) -> None:
        """Drop its files from the page cache."""
        for name in os.listdir(self.disk.path):  # noqa: PTH208
            descriptor = os.open(os.path.join(self.disk.path, name), os.O_RDONLY)  # noqa: PTH118
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class CpuConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Copies between an engine's paged CPU tensors, ``[2, slots, width]`` per layer, and LMCache's memory."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        self.caches = caches

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:  # noqa: ANN401
        slots = kwargs["slot_mapping"][start:end]
        target = memory_obj.tensor
        for layer, (keys, values) in enumerate(self.caches):
            torch.index_select(keys, 0, slots, out=target[0, layer])
            torch.index_select(values, 0, slots, out=target[1, layer])

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:  # noqa: ANN401
        slots = kwargs["slot_mapping"][start:end]
        source = memory_obj.tensor
        for layer, (keys, values) in enumerate(self.caches):
            keys.index_copy_(0, slots, source[0, layer])
            values.index_copy_(0, slots, source[1, layer])

    def batched_from_gpu(
        self,
        memory_objs: list[MemoryObj],
        starts: list[int],
        ends: list[int],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self,
        memory_objs: list[MemoryObj],
        starts: list[int],
        ends: list[int],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, len(self.caches), num_tokens, HEADS * HEAD])


class Engine:
    """LMCache's cache engine with the memory tier, and one prompt in an engine's KV memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        size = options.layers * options.tokens * TOKEN_LAYER_BYTES
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS, local_cpu=True, max_local_cpu_size=size * 1.25 / GIB, save_unfull_chunk=False
        )
        shape = (2, options.tokens + BLOCK, HEADS * HEAD)
        self.caches = [
            torch.randint(0, 999, shape, dtype=torch.int16).view(torch.bfloat16)
            for _ in range(options.layers)
        ]
        self.engine = LMCacheEngineBuilder.get_or_create(
            "benchmark",
            config,
            metadata_of(options.layers),
            CpuConnector(self.caches),
            no_broadcast,
            no_broadcast,
        )
        self.engine.post_init()
        generator = torch.Generator().manual_seed(0)
        blocks = 1 + torch.randperm(options.tokens // BLOCK, generator=generator)
        self.slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        self.tokens = torch.randint(0, 100_000, (options.tokens,), generator=generator).tolist()

    def store(self) -> float:
        started = time.perf_counter()
        self.engine.store(tokens=self.tokens, slot_mapping=self.slots, kvcaches=self.caches)
        return time.perf_counter() - started

    def look_up(self) -> float:
        started = time.perf_counter()
        # As its server for vLLM's scheduler: the chunks stay until the request has loaded them.
        held = self.engine.lookup(tokens=self.tokens, lookup_id="request", pin=True)
        self.engine.lookup_unpin("request")
        seconds = time.perf_counter() - started
        if held != len(self.tokens):
            raise SystemExit(f"LMCache found {held} of {len(self.tokens)} tokens")
        return seconds

    def retrieve(self) -> float:
        before = [layer[0, self.slots[0]].clone() for layer in self.caches]
        for layer in self.caches:
            layer[0, self.slots[0]] = 0
        started = time.perf_counter()
        mask = self.engine.retrieve(self.tokens, slot_mapping=self.slots, kvcaches=self.caches)
        seconds = time.perf_counter() - started
        after = [layer[0, self.slots[0]] for layer in self.caches]
        if not mask.all() or not all(map(torch.equal, before, after)):
            raise SystemExit("LMCache returned wrong contents")
        return seconds

    def forget(self) -> float:
        self.engine.clear()
        return 0.0

    def close(self) -> None:
        """Do nothing: everything is released with the process."""


def no_broadcast(*_: object) -> None:
    """Do nothing: there is only one worker."""


def raw(chunk: MemoryObj) -> torch.Tensor:
    return chunk.tensor.view(torch.uint8).flatten()


def stamp(chunk: MemoryObj, number: int) -> None:
    view = chunk.byte_array.cast("B")
    view[:STAMP] = view[-STAMP:] = (number + 1).to_bytes(STAMP, "little")


def read_stamp(chunk: MemoryObj | None) -> int:
    if chunk is None:
        return -1
    view = chunk.byte_array.cast("B")
    head, tail = int.from_bytes(view[:STAMP], "little"), int.from_bytes(view[-STAMP:], "little")
    return head - 1 if head == tail else -1


def loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a thread, as in LMCache's storage manager."""
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, daemon=True).start()
    return _loop


_loop: asyncio.AbstractEventLoop | None = None
SIDES = {
    "cpu": Cpu,
    "disk": lambda options: Disk(options, direct=False),
    "disk O_DIRECT": lambda options: Disk(options, direct=True),
    "engine": Engine,
}


if __name__ == "__main__":
    main()
