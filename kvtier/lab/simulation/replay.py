"""Replay a trace through a simulated cache."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from kvtier.lab.simulation.belady import REPORT_REQUESTS
from kvtier.lab.simulation.trace import Trace, chunk_keys
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.simulated_cache import SimulatedCache, SimulatedTiers
from kvtier.pipeline.ahead import CHECK_SECONDS
from kvtier.plugins import Plugins
from kvtier.units import format_size, parse_size

TOKEN_BYTES = 128 << 10
"""KV bytes of a token: those of Llama 3.1 8B in bfloat16."""
CHUNK_TOKENS = 512
PREFILL_TOKENS_PER_SECOND = 10_000.0
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)

Advance = Callable[[int], None]
"""Receives a number of requests that were processed."""

MAX_IDLE_SECONDS = 3600.0
"""Nobody is expected after so long without a request: a trace of days has nights, or times in wrong units."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the engine computes."""

    token_bytes: int = TOKEN_BYTES
    prefill_tokens_per_second: float = PREFILL_TOKENS_PER_SECOND

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


class Windows:
    """Hits in equal parts of the time of a trace."""

    def __init__(self, trace: Trace, count: int) -> None:
        first, last = trace.times[trace.order[0]], trace.times[trace.order[-1]]
        self._first = first
        self._scale = count / (last - first) if last > first else 0.0
        self._hits = [0] * count
        self._asked = [0] * count

    def add(self, now: float, hits: int, asked: int) -> None:
        """Count one request."""
        at = min(int((now - self._first) * self._scale), len(self._hits) - 1)
        self._hits[at] += hits
        self._asked[at] += asked

    def rates(self) -> list[float | None]:
        """Return the hit rate of each window."""
        pairs = zip(self._hits, self._asked, strict=True)
        return [hits / asked if asked else None for hits, asked in pairs]


class BetweenRequests:
    """What happens between the requests of a trace, in the order of time."""

    def __init__(self, trace: Trace, cache: SimulatedCache, *, ahead: bool) -> None:
        """``ahead``: whether to bring prompts up from lower tiers."""
        self._trace, self._cache = trace, cache
        self._answers: list[tuple[float, int, Sequence[ChunkKey]]] = []
        """A heap of the time of the end, the request and its chunks."""
        self.ends = 0
        """Answers that have ended."""
        self._last = trace.times[trace.order[0]]
        """When the last request has come, or answer ended."""
        self._look_at = self._last if ahead else inf

    def served(self, request: int, keys: Sequence[ChunkKey]) -> None:
        """Note that a request has come, and is being answered."""
        self._last = self._trace.times[request]
        if seconds := self._trace.answer_seconds[request]:
            heappush(self._answers, (self._trace.times[request] + seconds, request, keys))

    def pass_time(self, now: float) -> None:
        """Let everything happen up to a time."""
        trace = self._trace
        while True:
            ends_at = self._answers[0][0] if self._answers else inf
            if min(ends_at, self._look_at) > now:
                return
            if self._look_at < ends_at:
                self._cache.look_ahead(self._look_at)
                self._look_at += CHECK_SECONDS
                if self._look_at > self._last + MAX_IDLE_SECONDS:
                    self._look_at = max(self._look_at, min(ends_at, now))
            else:
                self._last = ends_at
                _, request, keys = heappop(self._answers)
                self._cache.ended(ends_at, keys, trace.signatures.get(request, ()), trace.hints.get(request))
                self.ends += 1


def replay(
    trace: Trace,
    plugins: Plugins,
    tiers: SimulatedTiers,
    model: Model,
    *,
    windows: int = 0,
    advance: Advance | None = None,
) -> Outcome:
    """Replay a trace once, on an empty cache. Blocks. Deterministic.

    Ends of answers are reported before the first request that comes later. With ``prefetch.ahead``, prompts
    are brought up from lower tiers between requests.
    """
    started = time.perf_counter()
    chunk_bytes, whole = model.chunk_bytes(trace), trace.chunk_tokens
    compute = whole / model.prefill_tokens_per_second
    cache = SimulatedCache(plugins, tiers, chunk_bytes, compute)
    by_window = Windows(trace, windows) if windows else None
    between = BetweenRequests(trace, cache, ahead=tiers.cache.prefetch.ahead and len(tiers.settings) > 1)
    total_hits = saved = 0
    for turn, request in enumerate(trace.order, 1):
        start, stop = trace.span(request)
        now = trace.times[request]
        between.pass_time(now)
        keys = chunk_keys(trace.chunks[start:stop])
        hits = cache.serve(now, keys, trace.hints.get(request))
        between.served(request, keys)
        total_hits += hits
        saved += min(hits * whole, trace.tokens[request])
        if by_window is not None:
            by_window.add(now, hits, stop - start)
        if advance is not None and turn % REPORT_REQUESTS == 0:
            advance(REPORT_REQUESTS)
    tokens = sum(trace.tokens)
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
        hits=total_hits,
        tokens=tokens,
        saved_tokens=saved,
        ttft_seconds=_ttft(
            cache, chunk_bytes, (tokens - saved) / model.prefill_tokens_per_second, len(trace)
        ),
        demoted=cache.demoted,
        computed_instead=cache.computed_instead,
        no_room=cache.no_room,
        ends=between.ends,
        stored_again=cache.stored_again,
        ahead=cache.ahead,
        windows=by_window.rates() if by_window is not None else [],
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
