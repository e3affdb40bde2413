"""LMCache's own connectors, driven by a benchmark: run by the Python that LMCache is installed for.

::

    python connectors.py redis://127.0.0.1:6379 --chunk-bytes 4194304 --chunks 16

``redis://`` and ``resp://`` to one server, with memory that LMCache has allocated and that was touched
before. Reads one question a line and answers each with one, in JSON: ``["redis", "put", 16]`` with the
seconds that 16 chunks took; so ``"get"``, and ``"look_up"`` with that many keys, all of which are held.
Memory is allocated within ``get``, as LMCache does; there is always some. A ``get`` that brings other bytes
than were put ends it.
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
"""What a token takes in a layer: K and V of 8 heads of 128, two bytes each."""
STAMP_BYTES = 8
PATIENCE_SECONDS = 60
"""By default redis-py gives 16 chunks of 128 MiB up after 5 seconds."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--chunk-bytes", type=int, required=True, help="whole MiB")
    parser.add_argument("--chunks", type=int, required=True, help="the most at once")
    parser.add_argument("--resp-threads", type=int, default=8, help="the peer's default is %(default)s")
    # What LMCache prints is not for the asker.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asyncio.run(answer(parser.parse_args(), answers))


async def answer(given: argparse.Namespace, answers: TextIO) -> None:
    """Answer every line of standard input, until its end."""
    memory = allocator(given.chunk_bytes, given.chunks, given.resp_threads)
    redis, resp = (
        CreateConnector(url, asyncio.get_running_loop(), memory, memory.config, memory.metadata)
        for url in (
            f"{given.url}?socket_timeout={PATIENCE_SECONDS}",
            given.url.replace("redis://", "resp://"),
        )
    )
    peers = {"redis": Redis(redis, memory), "resp": Resp(resp, memory)}
    peers["redis"].fill(given.chunks)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        kind, call, count = json.loads(line)
        print(json.dumps(await getattr(peers[kind], call)(count)), file=answers)
    # The connectors' own way to end waits for itself where it is called from their loop.
    os._exit(0)


def allocator(chunk_bytes: int, chunks: int, resp_threads: int) -> LocalCPUBackend:
    """Memory for so many chunks, and one more. Chunks of the shape that a model with MHA has."""
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


class Peer:
    """One connector. Seconds are of LMCache's call alone."""

    def __init__(self, connector: RemoteConnector, memory: LocalCPUBackend) -> None:
        self._connector = connector
        self._memory = memory

    async def put(self, count: int) -> float:
        """Put chunks in one batch."""
        chunks = self._allocate(count)
        for index, chunk in enumerate(chunks):
            stamp(chunk, index + 1)
        started = time.perf_counter()
        await self._connector.batched_put(keys("chunk", count), chunks)  # Lets go of them.
        return time.perf_counter() - started

    async def get(self, count: int) -> float:
        """Get what :meth:`put` has put, in one batch."""
        cleared = self._allocate(count)
        for chunk in cleared:
            stamp(chunk, 0)
            chunk.ref_count_down()
        started = time.perf_counter()
        chunks = await self._get_batch(keys("chunk", count))
        seconds = time.perf_counter() - started
        for index, chunk in enumerate(chunks):
            if stamps(chunk) != (index + 1, index + 1):
                raise SystemExit("LMCache has not brought the bytes that it was given")
            chunk.ref_count_down()
        if len(chunks) != count:
            raise SystemExit("LMCache has not brought all chunks")
        return seconds

    async def look_up(self, count: int) -> float:
        """Look keys up, all of them held, in one batch."""
        asked = keys("held", count)
        await self._hold([key.to_string() for key in asked])
        started = time.perf_counter()
        held = await self._connector.batched_async_contains("look-up", asked)
        seconds = time.perf_counter() - started
        if held != count:
            raise SystemExit(f"LMCache has found {held} of {count} keys")
        return seconds

    def fill(self, count: int) -> None:
        """Touch all memory, with bytes that are not all the same."""
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
        """Have the server hold what a look-up asks for, behind LMCache's back: no chunks are needed."""
        raise NotImplementedError


class Redis(Peer):
    """``redis://``: redis-py, and a second key for what the chunk is."""

    async def _get_batch(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        return await self._connector.batched_get_non_blocking("get", list(keys))

    async def _hold(self, names: Sequence[str]) -> None:
        client = self._connector.getWrappedConnector().connection
        await client.mset({f"{name}metadata": b"held" for name in names})


class Resp(Peer):
    """``resp://``: a client in C++ with threads of its own."""

    async def _get_batch(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        return await self._connector.batched_get(list(keys))

    async def _hold(self, names: Sequence[str]) -> None:
        client = self._connector.getWrappedConnector().client
        await client.batch_set(list(names), [memoryview(bytearray(b"held"))] * len(names))


def keys(kind: str, count: int) -> list[CacheEngineKey]:
    """As many keys, the same ones for the same kind."""
    first = int.from_bytes(kind.encode(), "big")
    return [CacheEngineKey("benchmark", 1, 0, first * 1000 + index, torch.bfloat16) for index in range(count)]


def stamp(chunk: MemoryObj, number: int) -> None:
    """Write a number at both ends of a chunk."""
    view = chunk.byte_array.cast("B")
    view[:STAMP_BYTES] = view[-STAMP_BYTES:] = number.to_bytes(STAMP_BYTES, "little")


def stamps(chunk: MemoryObj) -> tuple[int, int]:
    """The numbers at both ends."""
    view = chunk.byte_array.cast("B")
    return int.from_bytes(view[:STAMP_BYTES], "little"), int.from_bytes(view[-STAMP_BYTES:], "little")


if __name__ == "__main__":
    main()
