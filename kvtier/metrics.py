"""What Prometheus is told of one cache. It is read from what the cache counts anyway, when Prometheus asks.

Transfers alone are counted here, as the reports of them come by: a batch costs some microseconds. Labels
are the names of tiers, kinds of events, outcomes, states and reasons, all few and fixed: never a key, an
engine or an address, of which there may be any number. ``docs/metrics.md`` lists all metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import kvtier
from kvtier.backends.base import Outcome
from kvtier.backends.sealed import SealedBackend
from kvtier.cache import TieredCache
from kvtier.events import Event, Prefetch, Report, Store
from kvtier.keys import ChunkKey
from kvtier.router import FIRST
from kvtier.tier import Tier

Status = Mapping[str, Any]

MOST_REQUESTS = 16
"""At once, for :func:`kvtier.http.serving`: one Prometheus needs one."""
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds. A batch is tens of MiB: milliseconds from memory, a second from a slow disk."""
PEER_STATES = ("connected", "connecting", "not connected", "does not answer", "paused")
ROUTE = ("source", "target", "event")
ENGINE = "engine"
"""The source of what comes from no tier."""

COUNTS = (
    ("looked_up", "kvtier_looked_up_chunks", "Chunks that look-ups have asked for."),
    ("pool_asked", "kvtier_pool_asked_chunks", "Chunks that shared pools and peers were asked about."),
    (
        "pool_found",
        "kvtier_pool_found_chunks",
        "Chunks that only a shared pool or a peer turned out to hold.",
    ),
    ("stored", "kvtier_stored_chunks", "Chunks that engines have filled and the first tier has taken in."),
    (
        "write_deferred",
        "kvtier_write_deferred_chunks",
        "Writes to a lower tier put off as its queue was full.",
    ),
    ("write_dropped", "kvtier_write_dropped_chunks", "Writes to a lower tier given up as far too many wait."),
    ("put_full", "kvtier_full_chunks", "Chunks that a lower tier had no room for."),
    ("evicted", "kvtier_evicted_chunks", "Chunks that had to leave a tier, be they still in another or not."),
    ("demoted", "kvtier_demoted_chunks", "Of the evicted, those that a lower tier has taken over."),
    ("fell_back", "kvtier_fell_back_chunks", "Chunks read from another tier than the first that was tried."),
    ("prefetch_no_room", "kvtier_prefetches_without_room", "Prefetches cut short as memory had no room."),
)
"""What the cache counts, and what that is called here."""
REFUSALS = (("held", "store_known"), ("no_room", "store_dropped"), ("abandoned", "store_abandoned"))
"""Why a chunk that an engine has was not stored, and what the cache calls it."""


class _Transfers:
    """Of one kind, between two tiers."""

    __slots__ = ("buckets", "bytes", "outcomes", "seconds")

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.outcomes = dict.fromkeys(Outcome, 0)

    def add(self, report: Report) -> None:
        self.bytes += report.transferred_bytes
        self.seconds += report.seconds
        self.buckets[bisect_left(BOUNDS, report.seconds)] += 1
        left = len(report.outcomes)
        for outcome in self.outcomes:  # The usual one first: mostly it is that of all.
            if not left:
                break
            count = report.outcomes.count(outcome)
            self.outcomes[outcome] += count
            left -= count


