"""Reading a curve between its points."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.observability.whatif.report import (
    Change,
    Point,
    TierCurve,
    change_to,
    gained_fast,
    known_points,
    point_at,
)
from tests.rigs.whatif_reports import GIB, RAM, REPORT, SSD


def test_points_are_exact_and_between_them_is_a_straight_line() -> None:
    for point in RAM.points:
        assert point_at(RAM, point.capacity_bytes) == point
    for capacity, rate in ((125, 0.635), (300, 0.705)):
        between = point_at(RAM, capacity * GIB)
        assert between is not None
        assert between.capacity_bytes == capacity * GIB
        assert (between.hit_rate, between.fast_hit_rate) == pytest.approx((rate, rate - 0.2))


def test_nothing_is_known_outside_of_the_curve() -> None:
    assert point_at(RAM, 25 * GIB - 1) is None
    assert point_at(RAM, 400 * GIB + 1) is None
    assert change_to(REPORT, RAM, 500 * GIB) is None


def test_today_is_a_point_of_every_curve() -> None:
    assert Point(1000 * GIB, 0.6) in known_points(SSD)
    assert len(known_points(RAM)) == len(RAM.points)
    assert known_points(replace(SSD, points=[])) == [Point(1000 * GIB, 0.6)]


def test_hits_gained_in_faster_tiers_are_known_within_the_curve() -> None:
    assert gained_fast(RAM, 150 * GIB) == pytest.approx(0.07)
    assert gained_fast(RAM, 500 * GIB) is None, "beyond the curve"
    assert gained_fast(SSD, 2000 * GIB) is None, "not known for the capacity of today"


@given(
    st.dictionaries(st.integers(0, 1 << 50), st.floats(0, 1), min_size=1, max_size=20),
    st.integers(0, 1 << 50),
)
def test_a_hit_rate_is_between_its_neighbours(points: dict[int, float], capacity: int) -> None:
    sizes = sorted(points)
    today = sizes[len(sizes) // 2]
    curve = TierCurve("ram", "lru", today, points[today], today, [Point(at, points[at]) for at in sizes])
    found = point_at(curve, capacity)
    if not sizes[0] <= capacity <= sizes[-1]:
        assert found is None
        return
    below = max(at for at in sizes if at <= capacity)
    above = min(at for at in sizes if at >= capacity)
    low, high = sorted((points[below], points[above]))
    assert found is not None
    assert low - 1e-12 <= found.hit_rate <= high + 1e-12


def test_gpu_time_is_in_proportion_to_what_is_gained() -> None:
    more = change_to(REPORT, RAM, 125 * GIB)
    assert more is not None
    assert (more.tier, more.capacity_bytes, more.policy) == ("ram", 125 * GIB, None)
    assert more.gained == pytest.approx(0.035)
    assert more.gpu_seconds_a_day == pytest.approx(930)
    less = change_to(REPORT, RAM, 50 * GIB)
    assert less is not None
    assert less.gained == pytest.approx(-0.15)
    assert less.gpu_seconds_a_day == pytest.approx(-0.15 / 0.07 * 1860)


@pytest.mark.parametrize(
    "changes", [[], [Change("ram", None, "arc", 0.7, 0.1, None)], [Change("ram", GIB, None, 0.6, 0.0, 0.0)]]
)
def test_gpu_time_is_unknown_without_a_change_to_compare_with(changes: list[Change]) -> None:
    more = change_to(replace(REPORT, changes=changes), RAM, 150 * GIB)
    assert more is not None
    assert more.gpu_seconds_a_day is None
