"""Replay a trace through a simulated cache."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise

from kvtier.lab.simulation.belady import REPORT_REQUESTS
from kvtier.lab.simulation.trace import Trace, chunk_keys
from kvtier.memory.header import object_bytes
from kvtier.observability.whatif.simulated_cache import SimulatedCache, SimulatedTiers
from kvtier.pipeline.ahead import CHECK_SECONDS
from kvtier.plugins import Plugins
from kvtier.units import format_size, parse_size

TOKEN_BYTES = 128 << 10
"""KV bytes of a token: those of Llama 3.1 8B in bfloat16."""
CHUNK_TOKENS = 512
PREFILL_TOKENS_PER_SECOND = 10_000.0
END, PREFETCH, REQUEST = range(3)
"""Events, in their order at one time: an answer ends, prompts are brought up, and one is asked for."""
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)

Advance = Callable[[int], None]
"""Receives a number of requests that were processed."""

MAX_IDLE_SECONDS = 3600.0
"""No prompt is expected after so long without a request: a trace of days has nights."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the engine computes."""

    token_bytes: int = TOKEN_BYTES
    prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND
    """At the beginning of a prompt."""
    attention_tokens: float | None = None
    """The depth at which a token takes twice as long as the first one. By default, all take the same time."""

    def prefill_seconds(self, tokens: int, held: int) -> float:
        """Return how long it takes to compute a prompt, of which the first ``held`` tokens are held."""
        attention = 0.0
        if self.attention_tokens is not None:
            attention = (tokens * tokens - held * held) / (2 * self.attention_tokens)
        return (tokens - held + attention) / self.prefill_tokens_per_second

    def chunk_bytes(self, trace: Trace) -> int:
        """Return the size of a chunk object, which is that of the trace if known."""
        return trace.chunk_bytes or object_bytes(trace.chunk_tokens * self.token_bytes)


