"""Measure a transport, interleaved with its limit, between two processes on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvtier.bench.calls import within
from kvtier.bench.errors import BenchFailed
from kvtier.bench.raw_sockets import Span
from kvtier.bench.rows import Extent, Row, Samples
from kvtier.bench.tiers import Advance
from kvtier.bench.timing import rotated
from kvtier.bench.transports import (
    LIMIT,
    Check,
    Contestant,
    contestants_of,
    other_process,
    others_paused,
    spans_between,
)
from kvtier.testing.transport_side import Side
from kvtier.transports.base import Access, Transport, TransportSettings
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.units import MIB


def memory_bytes(extent: Extent) -> int:
    """Return the memory use of :func:`measure_transport`, both processes together."""
    return 3 * extent.length + 4 * MIB


async def measure_transport(
    kind: type[Transport],
    transport: TransportSettings,
    raw: Mapping[str, Any],
    extent: Extent,
    advance: Advance,
    plugins: Sequence[str] | None,
) -> Row:
    """Measure a transport: write chunks into the arena of another process (put) and read them (get).

    ``raw``: unparsed settings of the transport, for the other process, which this function starts and stops.
    Calls ``advance`` as often as :func:`kvtier.bench.tiers.measure_tier`. Blocks the event loop while that
    process starts. Raises :class:`BenchFailed` and :class:`kvtier.errors.PeerError`.
    """
    lengths = [extent.size] * extent.chunks
    with other_process(raw, lengths, plugins=plugins) as other:
        async with Side.open(kind, raw, extent.length + MIB) as side:
            leases = [lease for length in lengths if (lease := side.arena.allocate(length)) is not None]
            side.arena.settle()
            try:
                spans = spans_between(leases, other)
                async with contestants_of(transport, side, other) as contestants:
                    check = Check(side, other, spans)
                    try:
                        samples = await _interleave(contestants, check, transport, extent, advance)
                    finally:
                        check.close()
            finally:
                for lease in leases:
                    lease.release()
    advance()
    limit = LIMIT if LIMIT in contestants else None
    name = "bare NIXL" if isinstance(transport, NixlSettings) else "raw socket pair"
    return Row(
        transport.type,
        "transport",
        name if limit else None,
        samples[Access.WRITE].direction(transport.type, limit, extent.length),
        samples[Access.READ].direction(transport.type, limit, extent.length),
        remark="between two processes on this host",
    )


async def _interleave(
    contestants: Mapping[str, Contestant],
    check: Check,
    transport: TransportSettings,
    extent: Extent,
    advance: Advance,
) -> dict[Access, Samples]:
    samples = {access: Samples() for access in Access}
    for turn in range(-1, extent.turns):
        for name in rotated(list(contestants), turn + 1):
            for access, direction in samples.items():
                with others_paused(contestants, name):
                    singles = []
                    if name == transport.type:
                        singles = await _move(contestants[name], check, access, 1, transport.deadline)
                    batches = await _move(
                        contestants[name], check, access, extent.in_flight, transport.deadline
                    )
                if turn >= 0:
                    direction.singles += singles
                    direction.turns.setdefault(name, []).append(sum(batches))
        advance()
    return samples


async def _move(
    contestant: Contestant, check: Check, access: Access, in_flight: int, deadline: float
) -> list[float]:
    """Move all chunks; return the seconds of each batch."""
    all_spans = check.spans[access]
    seconds = []
    for start in range(0, len(all_spans), in_flight):
        spans: Sequence[Span] = all_spans[start : start + in_flight]
        check.clear(access, spans)
        doing = "writing chunks" if access is Access.WRITE else "reading chunks"
        seconds.append(await within(deadline, doing, partial(contestant.mover.move, access, spans)))
        if not check.arrived(access, spans):
            raise BenchFailed("it did not transfer all bytes")
    return seconds
