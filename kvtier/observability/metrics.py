"""Prometheus metrics of one cache, read from the cache's own counters on each scrape.

Only transfers are counted here, from their reports; this costs a few microseconds per batch. Label values are
tier names, configured tenants, event types, outcomes, states, policies and reasons, all bounded: never a key,
an engine or an address.
``docs/metrics.md`` lists all metrics.
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

from kvtier.backends.base import Outcome
from kvtier.cache import TieredCache
from kvtier.events import Event, Prefetch, Report, Store
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.report import Report as WhatIfReport
from kvtier.observability.whatif.report import point_at
from kvtier.tiers.level import Level
from kvtier.version import __version__

Status = Mapping[str, Any]

MAX_REQUESTS = 16
"""Connection limit for :func:`kvtier.http.serving`. A Prometheus server needs one."""
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Histogram buckets in seconds. A batch of tens of MiB takes 1 ms from memory and 1 s from a slow disk."""
PEER_STATES = ("connected", "connecting", "not connected", "does not answer", "paused")
MULTIPLES = (0.5, 1.0, 2.0, 4.0)
"""Multiples of a tier's capacity whose estimated hit rate is exported."""
ROUTE = ("source", "target", "event")
ENGINE = "engine"
"""The source label of chunks that come from an engine."""

COUNTS = (
    (
        "lookup_tokens",
        "kvtier_lookup_tokens",
        "Tokens of the prompts that were looked up; a lookup that a request repeats does not count.",
    ),
    ("pool_queried", "kvtier_pool_queried_chunks", "Chunks queried in shared pools and at peers."),
    ("pool_found", "kvtier_pool_found_chunks", "Chunks found only in a shared pool or at a peer."),
    ("stored", "kvtier_stored_chunks", "Chunks stored by engines in the first tier."),
    (
        "write_deferred",
        "kvtier_write_deferred_chunks",
        "Writes to a lower tier deferred because its queue was full.",
    ),
    (
        "write_dropped",
        "kvtier_write_dropped_chunks",
        "Writes to a lower tier dropped because too many were deferred.",
    ),
    ("put_full", "kvtier_write_rejected_chunks", "Chunks rejected by a lower tier because it was full."),
    (
        "evicted",
        "kvtier_evicted_chunks",
        "Chunks evicted from a tier, whether or not another tier holds them.",
    ),
    (
        "evicted_unwritten",
        "kvtier_evicted_unwritten_chunks",
        "Chunks evicted from memory that no lower tier holds, because it failed, was unavailable or full.",
    ),
    ("demoted", "kvtier_demoted_chunks", "Evicted chunks that were demoted to a lower tier."),
    (
        "not_admitted",
        "kvtier_not_admitted_chunks",
        "Chunks that left a tier unwritten, because no lower tier admits them.",
    ),
    ("fallback", "kvtier_fallback_chunks", "Chunks read from a fallback tier after the first one failed."),
    (
        "computed_instead",
        "kvtier_computed_instead_chunks",
        "Held chunks that an engine computes, because they would arrive later.",
    ),
    ("prefetch_no_room", "kvtier_truncated_prefetches", "Prefetches cut short because memory was full."),
)
"""Key in the cache's counts, metric name and help text."""
REFUSALS = (
    ("held", "store_known"),
    ("declined", "store_declined"),
    ("no_room", "store_dropped"),
    ("aborted", "store_aborted"),
)
"""Reason why an engine's chunk was not stored, and its key in the cache's counts."""


class _Transfers:
    """Counters of the transfers of one event type between two tiers."""

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
        remaining = len(report.outcomes)
        for outcome in self.outcomes:  # OK comes first and usually covers the whole batch.
            if not remaining:
                break
            count = report.outcomes.count(outcome)
            self.outcomes[outcome] += count
            remaining -= count


