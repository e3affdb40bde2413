"""Belady's optimum: the hits of an eviction that knows the future, which no policy can exceed."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

from kvtier import native
from kvtier.lab.simulation.trace import Trace

REPORT_REQUESTS = 2000
"""How many requests are processed between two reports of progress."""


def next_uses(trace: Trace) -> array[int]:
    """Return for each place in ``trace.chunks`` the request that uses its chunk next.

    Requests are counted in the order of their time; ``len(trace)`` means never. Takes 4 bytes per place.
    """
    chunks, count = trace.chunks, len(trace)
    uses = array("I", [count]) * len(chunks)
    if native.available():
        native.core.next_uses(chunks, trace.ends, trace.order, trace.numbers, uses)
        return uses
    upcoming = array("I", [count]) * trace.numbers
    for turn in range(count - 1, -1, -1):
        start, stop = trace.span(trace.order[turn])
        for place, chunk in enumerate(chunks[start:stop], start):
            uses[place] = upcoming[chunk]
            upcoming[chunk] = turn
    return uses


def belady_hits(
    trace: Trace, capacity: int, uses: array[int], advance: Callable[[int], None] | None = None
) -> int:
    """Return how many of ``trace.chunks`` a cache of ``capacity`` chunks has when they are used, at most.

    After each request it keeps those, of the chunks that it had and those of the request, that are used
    first again. So no order of eviction has more hits, also if it had to hold no prefixes. Of chunks that
    the same request uses next, it does not matter which are kept, so their number is all there is to know.
    ``uses``: from :func:`next_uses`. ``advance`` is called with numbers of processed requests.
    """
    if native.available():
        interval = 0 if advance is None else REPORT_REQUESTS
        return native.core.belady_hits(uses, trace.ends, trace.order, capacity, interval, advance)
    never = len(trace)
    held = array("I", bytes(4 * never))  # By request: chunks in the cache that it uses next.
    latest: list[int] = []  # A heap of those with any, negated.
    total = hits = 0
    for turn in range(never):
        hits += held[turn]
        total -= held[turn]
        held[turn] = 0
        start, stop = trace.span(trace.order[turn])
        for use in uses[start:stop]:
            if use != never:
                if not held[use]:
                    heappush(latest, -use)
                held[use] += 1
                total += 1
        while total > capacity:
            last = -latest[0]
            kept = max(0, held[last] - (total - capacity))
            total -= held[last] - kept
            held[last] = kept
            if not kept:
                heappop(latest)
        if advance is not None and turn % REPORT_REQUESTS == REPORT_REQUESTS - 1:
            advance(REPORT_REQUESTS)
    return hits
