"""Metrics and statistics of the proxy, and their documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from kvtier.cli import make_app
from kvtier.fleet.proxy.metrics import LOOKUP_OUTCOMES, RECENT, Durations
from tests.rigs.scrape import Scrape

from .conftest import Cluster
from .stub import dies, dies_in_stream, responds

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "proxy.md"


async def test_requests_are_counted(cluster: Cluster) -> None:
    await cluster.complete()
    await cluster.complete()
    cluster.decoders[0].then.extend([dies_in_stream(1), responds(400)])
    await cluster.complete(stream=True)
    await cluster.complete()
    cluster.prefillers[0].then.append(dies)
    await cluster.complete(prompt="other " * 1000)
    scrape = Scrape((await cluster.client.get("/metrics")).text)
    outcomes = {"ok": 3, "error": 1, "interrupted": 1}
    assert scrape.by("proxy_requests_total", "outcome") == outcomes
    assert scrape.by("proxy_prefills_total", "outcome") == {"transferred": 1, "failed": 1}
    assert scrape.by("proxy_skipped_prefills_total", "reason") == {"cached": 3, "no_prefiller": 1}
    # A series that appears late hides its first increase.
    lookups = {(("outcome", outcome),): 0 for outcome in LOOKUP_OUTCOMES}
    assert scrape.labelled("proxy_lookups_total") == lookups
    for name, value in (
        ("transferred_tokens_total", 300),
        ("prefill_seconds_count", 1),
        ("first_byte_seconds_count", 4),
        ("requests_in_flight", 0),
        ("held_bytes", 0),
    ):
        assert scrape(f"proxy_{name}") == value, name
    prefiller = {"role": "prefill", "engine": cluster.prefillers[0].url}
    decoder = {"role": "decode", "engine": cluster.decoders[0].url}
    assert scrape("proxy_engine_up", **decoder) == 1
    assert scrape("proxy_engine_responses_total", **decoder) == 5
    assert scrape("proxy_engine_failures_total", **prefiller) == 1
    assert scrape("proxy_engine_requests_in_flight", **prefiller) == 0


async def test_documentation_lists_every_metric(cluster: Cluster) -> None:
    """Also those of the process. What it says about them is checked where the tables are written."""
    listed = re.findall(r"^\| `((?:kvtier_proxy|process)_\w+)` \|", PAGE.read_text(), re.MULTILINE)
    exported = Scrape((await cluster.client.get("/metrics")).text).families.values()
    assert [family.name + "_total" * (family.type == "counter") for family in exported] == listed


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