class CacheMetrics(Collector):
    """The metrics of one cache, in their own registry. Created with :meth:`of`."""

    def __init__(
        self, cache: TieredCache, status: Callable[[], Status], what_if: Callable[[], WhatIfReport | None]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._cache = cache
        self._status = status
        self._what_if = what_if
        self._transfers: dict[tuple[type[Event], str | None, str | None], _Transfers] = {}
        # Export 0 from the start: rate() misses the first increase of a counter that appears late.
        memory = cache.memory.name
        for tier in cache.lower:
            self._transfers[Prefetch, tier.name, memory] = _Transfers()
            if tier.write != "never":
                self._transfers[Store, memory, tier.name] = _Transfers()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    @classmethod
    @contextmanager
    def of(
        cls,
        cache: TieredCache,
        status: Callable[[], Status] | None = None,
        what_if: Callable[[], WhatIfReport | None] = lambda: None,
    ) -> Iterator[CacheMetrics]:
        """Observe an open cache until the context exits.

        ``status`` returns the status of a cache, an instance or a bridge server. If it includes engines or
        peers, so do the metrics. Default: the status of ``cache``. ``what_if`` returns the estimate of an
        instance, and must not block either. By default without estimate.
        """
        metrics = cls(cache, status or cache.status, what_if)
        cache.add_observer(metrics)
        try:
            yield metrics
        finally:
            cache.remove_observer(metrics)

    def observe(self, report: Report) -> None:
        """Count one transfer. Deletions are not counted."""
        if report.target is None:
            return
        kind = (type(report.event), report.source, report.target)
        transfers = self._transfers.get(kind)
        if transfers is None:
            transfers = self._transfers[kind] = _Transfers()
        transfers.add(report)

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Do nothing: the catalog is read on each scrape."""

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics, in time independent of the number of chunks."""
        status, tiers = self._status(), self._cache.tiers
        yield InfoMetricFamily("kvtier_build", "The version of kvtier.", {"version": __version__})
        yield from self._of_tiers(tiers)
        yield from _of_tenants(tiers)
        yield from self._of_counts(tiers)
        yield from self._of_transfers()
        yield from self._of_gauges(status)
        yield from _of_peers(status.get("peers", ()))
        yield from _of_serving(status.get("serving", {}))
        yield from _of_controller(status.get("controller"))
        yield from _of_what_if(self._what_if())

    def _of_tiers(self, tiers: Sequence[Level]) -> Iterator[Metric]:
        info = InfoMetricFamily("kvtier_tier", "The type of a tier.", labels=["tier"])
        for tier in tiers:
            info.add_metric([tier.name], {"type": tier.settings.type})
        yield info
        text = "1 for the eviction policy in whose order a tier evicts now; absent for a shared pool."
        order = GaugeMetricFamily("kvtier_tier_eviction_policy", text, labels=["tier", "policy"])
        for tier in tiers:
            if tier.eviction:
                order.add_metric([tier.name, tier.eviction_in_use], 1)
        yield order

        def gauge(name: str, text: str, value: Callable[[Level], float | None]) -> Metric:
            return _by_tier(GaugeMetricFamily(f"kvtier_tier_{name}", text, labels=["tier"]), tiers, value)

        def counter(name: str, text: str, value: Callable[[Level], float | None]) -> Metric:
            return _by_tier(CounterMetricFamily(f"kvtier_tier_{name}", text, labels=["tier"]), tiers, value)

        yield gauge(
            "capacity_bytes", "Capacity of a tier; absent for a shared pool.", lambda tier: tier.capacity
        )
        yield gauge("used_bytes", "Bytes in a tier according to the catalog.", lambda tier: tier.used_bytes)
        yield gauge("chunks", "Chunks in a tier according to the catalog.", lambda tier: tier.count)
        yield gauge("available", "0 while a tier's circuit breaker is open.", lambda tier: tier.available)
        yield counter("outages", "How often a tier's circuit breaker opened.", lambda tier: tier.outages)
        text = "Corrupt chunks found in a tier and deleted; in memory only headers are checked."
        yield counter("corrupt_chunks", text, lambda tier: tier.corrupt)

    def _of_counts(self, tiers: Sequence[Level]) -> Iterator[Metric]:
        counts = self._cache.counts
        for key, name, text in COUNTS:
            yield CounterMetricFamily(name, text, counts[key])
        worth = self._cache.worth
        for name, text, seconds in (
            (
                "expected",
                "Expected duration of waits for chunks, where it was known.",
                worth.expected_seconds,
            ),
            ("actual", "Duration of the waits whose duration was expected.", worth.actual_seconds),
        ):
            yield CounterMetricFamily(f"kvtier_{name}_wait_seconds", text, seconds)
        text = "Tokens that lookups found, by the tier that held them."
        hits = CounterMetricFamily("kvtier_lookup_hit_tokens", text, labels=["tier"])
        yield _by_tier(hits, tiers, lambda tier: counts[f"hit_tokens_{tier.name}"])
        text = "Chunks not stored: already held, no room in memory, or aborted by the engine."
        refused = CounterMetricFamily("kvtier_refused_chunks", text, labels=["reason"])
        for reason, key in REFUSALS:
            refused.add_metric([reason], counts[key])
        yield refused

    def _of_transfers(self) -> Iterator[Metric]:
        text = "Bytes transferred between tiers."
        transferred = CounterMetricFamily("kvtier_transferred_bytes", text, labels=ROUTE)
        text = "Chunks transferred between tiers, by outcome: ok, miss, full or failed."
        outcomes = CounterMetricFamily("kvtier_transfer_outcomes", text, labels=[*ROUTE, "outcome"])
        text = "Duration of the transfer of one batch between tiers, including time in the queue."
        seconds = HistogramMetricFamily("kvtier_transfer_seconds", text, labels=ROUTE)
        bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
        for (event, source, target), transfers in self._transfers.items():
            route = [source or ENGINE, target or "", event.__name__.lower()]
            transferred.add_metric(route, transfers.bytes)
            for outcome, count in transfers.outcomes.items():
                outcomes.add_metric([*route, outcome.value], count)
            buckets = zip(bounds, accumulate(transfers.buckets), strict=True)
            seconds.add_metric(route, list(buckets), transfers.seconds)
        yield transferred
        yield outcomes
        yield seconds

    def _of_gauges(self, status: Status) -> Iterator[Metric]:
        arena, flights = self._cache.arena, status["flights"]
        reserved = status.get("reservations", {"bytes": 0, "void_bytes": 0})
        for name, text, value in (
            ("engines", "Connected engines.", len(status.get("engines", ()))),
            ("arena_used_bytes", "Memory in use in the first tier.", arena.used),
            ("arena_leases", "Leases on memory of the first tier.", arena.leases),
            (
                "reserved_bytes",
                "Memory reserved for chunks that engines have not stored yet.",
                reserved["bytes"],
            ),
            (
                "void_bytes",
                "Part of it that is out of use: a process that has disconnected or stopped may write there.",
                reserved["void_bytes"],
            ),
            ("pinned_chunks", "Chunks pinned against eviction.", self._cache.catalog.pinned),
            ("prefetching_chunks", "Chunks in flight into the first tier.", flights),
            ("pending_bytes", "Bytes still to be written to lower tiers.", self._cache.pending_bytes),
        ):
            yield GaugeMetricFamily(f"kvtier_{name}", text, value)


def _by_tier(
    family: GaugeMetricFamily | CounterMetricFamily,
    tiers: Sequence[Level],
    value: Callable[[Level], float | None],
) -> Metric:
    for tier in tiers:
        if (number := value(tier)) is not None:
            family.add_metric([tier.name], number)
    return family


def _of_tenants(tiers: Sequence[Level]) -> Iterator[Metric]:
    """Yield the metrics of configured tenants and all others, without samples if none is configured."""
    usages = [
        (tier.name, usage) for tier in tiers if tier.tenants is not None for usage in tier.tenants.usage()
    ]
    for family, name, text, of in (
        (
            GaugeMetricFamily,
            "share_bytes",
            "Bytes of a tier that are never taken from a tenant.",
            "share_bytes",
        ),
        (GaugeMetricFamily, "max_bytes", "Bytes that a tenant holds in a tier at most.", "max_bytes"),
        (GaugeMetricFamily, "used_bytes", "Bytes of a tenant in a tier.", "used_bytes"),
        (GaugeMetricFamily, "chunks", "Chunks of a tenant in a tier.", "chunks"),
        (CounterMetricFamily, "found_chunks", "Chunks of a tenant that lookups found in a tier.", "hits"),
        (CounterMetricFamily, "evicted_chunks", "Chunks of a tenant evicted from a tier.", "evictions"),
    ):
        metric = family(f"kvtier_tenant_{name}", text, labels=["tier", "tenant"])
        for tier, usage in usages:
            metric.add_metric([tier, usage.tenant], getattr(usage, of))
        yield metric


def _of_peers(peers: Sequence[Status]) -> Iterator[Metric]:
    states = Counter(dict.fromkeys(PEER_STATES, 0))
    states.update(str(peer["state"]).partition(":")[0] for peer in peers)
    family = GaugeMetricFamily("kvtier_peers", "Peers to fetch from, by state.", labels=["state"])
    for state, count in states.items():
        family.add_metric([state], count)
    yield family


def _of_serving(serving: Status) -> Iterator[Metric]:
    text = "Connections of peers that fetch from this instance."
    connections = GaugeMetricFamily("kvtier_serving_connections", text, labels=["purpose"])
    for purpose, count in serving.get("connections", {}).items():
        connections.add_metric([purpose], count)
    yield connections
    for name, text, value in (
        ("grants", "Active grants to peers.", serving.get("grants", 0)),
        ("granted_bytes", "Memory covered by active grants.", serving.get("granted_bytes", 0)),
    ):
        yield GaugeMetricFamily(f"kvtier_serving_{name}", text, value)
    for name, text, value in (
        ("issued_grants", "Grants issued to peers.", serving.get("granted", 0)),
        ("expired_grants", "Grants that expired before peers released them.", serving.get("expired", 0)),
    ):
        yield CounterMetricFamily(f"kvtier_serving_{name}", text, value)
    text = "Refused connections, by reason."
    refused = CounterMetricFamily("kvtier_serving_refused_connections", text, labels=["reason"])
    for reason, count in serving.get("refused", {}).items():
        refused.add_metric([reason], count)
    yield refused


def _of_controller(controller: Status | None) -> Iterator[Metric]:
    """Yield the metrics of the controller connection, without samples if no controller is configured."""
    connected = GaugeMetricFamily("kvtier_agent_connected", "0 while the controller is not connected.")
    up_to_date = GaugeMetricFamily(
        "kvtier_agent_up_to_date", "0 while the controller's view of this instance is not up to date."
    )
    lost = CounterMetricFamily("kvtier_agent_lost_connections", "Lost connections to the controller.")
    if controller is not None:
        connected.add_metric([], controller["connected"])
        up_to_date.add_metric([], controller["up_to_date"])
        lost.add_metric([], controller["lost"])
    yield connected
    yield up_to_date
    yield lost


def _of_what_if(report: WhatIfReport | None) -> Iterator[Metric]:
    """Yield what other settings would bring, without samples if that is not known."""
    text = "Estimated hit rate of the cache, if a tier had this multiple of its capacity."
    rates = GaugeMetricFamily("kvtier_whatif_hit_rate", text, labels=["tier", "capacity"])
    text = "Part of the estimated hit rate with this multiple: hits in the tier or a faster one."
    fast = GaugeMetricFamily("kvtier_whatif_fast_hit_rate", text, labels=["tier", "capacity"])
    text = "The least capacity of a tier with almost as many hits, also in this tier and faster ones."
    useful = GaugeMetricFamily("kvtier_whatif_useful_bytes", text, labels=["tier"])
    text = "Estimated hit rate of the cache, if a tier had this eviction policy."
    policies = GaugeMetricFamily("kvtier_whatif_policy_hit_rate", text, labels=["tier", "policy"])
    text = "Chunks asked for that are in the sample of the estimate."
    sampled = CounterMetricFamily("kvtier_whatif_sampled_chunks", text)
    text = "Lookups not observed, because the estimate could not keep up."
    dropped = CounterMetricFamily("kvtier_whatif_dropped_lookups", text)
    text = "Part of the chunks looked up that the estimate has observed."
    observed = GaugeMetricFamily("kvtier_whatif_observed_ratio", text)
    text = "For how long the oldest lookup that is not observed yet has been waiting, in seconds."
    behind = GaugeMetricFamily("kvtier_whatif_behind_seconds", text)
    if report is not None:
        by_policy = {(curve.tier, curve.policy): curve.hit_rate for curve in report.tiers}
        by_policy |= {(at.tier, at.policy): at.hit_rate for at in report.changes if at.policy is not None}
        for labels, rate in by_policy.items():
            policies.add_metric(labels, rate)
        for curve in report.tiers:
            useful.add_metric([curve.tier], curve.useful_bytes)
            for multiple in MULTIPLES:
                point = point_at(curve, round(multiple * curve.capacity_bytes))
                if point is None:
                    continue
                rates.add_metric([curve.tier, f"{multiple:g}x"], point.hit_rate)
                if point.fast_hit_rate is not None:
                    fast.add_metric([curve.tier, f"{multiple:g}x"], point.fast_hit_rate)
        sampled.add_metric([], report.sampled)
        dropped.add_metric([], report.dropped)
        observed.add_metric([], report.observed)
        behind.add_metric([], report.behind_seconds)
    yield from (rates, fast, useful, policies, sampled, dropped, observed, behind)


def application(metrics: CacheMetrics) -> Starlette:
    """Return an application with ``/metrics`` and ``/healthz``, to serve with :func:`kvtier.http.serving`."""

    async def answer(request: Request) -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # An invalid version in the Accept header.
            encode, content_type = choose_encoder("")
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    return Starlette(routes=[Route("/metrics", answer), Route("/healthz", health)])
