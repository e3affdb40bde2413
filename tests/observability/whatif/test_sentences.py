"""What operators read: each sentence, and when it appears."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier.observability.whatif.report import Change, Point
from kvtier.observability.whatif.sentences import MAX_CHANGES, basis, excess, findings, hit_rates, sentence
from tests.rigs.whatif_reports import GIB, RAM, REPORT, SSD


def test_findings_are_the_useful_changes_and_the_tiers_that_are_too_large() -> None:
    assert findings(REPORT) == [
        "+50GiB of ram: +7.0 points, saves 31 GPU minutes a day",
        "ram with policy arc: +3.0 points, saves 13 GPU minutes a day",
        "ssd is 4.0 times larger than useful: 250GiB would do almost as well.",
    ]


def test_basis_has_the_sample_the_cost_and_both_hit_rates() -> None:
    assert basis(REPORT) == [
        "Observed for 2.2 hours: 1,240,000 chunks, 100 % of those looked up. The sample: 1 % of all keys, "
        "12,300 chunks.",
        "The estimate takes 0.3 % of one core.",
        "Hit rate of these chunks: 61.2 % measured, 60.0 % estimated.",
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"sampled": 999},
            "That is too little for a reliable estimate: wait for 1,000 chunks in the sample.",
        ),
        ({"measured_hit_rate": 0.66}, "These differ by more than 5 points: the estimate is inexact."),
        ({"stopped": "OSError: x"}, "Nothing is observed any more, because of an error: OSError: x"),
        (
            {"observed": 0.99999},
            "Observed for 2.2 hours: 1,240,000 chunks, 99.9 % of those looked up. The sample: 1 % of all "
            "keys, 12,300 chunks.",
        ),
        (
            {"behind_seconds": 42.0},
            "It is 42 seconds behind the lookups: the sample gets smaller until it keeps up.",
        ),
        ({"dropped": 1200}, "1,200 lookups were not observed, because the estimate could not keep up."),
        (
            {"prefill_tokens_per_second": None},
            "No engine has reported its speed of prefill yet: GPU time is unknown.",
        ),
    ],
)
def test_what_makes_the_estimate_less_exact_is_said(fields: dict[str, Any], expected: str) -> None:
    assert expected not in basis(REPORT)
    assert expected in basis(replace(REPORT, **fields))


def test_hit_rates_that_are_not_known_or_differ_by_tier() -> None:
    assert (
        hit_rates(replace(REPORT, measured_hit_rate=None))
        == "Hit rate of these chunks: not measured yet, 60.0 % estimated."
    )
    assert (
        hit_rates(replace(REPORT, tiers=[]))
        == "Hit rate of these chunks: 61.2 % measured, unknown estimated."
    )
    differ = replace(REPORT, tiers=[RAM, replace(SSD, hit_rate=0.588)])
    assert hit_rates(differ) == "Hit rate of these chunks: 61.2 % measured, 58.8 to 60.0 % estimated."


def ram(capacity: int, gained: float, seconds: float | None) -> Change:
    """Return a change of the capacity, in GiB."""
    return Change("ram", capacity * GIB, None, 0.6 + gained, gained, seconds)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (ram(50, -0.15, -4000.0), "-50GiB of ram: -15.0 points, costs 1.1 GPU hours a day"),
        (ram(200, 0.1, None), "+100GiB of ram: +10.0 points"),
        (ram(200, -1e-6, 0.0), "+100GiB of ram: +0.0 points"),
        (ram(200, 0.001, 60.0), "+100GiB of ram: +0.1 points, saves 1 GPU minute a day"),
        (ram(200, 0.001, 0.5), "+100GiB of ram: +0.1 points, saves 0.5 GPU seconds a day"),
        (ram(200, 0.3, 4e6), "+100GiB of ram: +30.0 points, saves 1,111 GPU hours a day"),
        (
            Change("ssd", None, None, 0.63, 0.03, None, "lossless"),
            "ssd with codec lossless, if its KV is bfloat16: +3.0 points",
        ),
        (Change("gone", 200 * GIB, None, 0.7, 0.1, None), "gone of 200GiB: +10.0 points"),
    ],
)
def test_sentence_of_a_change(change: Change, expected: str) -> None:
    assert sentence(change, replace(REPORT, tiers=[replace(RAM, points=[]), SSD])) == expected


def test_hits_that_only_become_faster() -> None:
    """The lower tier has all chunks: more memory does not add hits."""
    points = [
        Point(size * GIB, 0.6, rate) for size, rate in ((50, 0.2), (100, 0.4), (150, 0.55), (200, 0.552))
    ]
    changes = [Change("ram", size * GIB, None, 0.6, 0.0, 0.0) for size in (200, 150, 50)]
    report = replace(REPORT, tiers=[replace(RAM, points=points)], changes=changes)
    assert findings(report) == [
        "+100GiB of ram: +0.0 points, +15.2 points of hits in ram or faster",
        "+50GiB of ram: +0.0 points, +15.0 points of hits in ram or faster",
    ]
    assert sentence(changes[-1], report) == (
        "-50GiB of ram: +0.0 points, -20.0 points of hits in ram or faster"
    )


def test_a_sample_that_is_too_small_gives_no_findings() -> None:
    assert findings(replace(REPORT, sampled=999)) == []
    assert findings(replace(REPORT, sampled=1000))


def test_changes_that_gain_nothing_get_no_sentence() -> None:
    small = [Change("ram", None, "arc", 0.6, 0.0009, None), Change("ram", None, "fifo", 0.5, -0.1, None)]
    assert findings(replace(REPORT, tiers=[RAM], changes=small)) == [
        "No change that was tried would gain 0.1 points of hit rate."
    ]


def test_number_of_findings_is_bounded() -> None:
    many = [Change("ram", None, f"policy-{n}", 0.9, 0.3, None) for n in range(1000)]
    assert len(findings(replace(REPORT, changes=many))) == MAX_CHANGES + 1


def test_a_tier_is_too_large_from_a_quarter_on() -> None:
    assert excess(replace(SSD, useful_bytes=801 * GIB)) is None
    assert excess(replace(SSD, useful_bytes=800 * GIB)) == (
        "ssd is 1.2 times larger than useful: 800GiB would do almost as well."
    )
    assert excess(replace(SSD, useful_bytes=125 * GIB)) == (
        "ssd is at least 8.0 times larger than useful: 125GiB would do almost as well."
    )
    assert excess(replace(SSD, useful_bytes=0)) == (
        "ssd brings nothing: without it, the hit rate would be almost the same."
    )
