"""What Prometheus is told of the controller; of the instances it asks themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

import kvtier
from kvtier.controller.operations import Operations


class ControllerMetrics(Collector):
    """Reads everything when it is asked: nothing is counted twice, and nothing in between."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._collectors = CollectorRegistry(auto_describe=False)
        self._collectors.register(self)

    def answer(self) -> Response:
        """All of it, in Prometheus' text format. Some milliseconds for a hundred instances."""
        return Response(generate_latest(self._collectors), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def describe(self) -> Iterable[Metric]:
        """Nothing that must be asked for when it is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """What it is now."""
        info = GaugeMetricFamily("kvtier_controller_info", "The controller's version.", labels=["version"])
        info.add_metric([kvtier.__version__], 1)
        yield info
        yield from self._of_instances()
        yield from self._of_events()
        yield CounterMetricFamily(
            "kvtier_controller_lookups", "Look-ups that were answered.", self._operations.look_ups
        )
        yield CounterMetricFamily(
            "kvtier_controller_lookup_seconds",
            "Seconds that answering look-ups took, tokenizing included.",
            self._operations.look_up_seconds,
        )

    def _of_instances(self) -> Iterator[Metric]:
        registry = self._operations.registry
        yield GaugeMetricFamily(
            "kvtier_controller_instances", "Instances that are registered.", len(registry.members)
        )
        yield GaugeMetricFamily(
            "kvtier_controller_keys", "Chunks of which some holder is known.", len(registry.holders)
        )
        chunks = GaugeMetricFamily(
            "kvtier_controller_chunks",
            "Chunks that a tier of an instance is known to hold.",
            labels=["instance", "tier"],
        )
        silence = GaugeMetricFamily(
            "kvtier_controller_last_heard_timestamp_seconds",
            "When an instance was heard of last, in seconds since 1970.",
            labels=["instance"],
        )
        for member in registry.members.values():
            silence.add_metric([member.id], member.heard_at)
            for place, tier in zip(member.places, member.hello.tiers, strict=True):
                chunks.add_metric([member.id, tier.name], registry.holders.count(place))
        yield chunks
        yield silence

    def _of_events(self) -> Iterator[Metric]:
        log = self._operations.events
        yield GaugeMetricFamily(
            "kvtier_controller_events_unfinished", "Events that are queued or running.", log.unfinished
        )
        events = CounterMetricFamily(
            "kvtier_controller_events",
            "Events that have come to a state: queued, running, done or failed.",
            labels=["kind", "state"],
        )
        for (kind, state), count in log.counts.items():
            events.add_metric([kind, state], count)
        yield events
        seconds = CounterMetricFamily(
            "kvtier_controller_event_seconds",
            "Seconds from the start to the end of all events that have ended.",
            labels=["kind"],
        )
        for kind, total in log.seconds.items():
            seconds.add_metric([kind], total)
        yield seconds
