"""Measure a transport, interleaved with its limit, between two processes on this host, each with an arena.

The limit of ``tcp`` is the same bytes on as many plain blocking sockets, with a thread each. The limit of
``nixl`` is one plain NIXL transfer in a busy loop, between two processes that map the same arenas and have
the same UCX variables. A third-party transport has no limit.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kvtier.lab.bench.bare_nixl import BareNixl
from kvtier.lab.bench.mirror import Helper, Mirror
from kvtier.lab.bench.raw_sockets import RawSockets
from kvtier.lab.bench.rows import KVTIER, LIMIT, Extent, Row
from kvtier.lab.bench.sides import Chunk, Side, expect_ok, make_chunks, random_keys, timed
from kvtier.lab.bench.turns import Advance, Turns, closing
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.testing.transport_sides import SimpleGrants, dial_to
from kvtier.transports.base import Link, RemoteSpan, Transport
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.tcp.transport import TcpSettings
from kvtier.units import MIB


class LinkSide(Side):
    """A transport of kvtier: a put writes to the other process's arena, a get reads from it."""

    def __init__(self, link: Link, mirror: Mirror, grant: int) -> None:
        self._link = link
        self._mirror = mirror
        self._grant = grant

    async def put(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.put`."""
        items = [(view, self._span(view)) for _, view in chunks]
        seconds, outcomes = await timed(lambda: self._link.write(items))
        return expect_ok("write", seconds, outcomes, len(chunks))

    async def get(self, chunks: Sequence[Chunk]) -> float:
        """See :meth:`Side.get`."""
        items = [(self._span(view), view) for _, view in chunks]
        seconds, outcomes = await timed(lambda: self._link.read(items))
        return expect_ok("read", seconds, outcomes, len(chunks))

    async def forget(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Side.forget`."""
        self._mirror.clear(keys)

    async def close(self) -> None:
        """See :meth:`Side.close`."""
        await self._link.close()

    def _span(self, view: memoryview) -> RemoteSpan:
        return RemoteSpan(self._grant, self._mirror.offset(view), len(view))


def memory_bytes(extent: Extent) -> int:
    """Return the memory use of :func:`measure_transport`, both processes together."""
    return 2 * extent.length + 4 * MIB


async def measure_transport(
    kind: type[Transport], raw: Mapping[str, Any], extent: Extent, advance: Advance
) -> Row:
    """Measure a transport: write chunks into the arena of another process (put) and read them (get).

    ``raw``: unparsed settings of the transport. Calls ``advance`` as often as
    :func:`kvtier.lab.bench.tiers.measure_tier`. Raises :class:`BenchFailed` and
    :class:`kvtier.errors.PeerError`.
    """
    settings = kind.settings_type.model_validate(dict(raw))
    async with open_sides(kind, raw, extent.chunks, extent.size) as (sides, chunks):
        turns = Turns(sides, settings.deadline, extent)
        await turns.run(chunks, advance)
    advance()
    return turns.row(settings.type, "transport", remark="between two processes on this host")


@asynccontextmanager
async def open_sides(
    kind: type[Transport], raw: Mapping[str, Any], count: int, size: int
) -> AsyncIterator[tuple[dict[str, Side], list[Chunk]]]:
    """Start the other process. Yield the transport and its limit, if any, and ``count`` chunks to move."""
    settings = kind.settings_type.model_validate(dict(raw))
    capacity = count * size + MIB
    before = family(os.getpid())
    async with AsyncExitStack() as stack:
        arena = Arena.create(capacity)
        stack.push(closing(arena))
        transport = kind(settings)
        stack.push_async_callback(transport.close)
        await transport.open(arena, SimpleGrants(arena))
        chunks = make_chunks(arena, random_keys(count), size)
        other = Helper()
        stack.callback(other.kill)
        other.start()
        endpoint, port = await other.open(kind, dict(raw), capacity, None)
        granted = await other.grant([size] * count, access=None)
        mirror = Mirror(arena, Path(await other.do("arena_path")), chunks)
        stack.callback(mirror.close)
        # The mirror finds a chunk at its own offset in both arenas.
        assert [span.offset for span in granted] == [mirror.offset(view) for _, view in chunks]
        link = LinkSide(await transport.connect(endpoint, dial_to(port)), mirror, granted[0].grant)
        stack.push_async_callback(link.close)
        sides: dict[str, Side] = {KVTIER: link}
        if isinstance(settings, TcpSettings):
            sides[LIMIT] = RawSockets(mirror, settings.connections)
        elif isinstance(settings, NixlSettings):
            link.helpers = family(os.getpid()) - before - {other.pid}
            sides[LIMIT] = BareNixl(mirror, settings.environment())
        if LIMIT in sides:
            stack.push_async_callback(sides[LIMIT].close)
        yield sides, chunks


def family(process: int) -> set[int]:
    """Return a process and all its descendants, in which a transport may run."""
    found = {process}
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError):
            for child in (thread / "children").read_text().split():
                found |= family(int(child))
    return found
