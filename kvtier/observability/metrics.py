"""Prometheus metrics of one cache, read from the cache's own counters on each scrape.

Label values are tier names, models, configured tenants, event types, outcomes, states, policies and reasons,
all bounded: never a key, an engine or an address.
``docs/metrics.md`` lists all metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier.cache import TieredCache
from kvtier.catalog.misses import MissReason
from kvtier.observability.families import Samples, counter, gauge, histogram
from kvtier.observability.transfers import BOUNDS, ENGINE, TransferCounts
from kvtier.observability.whatif.report import Report as WhatIfReport
from kvtier.observability.whatif.report import point_at
from kvtier.pipeline.verify import RESULTS
from kvtier.tiers.level import Level
from kvtier.version import __version__

Status = Mapping[str, Any]

MAX_REQUESTS = 16
"""Connection limit for :func:`kvtier.http.serving`. A Prometheus server needs one."""
PEER_STATES = ("connected", "connecting", "not connected", "does not answer", "paused")
MULTIPLES = (0.5, 1.0, 2.0, 4.0)
"""Multiples of a tier's capacity whose estimated hit rate is exported."""
ROUTE = ("source", "target", "event")

COUNTS = (
    (
        "lookup_tokens",
        "lookup_tokens",
        "Tokens of the prompts that were looked up; a lookup that a request repeats does not count.",
    ),
    ("pool_queried", "pool_queried_chunks", "Chunks queried in shared pools and at peers."),
    ("pool_found", "pool_found_chunks", "Chunks found only in a shared pool or at a peer."),
    ("stored", "stored_chunks", "Chunks stored by engines in the first tier."),
    (
        "write_deferred",
        "write_deferred_chunks",
        "Writes to a lower tier deferred because its queue was full.",
    ),
    (
        "write_dropped",
        "write_dropped_chunks",
        "Writes to a lower tier dropped because too many were deferred.",
    ),
    ("put_full", "write_rejected_chunks", "Chunks rejected by a lower tier because it was full."),
    ("evicted", "evicted_chunks", "Chunks evicted from a tier, whether or not another tier holds them."),
    (
        "evicted_unwritten",
        "evicted_unwritten_chunks",
        "Chunks evicted from memory that no lower tier holds, because it failed, was unavailable or full.",
    ),
    ("demoted", "demoted_chunks", "Evicted chunks that were demoted to a lower tier."),
    (
        "not_admitted",
        "not_admitted_chunks",
        "Chunks that left a tier unwritten, because no lower tier admits them.",
    ),
    ("fallback", "fallback_chunks", "Chunks read from a fallback tier after the first one failed."),
    (
        "computed_instead",
        "computed_instead_chunks",
        "Held chunks that an engine computes, because they would arrive later.",
    ),
    ("prefetch_no_room", "truncated_prefetches", "Prefetches cut short because memory was full."),
    ("ahead", "prefetched_ahead_chunks", "Chunks read from lower tiers before they were expected back."),
)
"""Key in the cache's counts, metric name after ``kvtier_`` and help text."""
REFUSALS = (
    ("held", "store_known"),
    ("declined", "store_declined"),
    ("no_room", "store_dropped"),
    ("aborted", "store_aborted"),
    ("quarantined", "store_quarantined"),
)
"""Reason why an engine's chunk was not stored, and its key in the cache's counts."""


