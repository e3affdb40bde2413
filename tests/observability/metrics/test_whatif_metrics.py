"""Metrics of what other settings would bring, from a report made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.observability.whatif.report import Change, Report
from tests.observability.metrics.scraping import scraped_cache, settings
from tests.rigs.whatif_reports import GIB, REPORT

pytestmark = pytest.mark.anyio


async def test_estimates_are_exported_for_tiers_multiples_and_policies(tmp_path: Path) -> None:
    report: Report | None = REPORT
    async with scraped_cache(settings(tmp_path), what_if=lambda: report) as scraped:
        scrape = await scraped.scrape()
        # 4x of the disk is beyond its curve.
        assert scrape.labelled("whatif_hit_rate") == {
            **{
                (("capacity", multiple), ("tier", "ram")): rate
                for multiple, rate in (("0.5x", 0.45), ("1x", 0.6), ("2x", 0.7), ("4x", 0.71))
            },
            **{(("capacity", multiple), ("tier", "ssd")): 0.6 for multiple in ("0.5x", "1x", "2x")},
        }
        fast = scrape.labelled("whatif_fast_hit_rate")
        assert fast[("capacity", "2x"), ("tier", "ram")] == pytest.approx(0.5)
        assert scrape.by("whatif_useful_bytes", "tier") == {"ram": 95 * GIB, "ssd": 250 * GIB}
        assert scrape.labelled("whatif_policy_hit_rate") == {
            (("policy", "lru"), ("tier", "ram")): 0.6,
            (("policy", "arc"), ("tier", "ram")): 0.63,
            (("policy", "lru"), ("tier", "ssd")): 0.6,
        }
        assert scrape("whatif_sampled_chunks_total") == 12_300
        assert scrape("whatif_dropped_lookups_total") == 0
        report = None
        assert not [name for name, _ in (await scraped.scrape()).series if "whatif" in name]


async def test_number_of_series_does_not_depend_on_the_number_of_capacities(tmp_path: Path) -> None:
    capacities = [Change("ram", GIB * n, None, 0.5, 0.0, None) for n in range(1, 1000)]
    (ram, disk), changes = REPORT.tiers, REPORT.changes
    points = [replace(ram.points[0], capacity_bytes=n * GIB) for n in range(1, 1000)]
    large = replace(REPORT, tiers=[replace(ram, points=points), disk], changes=[*changes, *capacities])
    series = []
    for report in (REPORT, large):
        async with scraped_cache(settings(tmp_path), what_if=lambda report=report: report) as scraped:
            series.append(len((await scraped.scrape()).series))
    assert series[0] == series[1]