def capacity_of(text: str, trace: Trace, model: Model) -> int:
    """Return a capacity in bytes. ``text``: a size, or a percentage of what the trace stores, as in ``5%``.

    A percentage is rounded down to whole chunks, but at least one. Raises ``ValueError`` with the remedy.
    """
    chunk_bytes = model.chunk_bytes(trace)
    if match := _PERCENT.fullmatch(text):
        percent = float(match[1])
        if not 0 < percent <= 1000:
            raise ValueError(f"{text.strip()}: use a percentage above 0, up to 1000 %")
        # As an integer, because 0.07 * 100 is more than 7.
        return max(1, trace.unique * round(percent * 1_000_000) // 100_000_000) * chunk_bytes
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ValueError(f"{error}; or a percentage such as 5%") from error
    if size < chunk_bytes:
        raise ValueError(f"{text.strip()} holds no chunk of {format_size(chunk_bytes)}: use a larger one")
    return size


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What one tier did."""

    name: str
    hits: int
    """Chunks that were in this tier when they were looked up, and in no faster one."""
    read_bytes: int
    written_bytes: int
    evicted: int
    """Chunks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cache made of a trace."""

    policy: str
    capacity: int | None
    """Bytes of all tiers; ``None`` with a shared pool."""
    tiers: Sequence[TierOutcome]
    requests: int
    asked: int
    """Chunks of all prompts."""
    hits: int
    """Of these, chunks of held prefixes that were loaded."""
    tokens: int
    saved_tokens: int
    """Of all tokens of prompts, those that were not computed."""
    ttft_seconds: float
    """Estimated mean time to the first token: see :func:`_ttft`."""
    demoted: int
    computed_instead: int
    """Chunks that were held, but would have arrived later than they were computed."""
    no_room: int
    """Chunks that were held in a lower tier, but for which there was no room in the first one."""
    ends: int
    """Answers whose end was reported."""
    stored_again: int
    """Of the chunks written to the first tier, those at the end of an answer, which were not computed."""
    ahead: int
    """Chunks read from lower tiers before they were expected to be asked for."""
    windows: Sequence[float | None]
    """Hit rate in equal parts of the trace's time; ``None`` without a request."""
    seconds: float
    """Duration of the simulation."""

    @property
    def hit_rate(self) -> float:
        """Hits per chunk asked for."""
        return self.hits / self.asked


def window_rates(trace: Trace, hits: Sequence[int], count: int) -> list[float | None]:
    """Return the hit rate in ``count`` equal parts of the time of a trace. ``hits``: of each request."""
    first, last = trace.times[trace.order[0]], trace.times[trace.order[-1]]
    scale = count / (last - first) if last > first else 0.0
    found, asked = [0] * count, [0] * count
    for request, now in enumerate(trace.times if count else ()):
        at = min(int((now - first) * scale), count - 1)
        start, stop = trace.span(request)
        found[at] += hits[request]
        asked[at] += stop - start
    return [hit / of if of else None for hit, of in zip(found, asked, strict=True)]


def events_of(trace: Trace, *, ahead: bool) -> Iterator[tuple[float, int, int]]:
    """Yield the time, event and request of all that happens up to the last request, in the order of time."""
    times = trace.times
    last = times[trace.order[-1]]
    ends_at = [begun + seconds for begun, seconds in zip(times, trace.answer_seconds, strict=True)]
    ends = sorted((at, END, request) for request, at in enumerate(ends_at) if times[request] < at <= last)
    requests = [(times[request], REQUEST, request) for request in trace.order]
    changes = sorted(now for now, *_ in (*requests, *ends)) if ahead else ()
    return merge(ends, ((now, PREFETCH, 0) for now in _prefetches(changes)), requests)


def _prefetches(changes: Sequence[float]) -> Iterator[float]:
    """Yield when to prefetch ahead between changes: not in hours without any."""
    now = changes[0] if changes else 0.0
    for before, after in pairwise(changes):
        while now <= min(after, before + MAX_IDLE_SECONDS):
            yield now
            now += CHECK_SECONDS
        now = max(now, after)


def replay(
    trace: Trace,
    plugins: Plugins,
    tiers: SimulatedTiers,
    model: Model,
    *,
    windows: int = 0,
    advance: Advance | None = None,
) -> Outcome:
    """Replay a trace once, on an empty cache. Blocks. Deterministic."""
    started = time.perf_counter()
    chunk_bytes, whole = model.chunk_bytes(trace), trace.chunk_tokens
    compute = whole / model.prefill_tokens_per_second
    cache = SimulatedCache(plugins, tiers, chunk_bytes, compute)
    hits = array("I", bytes(4 * len(trace)))
    served = ends = 0
    ahead = tiers.cache.prefetch.ahead and len(tiers.settings) > 1
    for now, event, request in events_of(trace, ahead=ahead):
        if event == PREFETCH:
            cache.prefetch_ahead(now)
            continue
        start, stop = trace.span(request)
        keys, hints = chunk_keys(trace.chunks[start:stop]), trace.hints.get(request)
        if event == END:
            cache.answer_ended(now, keys, trace.signatures.get(request, ()), hints)
            ends += 1
            continue
        hits[request] = cache.serve(now, keys, hints)
        served += 1
        if advance is not None and served % REPORT_REQUESTS == 0:
            advance(REPORT_REQUESTS)
    tokens = sum(trace.tokens)
    held = [min(found * whole, asked) for found, asked in zip(hits, trace.tokens, strict=True)]
    prefill_seconds = sum(map(model.prefill_seconds, trace.tokens, held))
    return Outcome(
        policy=tiers.label,
        capacity=tiers.capacity,
        tiers=[
            TierOutcome(
                name=name,
                hits=cache.hits[tier],
                read_bytes=cache.read[tier] * chunk_bytes,
                written_bytes=cache.written[tier] * chunk_bytes,
                evicted=cache.evicted[tier],
            )
            for tier, name in enumerate(tiers.names)
        ],
        requests=len(trace),
        asked=len(trace.chunks),
        hits=sum(hits),
        tokens=tokens,
        saved_tokens=sum(held),
        ttft_seconds=_ttft(cache, chunk_bytes, prefill_seconds, len(trace)),
        demoted=cache.demoted,
        computed_instead=cache.computed_instead,
        no_room=cache.no_room,
        ends=ends,
        stored_again=cache.stored_again,
        ahead=cache.ahead,
        windows=window_rates(trace, hits, windows),
        seconds=time.perf_counter() - started,
    )


def _ttft(cache: SimulatedCache, chunk_bytes: int, prefill_seconds: float, requests: int) -> float:
    """Return the mean time to the first token, without any queueing.

    A request waits until its chunks are read from each tier, one tier after the other, and the rest is
    computed.
    """
    loading = sum(
        count * tier.cost(chunk_bytes) for count, tier in zip(cache.loaded, cache.tiers, strict=True)
    )
    return (loading + prefill_seconds) / requests
