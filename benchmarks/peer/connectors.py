"""Runs LMCache's own connectors for a benchmark, with the Python of LMCache's environment.

::

    python connectors.py redis://127.0.0.1:6379 --chunk-bytes 4194304 --chunks 16

``redis://`` and ``resp://`` to one server, with memory that was allocated by LMCache and touched before.
Reads one request per line of JSON and answers with a line: to ``["redis", "put", 16]`` with the seconds for
16 chunks; likewise ``"get"``, and ``"look_up"`` of that many keys, which are all held. ``get`` includes the
allocation of memory, as in LMCache; memory is always available. Wrong contents end the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

GIB = 1 << 30
TOKENS = 256
TOKEN_LAYER_BYTES = 4096
"""Bytes per token and layer: K and V of 8 heads with 128 elements of two bytes."""
STAMP_BYTES = 8
TIMEOUT_SECONDS = 60
"""With redis-py's default of 5 seconds, 16 chunks of 128 MiB time out."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--chunk-bytes", type=int, required=True, help="whole MiB")
    parser.add_argument("--chunks", type=int, required=True, help="maximum batch size")
    parser.add_argument("--resp-threads", type=int, default=8, help="LMCache's default is %(default)s")
    # Output of LMCache goes to standard error, so that it is not read as an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(serve(parser.parse_args(), answers))


async def serve(options: argparse.Namespace, answers: TextIO) -> None:
    """Answer every line of standard input until it ends."""
    memory = allocator(options.chunk_bytes, options.chunks, options.resp_threads)
    redis, resp = (
        CreateConnector(url, asyncio.get_running_loop(), memory, memory.config, memory.metadata)
        for url in (
            f"{options.url}?socket_timeout={TIMEOUT_SECONDS}",
            options.url.replace("redis://", "resp://"),
        )
    )
    connectors = {"redis": Redis(redis, memory), "resp": Resp(resp, memory)}
    connectors["redis"].fill(options.chunks)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        kind, call, count = json.loads(line)
        print(json.dumps(await getattr(connectors[kind], call)(count)), file=answers)
    # Closing the connectors from their own event loop would deadlock.
    os._exit(0)


def allocator(chunk_bytes: int, chunks: int, resp_threads: int) -> LocalCPUBackend:
    """Return memory for one more than ``chunks`` chunks, with the shape of a model with MHA."""
    layers, rest = divmod(chunk_bytes, TOKENS * TOKEN_LAYER_BYTES)
    if rest:
        raise SystemExit(f"chunks are whole MiB, not {chunk_bytes} bytes")
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=(chunks + 1) * chunk_bytes / GIB,
        save_unfull_chunk=False,
        extra_config={"save_chunk_meta": False, "resp_num_threads": resp_threads},
    )
    metadata = LMCacheMetadata(
        model_name="benchmark",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, TOKENS, 8, 128),
        chunk_size=TOKENS,
    )
    return LocalCPUBackend(config, metadata, dst_device="cpu")


class Connector:
    """One connector. Only LMCache's own call is timed."""

    def __init__(self, connector: RemoteConnector, memory: LocalCPUBackend) -> None:
        self._connector = connector
        self._memory = memory

    async def put(self, count: int) -> float:
        """Put chunks in one batch."""
        chunks = self._allocate(count)
        for index, chunk in enumerate(chunks):
            stamp(chunk, index + 1)
        started = time.perf_counter()
        await self._connector.batched_put(keys("chunk", count), chunks)  # Releases them.
        return time.perf_counter() - started

    async def get(self, count: int) -> float:
        """Get the chunks that :meth:`put` stored, in one batch."""
        cleared = self._allocate(count)
        for chunk in cleared:
            stamp(chunk, 0)
            chunk.ref_count_down()
        started = time.perf_counter()
        chunks = await self._get_batch(keys("chunk", count))
        seconds = time.perf_counter() - started
        for index, chunk in enumerate(chunks):
            if read_stamps(chunk) != (index + 1, index + 1):
                raise SystemExit("LMCache returned wrong contents")
            chunk.ref_count_down()
        if len(chunks) != count:
            raise SystemExit("LMCache did not return all chunks")
        return seconds

    async def look_up(self, count: int) -> float:
        """Look up keys, all of which are held, in one batch."""
        lookup_keys = keys("held", count)
        await self._hold([key.to_string() for key in lookup_keys])
        started = time.perf_counter()
        held = await self._connector.batched_async_contains("look-up", lookup_keys)
        seconds = time.perf_counter() - started
        if held != count:
            raise SystemExit(f"LMCache found {held} of {count} keys")
        return seconds

    def fill(self, count: int) -> None:
        """Touch all memory, with random bytes."""
        for chunk in self._allocate(count):
            view = chunk.byte_array.cast("B")
            view[:] = os.urandom(1 << 20) * (len(view) >> 20)
            chunk.ref_count_down()

    def _allocate(self, count: int) -> list[MemoryObj]:
        metadata = self._memory.metadata
        chunks = [
            self._memory.allocate(metadata.get_shapes(), metadata.get_dtypes(), busy_loop=False)
            for _ in range(count)
        ]
        if None in chunks:
            raise SystemExit("LMCache has no memory for the chunks")
        return chunks

    async def _get_batch(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        raise NotImplementedError

    async def _hold(self, names: Sequence[str]) -> None:
        """Create the keys of a lookup on the server, bypassing LMCache: no chunks are needed."""
        raise NotImplementedError


class Redis(Connector):
    """``redis://``: redis-py, with a second key for the metadata of a chunk."""

    async def _get_batch(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        objects: list[MemoryObj] = await self._connector.batched_get_non_blocking("get", list(keys))
        return objects

    async def _hold(self, names: Sequence[str]) -> None:
        client = self._connector.getWrappedConnector().connection
        await client.mset({f"{name}metadata": b"held" for name in names})


class Resp(Connector):
    """``resp://``: a client in C++ with its own threads."""

    async def _get_batch(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        objects: list[MemoryObj] = await self._connector.batched_get(list(keys))
        return objects

    async def _hold(self, names: Sequence[str]) -> None:
        client = self._connector.getWrappedConnector().client
        await client.batch_set(list(names), [memoryview(bytearray(b"held"))] * len(names))


def keys(kind: str, count: int) -> list[CacheEngineKey]:
    """Return ``count`` keys, the same ones for the same kind."""
    first = int.from_bytes(kind.encode(), "big")
    return [CacheEngineKey("benchmark", 1, 0, first * 1000 + index, torch.bfloat16) for index in range(count)]


def stamp(chunk: MemoryObj, number: int) -> None:
    """Write a number at both ends of a chunk."""
    view = chunk.byte_array.cast("B")
    view[:STAMP_BYTES] = view[-STAMP_BYTES:] = number.to_bytes(STAMP_BYTES, "little")


def read_stamps(chunk: MemoryObj) -> tuple[int, int]:
    """Return the numbers at both ends."""
    view = chunk.byte_array.cast("B")
    return int.from_bytes(view[:STAMP_BYTES], "little"), int.from_bytes(view[-STAMP_BYTES:], "little")


if __name__ == "__main__":
    main()
