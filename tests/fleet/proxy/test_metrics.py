"""Metrics and statistics of the proxy, and their documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from kvtier.cli import make_app
from kvtier.fleet.proxy.metrics import RECENT, Durations

from .conftest import Cluster
from .stub import dies, dies_in_stream, responds

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "proxy.md"


async def scrape(cluster: Cluster) -> dict[str, Metric]:
    text = (await cluster.client.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample(families: dict[str, Metric], name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == f"kvtier_proxy_{name}" and labels.items() <= sample.labels.items()
    ]
    (value,) = found
    return value


async def test_requests_are_counted(cluster: Cluster) -> None:
    await cluster.complete()
    await cluster.complete()
    cluster.decoders[0].then.extend([dies_in_stream(1), responds(400)])
    await cluster.complete(stream=True)
    await cluster.complete()
    cluster.prefillers[0].then.append(dies)
    await cluster.complete(prompt="other " * 1000)
    metrics = await scrape(cluster)
    for name, labels, value in (
        ("requests_total", {"outcome": "ok"}, 3),
        ("requests_total", {"outcome": "error"}, 1),
        ("requests_total", {"outcome": "interrupted"}, 1),
        ("prefills_total", {"outcome": "transferred"}, 1),
        ("prefills_total", {"outcome": "failed"}, 1),
        ("skipped_prefills_total", {"reason": "cached"}, 3),
        ("transferred_tokens_total", {}, 300),
        ("prefill_seconds_count", {}, 1),
        ("first_byte_seconds_count", {}, 4),
        ("requests_in_flight", {}, 0),
        ("held_bytes", {}, 0),
        ("engine_up", {"role": "decode", "engine": cluster.decoders[0].url}, 1),
        ("engine_responses_total", {"role": "decode"}, 5),
        ("engine_failures_total", {"role": "prefill"}, 1),
        ("engine_requests_in_flight", {"role": "prefill"}, 0),
    ):
        assert sample(metrics, name, **labels) == value, (name, labels)


async def test_documentation_lists_every_metric(cluster: Cluster) -> None:
    listed = {}
    for line in re.findall(r"^\| `(?:kvtier_proxy|process)_\w+` \|.*$", PAGE.read_text(), re.MULTILINE):
        name, kind, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        listed[name.strip("`")] = (kind, frozenset(re.findall(r"\w+", labels)), meaning)
    metrics = {}
    for family in (await scrape(cluster)).values():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        metrics[name] = (family.type, frozenset(labels), family.documentation.rstrip("."))
    assert metrics == listed


def test_documentation_lists_every_option() -> None:
    command = get_command(make_app()).commands["proxy"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert set(re.findall(r"^\| `(--[\w-]+)", PAGE.read_text(), re.MULTILINE)) == options - {"--help"}


async def test_statistics_over_http(cluster: Cluster) -> None:
    assert (await cluster.client.get("/stats")).json()["prefill_ttft"] == {
        "count": 0,
        "mean_ms": 0,
        "median_ms": 0,
        "p99_ms": 0,
    }
    await cluster.complete()
    stats = (await cluster.client.get("/stats")).json()
    assert stats["prefill_ttft"]["count"] == stats["first_byte"]["count"] == 1
    assert stats["requests"] == {"ok": 1}
    assert (await cluster.client.get("/health")).json()["decode"] == 1


def test_durations() -> None:
    durations = Durations()
    for number in range(1, 101):
        durations.add(number / 1000)
    assert durations.summary() == pytest.approx(
        {"count": 100, "mean_ms": 50.5, "median_ms": 50.5, "p99_ms": 99.01}
    )
    for _ in range(RECENT):
        durations.add(0.001)
    assert durations.summary()["p99_ms"] == pytest.approx(1)
    assert durations.summary()["count"] == RECENT + 100
    assert sum(durations.buckets) == RECENT + 100
