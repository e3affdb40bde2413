"""Compare several caches on one trace, and with the optimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.lab.simulation.belady import belady_hits, next_uses
from kvtier.lab.simulation.replay import Advance, Model, Outcome, replay
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.whatif.simulated_cache import SimulatedTiers
from kvtier.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Row:
    """One cache and its bound."""

    outcome: Outcome
    bound: float | None
    """The highest possible hit rate with the same capacity; ``None`` with a shared pool."""


@dataclass(frozen=True, slots=True)
class Study:
    """The results for one trace."""

    name: str
    requests: int
    chunks: int
    """Of all prompts."""
    unique: int
    """Distinct ones."""
    repeated: int
    """Chunks that were left out, because they occurred before in the same prompt."""
    out_of_order: bool
    """Whether the requests had to be sorted by time."""
    seconds: float
    """Of the trace."""
    chunk_tokens: int
    chunk_bytes: int
    rows: Sequence[Row]

    @property
    def unique_bytes(self) -> int:
        """The size of a cache that keeps everything."""
        return self.unique * self.chunk_bytes


def steps_of(trace: Trace, caches: Sequence[SimulatedTiers]) -> int:
    """Return how many requests :func:`study` reports, about."""
    bounds = {cache.capacity for cache in caches if cache.capacity is not None}
    return len(trace) * (len(caches) + len(bounds))


def study(
    trace: Trace,
    plugins: Plugins,
    caches: Sequence[SimulatedTiers],
    model: Model,
    *,
    windows: int = 0,
    advance: Advance | None = None,
) -> Study:
    """Replay a trace on each of ``caches``, all of them empty at first. Blocks.

    Belady's optimum is computed once for each capacity.
    """
    chunk_bytes = model.chunk_bytes(trace)
    capacities = {cache.capacity for cache in caches if cache.capacity is not None}
    bounds: dict[int | None, float] = {}
    if capacities:
        uses = next_uses(trace)
        for capacity in capacities:
            hits = belady_hits(trace, capacity // chunk_bytes, uses, advance)
            bounds[capacity] = hits / len(trace.chunks)
        del uses  # 4 bytes for each chunk of the trace.
    rows = []
    for cache in caches:
        outcome = replay(trace, plugins, cache, model, windows=windows, advance=advance)
        rows.append(Row(outcome, bounds.get(cache.capacity)))
    return Study(
        name=trace.name,
        requests=len(trace),
        chunks=len(trace.chunks),
        unique=trace.unique,
        repeated=trace.repeated,
        out_of_order=not isinstance(trace.order, range),
        seconds=trace.times[trace.order[-1]] - trace.times[trace.order[0]],
        chunk_tokens=trace.chunk_tokens,
        chunk_bytes=chunk_bytes,
        rows=rows,
    )