class CacheMetrics(Collector):
    """One cache's metrics, in a registry of their own. Made with :meth:`of`."""

    def __init__(self, cache: TieredCache, status: Callable[[], Status]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._cache = cache
        self._status = status
        self._transfers: dict[tuple[type[Event], str | None, str | None], _Transfers] = {}
        # Shown as 0 from the start: a counter that appears late hides its first increase.
        first, *lower = cache.hierarchy.tiers
        for tier in lower:
            self._transfers[Prefetch, tier.name, first.name] = _Transfers()
            if tier.write != "never":
                self._transfers[Store, first.name, tier.name] = _Transfers()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    @classmethod
    @contextmanager
    def of(cls, cache: TieredCache, status: Callable[[], Status] | None = None) -> Iterator[CacheMetrics]:
        """Observe an open cache until the block is left.

        ``status`` is that of a cache, an instance or a server of engines; where it tells of engines or
        peers, so do the metrics. Left out: the cache's own.
        """
        metrics = cls(cache, status or cache.status)
        cache.add_observer(metrics)
        try:
            yield metrics
        finally:
            cache.remove_observer(metrics)

    def observe(self, report: Report) -> None:
        """Count one transfer. What only was deleted is none."""
        if report.target is None:
            return
        kind = (type(report.event), report.source, report.target)
        transfers = self._transfers.get(kind)
        if transfers is None:
            transfers = self._transfers[kind] = _Transfers()
        transfers.add(report)

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Nothing: what is held is read when it is asked for."""

    def collect(self) -> Iterator[Metric]:
        """What it is now. Takes as long whether few chunks are held or many."""
        status, tiers = self._status(), self._cache.hierarchy.tiers
        yield InfoMetricFamily("kvtier_build", "The version of kvtier.", {"version": kvtier.__version__})
        yield from self._of_tiers(tiers)
        yield from self._of_counts(tiers)
        yield from self._of_transfers()
        yield from self._of_now(status)
        yield from _of_peers(status.get("peers", ()))
        yield from _of_serving(status.get("serving", {}))
        yield from _of_controller(status.get("controller"))

    def _of_tiers(self, tiers: Sequence[Tier]) -> Iterator[Metric]:
        info = InfoMetricFamily("kvtier_tier", "The type of a tier.", labels=["tier"])
        for tier in tiers:
            info.add_metric([tier.name], {"type": tier.settings.type})
        yield info

        def gauge(name: str, text: str, value: Callable[[Tier], float | None]) -> Metric:
            return _by_tier(GaugeMetricFamily(f"kvtier_tier_{name}", text, labels=["tier"]), tiers, value)

        def counter(name: str, text: str, value: Callable[[Tier], float | None]) -> Metric:
            return _by_tier(CounterMetricFamily(f"kvtier_tier_{name}", text, labels=["tier"]), tiers, value)

        count = self._cache.hierarchy.catalog.count
        yield gauge(
            "capacity_bytes", "What a tier may hold; none for a shared pool.", lambda tier: tier.capacity
        )
        yield gauge("used_bytes", "What a tier holds, as far as is known here.", lambda tier: tier.used_bytes)
        yield gauge("chunks", "Chunks in a tier, as far as is known here.", lambda tier: count(tier.index))
        yield gauge("available", "0 while a tier fails and is done without.", lambda tier: tier.available)
        yield counter(
            "outages", "How often a tier began to be done without.", lambda tier: tier.backend.outages
        )
        text = "Damaged chunks found in a tier, and deleted; in memory only headers are checked."
        yield counter("corrupt_chunks", text, self._corrupt)

    def _corrupt(self, tier: Tier) -> int | None:
        if tier.index == FIRST:
            return self._cache.hierarchy.sealer.corrupt
        inner = tier.backend.inner
        return inner.corrupt if isinstance(inner, SealedBackend) else None

    def _of_counts(self, tiers: Sequence[Tier]) -> Iterator[Metric]:
        counts = self._cache.hierarchy.counts
        for key, name, text in COUNTS:
            yield CounterMetricFamily(name, text, counts[key])
        text = "Chunks that look-ups have found, by the tier that held them."
        found = CounterMetricFamily("kvtier_found_chunks", text, labels=["tier"])
        yield _by_tier(found, tiers, lambda tier: counts[f"found_{tier.name}"])
        text = (
            "Chunks that were not stored: held already, without room in memory, or given up by their engine."
        )
        refused = CounterMetricFamily("kvtier_refused_chunks", text, labels=["reason"])
        for reason, key in REFUSALS:
            refused.add_metric([reason], counts[key])
        yield refused

    def _of_transfers(self) -> Iterator[Metric]:
        text = "Bytes of chunks carried from one tier to another."
        carried = CounterMetricFamily("kvtier_transferred_bytes", text, labels=ROUTE)
        text = "Chunks of transfers, by what became of them: ok, miss, full or failed."
        outcomes = CounterMetricFamily("kvtier_transfer_outcomes", text, labels=[*ROUTE, "outcome"])
        text = "How long one batch of chunks took from one tier to another, waiting for its turn included."
        seconds = HistogramMetricFamily("kvtier_transfer_seconds", text, labels=ROUTE)
        bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
        for (event, source, target), transfers in self._transfers.items():
            route = [source or ENGINE, target or "", event.__name__.lower()]
            carried.add_metric(route, transfers.bytes)
            for outcome, count in transfers.outcomes.items():
                outcomes.add_metric([*route, outcome.value], count)
            buckets = zip(bounds, accumulate(transfers.buckets), strict=True)
            seconds.add_metric(route, list(buckets), transfers.seconds)
        yield carried
        yield outcomes
        yield seconds

    def _of_now(self, status: Status) -> Iterator[Metric]:
        arena, flights = self._cache.arena, status["flights"]
        for name, text, value in (
            ("engines", "Engines that are connected.", len(status.get("engines", ()))),
            ("arena_used_bytes", "Memory of the first tier that is in use.", arena.used),
            ("arena_leases", "Pieces of that memory that somebody holds on to.", arena.leases),
            ("pinned_chunks", "Chunks that must not be evicted.", self._cache.hierarchy.catalog.pins),
            ("prefetching_chunks", "Chunks on their way into the first tier.", flights),
            ("pending_bytes", "What lower tiers have still to write.", self._cache.pending_bytes),
        ):
            yield GaugeMetricFamily(f"kvtier_{name}", text, value)


def _by_tier(
    family: GaugeMetricFamily | CounterMetricFamily,
    tiers: Sequence[Tier],
    value: Callable[[Tier], float | None],
) -> Metric:
    for tier in tiers:
        if (number := value(tier)) is not None:
            family.add_metric([tier.name], number)
    return family


def _of_peers(peers: Sequence[Status]) -> Iterator[Metric]:
    states = Counter(dict.fromkeys(PEER_STATES, 0))
    states.update(str(peer["state"]).partition(":")[0] for peer in peers)
    family = GaugeMetricFamily("kvtier_peers", "Peers to fetch from, by how they are.", labels=["state"])
    for state, count in states.items():
        family.add_metric([state], count)
    yield family


def _of_serving(serving: Status) -> Iterator[Metric]:
    text = "Connections of peers that fetch from here."
    connections = GaugeMetricFamily("kvtier_serving_connections", text, labels=["purpose"])
    for purpose, count in serving.get("connections", {}).items():
        connections.add_metric([purpose], count)
    yield connections
    for name, text, value in (
        ("grants", "Promises to peers that stand.", serving.get("grants", 0)),
        ("promised_bytes", "Memory that they may read from.", serving.get("promised_bytes", 0)),
    ):
        yield GaugeMetricFamily(f"kvtier_serving_{name}", text, value)
    for name, text, value in (
        ("granted", "Promises that were made to peers.", serving.get("granted", 0)),
        ("expired_grants", "Promises that ended before peers gave them back.", serving.get("expired", 0)),
    ):
        yield CounterMetricFamily(f"kvtier_serving_{name}", text, value)
    text = "Connections that were refused, by the kind of reason."
    refused = CounterMetricFamily("kvtier_serving_refused_connections", text, labels=["reason"])
    for reason, count in serving.get("refused", {}).items():
        refused.add_metric([reason], count)
    yield refused


def _of_controller(controller: Status | None) -> Iterator[Metric]:
    """Shown where there is one."""
    connected = GaugeMetricFamily("kvtier_agent_connected", "0 while the controller is not connected.")
    in_step = GaugeMetricFamily(
        "kvtier_agent_in_step", "0 while the controller does not know all that is held here."
    )
    lost = CounterMetricFamily(
        "kvtier_agent_lost_connections", "How often the connection to the controller was lost."
    )
    if controller is not None:
        connected.add_metric([], controller["connected"])
        in_step.add_metric([], controller["in_step"])
        lost.add_metric([], controller["lost"])
    yield connected
    yield in_step
    yield lost


def application(metrics: CacheMetrics) -> Starlette:
    """``/metrics`` and ``/healthz``, to be served with :func:`kvtier.http.serving`."""

    async def answer(request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # A version that is none.
            encode, content_type = choose_encoder("")
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": kvtier.__version__})

    return Starlette(routes=[Route("/metrics", answer), Route("/healthz", health)])