class CacheMetrics(Collector):
    """The metrics of one cache, in their own registry. Created with :meth:`of`."""

    def __init__(
        self, cache: TieredCache, status: Callable[[], Status], what_if: Callable[[], WhatIfReport | None]
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._cache = cache
        self._status = status
        self._what_if = what_if
        self.transfers = TransferCounts(cache)
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
        cache.add_observer(metrics.transfers)
        try:
            yield metrics
        finally:
            cache.remove_observer(metrics.transfers)

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics, in time independent of the number of chunks."""
        status, tiers = self._status(), self._cache.tiers
        yield InfoMetricFamily("kvtier_build", "The version of kvtier.", {"version": __version__})
        yield from self._of_tiers(tiers)
        yield from _of_tenants(tiers)
        yield from self._of_usage(status)
        yield from self._of_counts(tiers)
        yield from self._of_transfers()
        yield from self._of_gauges(status)
        yield from _of_peers(status.get("peers", ()))
        yield from _of_serving(status.get("serving", {}))
        yield from _of_controllers(status.get("controllers", ()))
        yield from _of_canaries(status.get("canary", {}))
        text = "Spans recorded, by what became of them: exported, failed or dropped."
        spans = [((outcome,), count) for outcome, count in status.get("traces", {}).items()]
        yield counter("trace_spans", text, spans, "outcome")
        yield from _of_what_if(self._what_if())

    def _of_tiers(self, tiers: Sequence[Level]) -> Iterator[Metric]:
        info = InfoMetricFamily("kvtier_tier", "The type of a tier.", labels=["tier"])
        for tier in tiers:
            info.add_metric([tier.name], {"type": tier.settings.type})
        yield info
        text = "1 for the eviction policy in whose order a tier evicts now; absent for a shared pool."
        in_use = [((tier.name, tier.eviction_in_use), 1) for tier in tiers if tier.eviction]
        yield gauge("tier_eviction_policy", text, in_use, "tier", "policy")

        def by_tier(value: Callable[[Level], float | None]) -> Samples:
            values = [(tier.name, value(tier)) for tier in tiers]
            return [((name,), number) for name, number in values if number is not None]

        text = "Capacity of a tier; absent for a shared pool."
        yield gauge("tier_capacity_bytes", text, by_tier(lambda tier: tier.capacity), "tier")
        text = "Bytes in a tier according to the catalog."
        yield gauge("tier_used_bytes", text, by_tier(lambda tier: tier.used_bytes), "tier")
        text = "Chunks in a tier according to the catalog."
        yield gauge("tier_chunks", text, by_tier(lambda tier: tier.count), "tier")
        text = "Bytes written to a tier with a codec, or fetched from peers with one, before encoding."
        written = [((tier.name,), tier.written) for tier in tiers if tier.written is not None]
        before = [(name, of.chunk_bytes) for name, of in written]
        yield counter("tier_encoded_bytes", text, before, "tier")
        text = "The same, as they were stored or sent."
        after = [(name, of.stored_bytes) for name, of in written]
        yield counter("tier_encoded_stored_bytes", text, after, "tier")
        text = "With `codec: auto`, whether a tier encodes what is written now; of peers, the part that does."
        chosen = [((tier.name,), tier.choice) for tier in tiers if tier.choice is not None]
        yield gauge("tier_encodes", text, [(name, choice.encodes) for name, choice in chosen], "tier")
        text = "How many times as fast encoded chunks are read from there as others, as measured."
        gains = [(name, choice.gain) for name, choice in chosen if choice.gain is not None]
        yield gauge("tier_codec_gain", text, gains, "tier")
        text = "0 while a tier's circuit breaker is open."
        yield gauge("tier_available", text, by_tier(lambda tier: tier.available), "tier")
        text = "How often a tier's circuit breaker opened."
        yield counter("tier_outages", text, by_tier(lambda tier: tier.outages), "tier")
        text = "Corrupt chunks found in a tier and deleted; in memory only headers are checked."
        yield counter("tier_corrupt_chunks", text, by_tier(lambda tier: tier.corrupt), "tier")
        text = "Chunks found in a tier that need a codec or a key which is not here."
        yield counter("tier_unreadable_chunks", text, by_tier(lambda tier: tier.unreadable), "tier")

    def _of_usage(self, status: Status) -> Iterator[Metric]:
        seconds, of_gpus = self._cache.usage.saved_seconds(self._cache.layouts)
        text = (
            "Time that engines would have computed what was hit, as far as they know their speed, in seconds."
        )
        yield counter("saved_prefill_seconds", text, seconds)
        text = "The same, multiplied by the ranks of the model."
        yield counter("saved_gpu_seconds", text, of_gpus)
        tenants = [(name, of.looked_up, of.hit) for name, of in self._cache.usage.tenants.items()]
        models = [(of["model"], of["looked_up_tokens"], of["hit_tokens"]) for of in status.get("models", ())]
        for label, whose, usages in (("tenant", "of a tenant", tenants), ("model", "for a model", models)):
            asked = [((name,), tokens) for name, tokens, _ in usages]
            hits = [((name,), tokens) for name, _, tokens in usages]
            text = f"Tokens of the prompts {whose} that were looked up."
            yield counter(f"{label}_lookup_tokens", text, asked, label)
            yield counter(f"{label}_lookup_hit_tokens", "Of these, tokens that were found.", hits, label)

    def _of_counts(self, tiers: Sequence[Level]) -> Iterator[Metric]:
        counts, waits = self._cache.counts, self._cache.load_or_compute
        for key, name, text in COUNTS:
            yield counter(name, text, counts[key])
        text = "Expected duration of waits for chunks, where it was known."
        yield counter("expected_wait_seconds", text, waits.expected_seconds)
        text = "Duration of the waits whose duration was expected."
        yield counter("actual_wait_seconds", text, waits.actual_seconds)
        text = "Tokens that lookups found, by the tier that held them."
        hits = [((tier.name,), counts[f"hit_tokens_{tier.name}"]) for tier in tiers]
        yield counter("lookup_hit_tokens", text, hits, "tier")
        text = "Prompt tokens that engines computed, by the reason why they were not loaded."
        missed = [((reason,), counts[f"miss_tokens_{reason}"]) for reason in MissReason]
        yield counter("miss_tokens", text, missed, "reason")
        text = "Chunks not stored: already held, declined, no room, aborted by the engine, or in quarantine."
        refused = [((reason,), counts[key]) for reason, key in REFUSALS]
        yield counter("refused_chunks", text, refused, "reason")
        text = "Chunks compared with what an engine computes: equal, tolerable, different or unknown."
        labels = [(tier.name, result) for tier in tiers for result in RESULTS]
        verified = [((tier, result), counts[f"verified_{result}_{tier}"]) for tier, result in labels]
        yield counter("verified_chunks", text, verified, "tier", "result")
        text = "Namespaces in quarantine in a tier, because a chunk that was compared there was different."
        masks = self._cache.quarantined.values()
        places = [((tier.name,), sum(mask >> tier.index & 1 for mask in masks)) for tier in tiers]
        yield gauge("quarantined_namespaces", text, places, "tier")

    def _of_transfers(self) -> Iterator[Metric]:
        transferred, outcomes, seconds = [], [], []
        for (event, source, target), transfers in self.transfers.routes.items():
            route = [source or ENGINE, target or "", event.__name__.lower()]
            transferred.append((route, transfers.bytes))
            outcomes += [([*route, outcome.value], count) for outcome, count in transfers.outcomes.items()]
            seconds.append((route, transfers.buckets, transfers.seconds))
        yield counter("transferred_bytes", "Bytes transferred between tiers.", transferred, *ROUTE)
        text = "Chunks transferred between tiers, by outcome: ok, miss, full or failed."
        yield counter("transfer_outcomes", text, outcomes, *ROUTE, "outcome")
        text = "Duration of the transfer of one batch between tiers, including time in the queue."
        yield histogram("transfer_seconds", text, BOUNDS, seconds, *ROUTE)

    def _of_gauges(self, status: Status) -> Iterator[Metric]:
        arena, pinned = self._cache.arena, self._cache.catalog.pinned
        reserved = status.get("reservations", {"bytes": 0, "void_bytes": 0})
        yield gauge("engines", "Connected engines.", len(status.get("engines", ())))
        yield gauge("arena_used_bytes", "Memory in use in the first tier.", arena.used)
        yield gauge("arena_leases", "Leases on memory of the first tier.", arena.leases)
        text = "Memory reserved for chunks that engines have not stored yet."
        yield gauge("reserved_bytes", text, reserved["bytes"])
        text = "Part of it that is out of use: a process that has disconnected or stopped may write there."
        yield gauge("void_bytes", text, reserved["void_bytes"])
        yield gauge("pinned_chunks", "Chunks pinned against eviction.", pinned)
        yield gauge("prefetching_chunks", "Chunks in flight into the first tier.", status["flights"])
        text = "Bytes still to be written to lower tiers."
        yield gauge("pending_bytes", text, self._cache.pending_bytes)


def _of_tenants(tiers: Sequence[Level]) -> Iterator[Metric]:
    """Yield the metrics of configured tenants and all others, without samples if none is configured."""
    usages = [
        (tier.name, usage) for tier in tiers if tier.tenants is not None for usage in tier.tenants.usage()
    ]
    for metric, name, text, of in (
        (gauge, "share_bytes", "Bytes of a tier that are never taken from a tenant.", "share_bytes"),
        (gauge, "max_bytes", "Bytes that a tenant holds in a tier at most.", "max_bytes"),
        (gauge, "used_bytes", "Bytes of a tenant in a tier.", "used_bytes"),
        (gauge, "chunks", "Chunks of a tenant in a tier.", "chunks"),
        (counter, "found_chunks", "Chunks of a tenant that lookups found in a tier.", "hits"),
        (counter, "evicted_chunks", "Chunks of a tenant evicted from a tier.", "evictions"),
    ):
        samples = [((tier, usage.tenant), getattr(usage, of)) for tier, usage in usages]
        yield metric(f"tenant_{name}", text, samples, "tier", "tenant")


def _of_peers(peers: Sequence[Status]) -> Iterator[Metric]:
    states = Counter(dict.fromkeys(PEER_STATES, 0))
    states.update(str(peer["state"]).partition(":")[0] for peer in peers)
    by_state = [((state,), count) for state, count in states.items()]
    yield gauge("peers", "Peers to fetch from, by state.", by_state, "state")


def _of_serving(serving: Status) -> Iterator[Metric]:
    def by(name: str) -> Samples:
        return [((value,), count) for value, count in serving.get(name, {}).items()]

    text = "Connections of peers that fetch from this instance."
    yield gauge("serving_connections", text, by("connections"), "purpose")
    yield gauge("serving_grants", "Active grants to peers.", serving.get("grants", 0))
    text = "Memory covered by active grants."
    yield gauge("serving_granted_bytes", text, serving.get("granted_bytes", 0))
    yield counter("serving_issued_grants", "Grants issued to peers.", serving.get("granted", 0))
    text = "Grants that expired before peers released them."
    yield counter("serving_expired_grants", text, serving.get("expired", 0))
    text = "Refused connections, by reason."
    yield counter("serving_refused_connections", text, by("refused"), "reason")


def _of_controllers(controllers: Sequence[Status]) -> Iterator[Metric]:
    """Yield the metrics of the controller connections, without samples if no controller is configured."""
    connected, up_to_date, lost = (
        total(controller[name] for controller in controllers) if controllers else []
        for name, total in (("connected", min), ("up_to_date", min), ("lost", sum))
    )
    yield gauge("agent_connected", "0 while a controller is not connected.", connected)
    text = "0 while a controller's view of this instance is not up to date."
    yield gauge("agent_up_to_date", text, up_to_date)
    yield counter("agent_lost_connections", "Lost connections to controllers.", lost)


def _of_canaries(canaries: Status) -> Iterator[Metric]:
    """Yield the metrics of the canaries by the URL of their engine, without samples if there are none."""

    def each(name: str) -> Samples:
        return [((url,), canary[name]) for url, canary in canaries.items()]

    text = "Runs of the canary, by result: ok, skipped, or where what was stored was lost."
    results = [((url, name), runs) for url, of in canaries.items() for name, runs in of["results"].items()]
    yield counter("canary_runs", text, results, "engine", "result")
    text = "1 while what the canary has stored is not served, or leads to other tokens."
    yield gauge("canary_alert", text, each("alert"), "engine")
    text = "Time of the last run that was ok, or of the start, in seconds since 1970."
    yield gauge("canary_last_ok_timestamp_seconds", text, each("last_ok"), "engine")


def _of_what_if(report: WhatIfReport | None) -> Iterator[Metric]:
    """Yield what other settings would bring, without samples if that is not known."""
    curves = () if report is None else report.tiers
    policies = {(curve.tier, curve.policy): curve.hit_rate for curve in curves}
    if report is not None:
        policies |= {(at.tier, at.policy): at.hit_rate for at in report.changes if at.policy is not None}
    points = [
        ((curve.tier, f"{multiple:g}x"), point)
        for curve in curves
        for multiple in MULTIPLES
        if (point := point_at(curve, round(multiple * curve.capacity_bytes))) is not None
    ]
    text = "Estimated hit rate of the cache, if a tier had this multiple of its capacity."
    rates = [(labels, point.hit_rate) for labels, point in points]
    yield gauge("whatif_hit_rate", text, rates, "tier", "capacity")
    text = "Part of the estimated hit rate with this multiple: hits in the tier or a faster one."
    fast = [(labels, point.fast_hit_rate) for labels, point in points if point.fast_hit_rate is not None]
    yield gauge("whatif_fast_hit_rate", text, fast, "tier", "capacity")
    text = "The least capacity of a tier with almost as many hits, also in this tier and faster ones."
    useful = [((curve.tier,), curve.useful_bytes) for curve in curves]
    yield gauge("whatif_useful_bytes", text, useful, "tier")
    text = "Estimated hit rate of the cache, if a tier had this eviction policy."
    yield gauge("whatif_policy_hit_rate", text, policies.items(), "tier", "policy")
    text = "Chunks asked for that are in the sample of the estimate."
    yield counter("whatif_sampled_chunks", text, [] if report is None else report.sampled)
    text = "Lookups not observed, because the estimate could not keep up."
    yield counter("whatif_dropped_lookups", text, [] if report is None else report.dropped)
    text = "Part of the chunks looked up that the estimate has observed."
    yield gauge("whatif_observed_ratio", text, [] if report is None else report.observed)
    text = "For how long the oldest lookup that is not observed yet has been waiting, in seconds."
    yield gauge("whatif_behind_seconds", text, [] if report is None else report.behind_seconds)


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
