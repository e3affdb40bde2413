"""The connector's counters in vLLM's ``/metrics`` and in its periodic log line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LABELS = {"hit_tokens": "tier", "miss_tokens": "reason"}
"""The counters that have a further label."""

COUNTERS: Mapping[str, str] = {
    "looked_up_tokens": "Prompt tokens that were looked up",
    "hit_tokens": "Tokens that were loaded, by the tier that held them",
    "miss_tokens": "Prompt tokens that were computed, by the reason why they were not loaded",
    "loaded_tokens": "Tokens copied into vLLM's KV cache",
    "loaded_bytes": "Bytes copied into vLLM's KV cache, sum of all ranks",
    "load_seconds": "Seconds spent copying into vLLM's KV cache",
    "stored_tokens": "Tokens copied out of vLLM's KV cache, by each rank",
    "stored_bytes": "Bytes copied out of vLLM's KV cache, sum of all ranks",
    "store_seconds": "Seconds spent copying out of vLLM's KV cache",
    "not_stored_chunks": "Chunks that were already held, found no room, or were given up for a slow GPU",
    "stored_again_chunks": "Chunks that were stored at the end of an answer: evicted or declined before",
    "transferred_tokens": "Prompt tokens transferred to decode instances",
    "verified_tokens": "Tokens that were held, and computed to verify them",
    "failed_loads": "Requests that were computed because their load failed",
}
"""Descriptions of the counters in vLLM's ``/metrics``, which are named ``kvtier_<name>_total``."""


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report. Sent between vLLM's processes as a plain dictionary."""

    data: dict[str, Any]

    def add(self, name: str, amount: float, label: str = "") -> None:
        """Add to a counter."""
        key = f"{name}/{label}" if label else name
        self.data[key] = self.data.get(key, 0) + amount

    def take(self) -> TransferStats | None:
        """Return the counts and reset them; ``None`` if nothing was counted."""
        if self.is_empty():
            return None
        taken = TransferStats(data=self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        """Reset all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add another's counts to these."""
        for key, amount in other.data.items():
            self.data[key] = self.data.get(key, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts and the throughputs derived from them, for a log line."""
        reduced: dict[str, int | float] = {
            key: round(amount, 3) for key, amount in self.data.items() if not key.endswith("_seconds")
        }
        for what, verb in (("loaded", "load"), ("stored", "store")):
            seconds = self.data.get(f"{verb}_seconds", 0)
            if seconds:
                reduced[f"{what}_GB_per_s"] = round(self.data.get(f"{what}_bytes", 0) / seconds / 1e9, 2)
        return reduced

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class TransferPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister()
        counter = metric_types[Counter]
        self._counters = {
            name: counter(
                name=f"kvtier_{name}",
                documentation=f"{text}.",
                labelnames=[*labelnames, LABELS[name]] if name in LABELS else labelnames,
            )
            for name, text in COUNTERS.items()
        }
        # Export 0 from the start: Prometheus misses the first increase of a counter that appears later.
        for name, labelled in self._counters.items():
            for values in per_engine_labelvalues.values():
                if name not in LABELS:
                    labelled.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition("/")
            values = [*labels, label] if name in LABELS else labels
            self._counters[name].labels(*values).inc(amount)


def _unregister() -> None:
    """Unregister the counters of an earlier engine in this process, as vLLM does with its own metrics."""
    names = {f"kvtier_{name}" for name in COUNTERS}
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in names:
            REGISTRY.unregister(collector)
