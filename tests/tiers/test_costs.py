"""Cost estimates from measured reads, with a controllable clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.tiers.costs import HALF_LIFE_SECONDS, MIN_SUCCESS, ReadCost
from tests.rigs.clock import Clock

MIB = 1 << 20


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reading(clock: Clock) -> ReadCost:
    return ReadCost(clock)


def cost(reading: ReadCost, length: int) -> float:
    seconds = reading.expected(length)
    assert seconds is not None
    return seconds


def test_unknown_before_the_first_read(reading: ReadCost) -> None:
    assert reading.expected(MIB) is None
    reading.failed()
    assert reading.expected(MIB) is None, "a failure must not yield an estimate"
    reading.succeeded(0, 0.001)
    assert reading.expected(MIB) is None, "an empty batch must not yield an estimate"


def test_reads_of_one_length_yield_seconds_per_byte(reading: ReadCost) -> None:
    for _ in range(5):
        reading.succeeded(8 * MIB, 0.04)
    assert cost(reading, 8 * MIB) == pytest.approx(0.04)
    assert cost(reading, 2 * MIB) == pytest.approx(0.01)


def test_status_shows_the_estimates(reading: ReadCost) -> None:
    unknown = {"latency_seconds": None, "seconds_per_mib": None, "failure_ratio": None}
    assert reading.status() == unknown
    for length in (1, 40, 3, 17, 64, 8):
        reading.succeeded(length * MIB, 0.02 + 0.001 * length)
    assert reading.status() == pytest.approx(
        {"latency_seconds": 0.02, "seconds_per_mib": 0.001, "failure_ratio": 0.0}
    )
    reading.failed()
    assert 0 < float(str(reading.status()["failure_ratio"])) < 0.5


def test_reads_of_many_lengths_yield_latency(reading: ReadCost) -> None:
    for length in (1, 40, 3, 17, 64, 8):
        reading.succeeded(length * MIB, 0.02 + 0.001 * length)
    assert cost(reading, 100 * MIB) == pytest.approx(0.12)
    assert cost(reading, 0) == pytest.approx(0.02)


def test_faster_long_reads_do_not_yield_negative_cost_per_byte(reading: ReadCost) -> None:
    reading.succeeded(1 * MIB, 0.03)
    reading.succeeded(64 * MIB, 0.01)
    assert 0.01 <= cost(reading, 0) <= 0.03
    assert cost(reading, 1000 * MIB) == cost(reading, 0)


def test_recent_reads_weigh_most(reading: ReadCost) -> None:
    for _ in range(20):
        reading.succeeded(MIB, 0.001)
    for _ in range(10):
        reading.succeeded(MIB, 0.1)
    assert cost(reading, MIB) == pytest.approx(0.1, rel=0.1)


def test_failures_raise_the_cost_and_successes_lower_it(reading: ReadCost) -> None:
    reading.succeeded(MIB, 0.01)
    costs = [cost(reading, MIB)]
    for _ in range(2):
        reading.failed()
        costs.append(cost(reading, MIB))
    assert costs[0] < costs[1] < costs[2]
    assert costs[2] > 1.5 * costs[0], "two failures in a row must be enough to prefer an equal source"
    for _ in range(20):
        reading.succeeded(MIB, 0.01)
    assert cost(reading, MIB) == pytest.approx(0.01, rel=0.02)


def test_cost_of_failures_is_bounded(reading: ReadCost) -> None:
    reading.succeeded(MIB, 0.01)
    for _ in range(1000):
        reading.failed()
        seconds = reading.expected(MIB)
        assert seconds is None or seconds <= 0.01 / MIN_SUCCESS + 1e-9


@pytest.mark.parametrize(("reads", "half_lives"), [(1, 3.1), (50, 5.1)])
def test_estimates_expire_over_minutes(
    reading: ReadCost, clock: Clock, reads: int, half_lives: float
) -> None:
    for _ in range(reads):
        reading.succeeded(MIB, 10.0)
    clock.now += HALF_LIFE_SECONDS * (half_lives - 0.5)
    assert cost(reading, MIB) == pytest.approx(10.0), "age must lower the weight, not the value"
    clock.now += HALF_LIFE_SECONDS * 0.5
    assert reading.expected(MIB) is None
    reading.succeeded(MIB, 0.01)
    assert cost(reading, MIB) < 2.0, "old reads must weigh little against new ones"
    clock.now += 1e9
    assert reading.expected(MIB) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40),
            st.floats(0, 1e4),
            st.floats(0, 1e5),
            st.booleans(),
            st.integers(0, 1 << 40),
        ),
        max_size=60,
    )
)
# Numbers so small that rounding errors exceed them.
@example([(24, 2.2250738585072014e-308, 0.0, False, 0)])
def test_estimates_are_finite_and_monotonic(history: list[tuple[int, float, float, bool, int]]) -> None:
    clock = Clock()
    reading = ReadCost(clock)
    for length, seconds, pause, failed, queried_length in history:
        clock.now += pause
        if failed:
            reading.failed()
        else:
            reading.succeeded(length, seconds)
        expected = reading.expected(queried_length)
        assert expected is None or 0 <= expected < float("inf")
        if expected is not None and queried_length:
            assert reading.expected(2 * queried_length) >= expected * 0.999999  # type: ignore[operator]


def test_tenfold_difference_is_visible_despite_noise(reading: ReadCost, clock: Clock) -> None:
    noise, other = random.Random(0), ReadCost(clock)
    for _ in range(200):
        length = noise.randint(1, 64) * MIB
        reading.succeeded(length, (0.001 + length / 1e9) * noise.uniform(0.5, 1.5))
        other.succeeded(length, (0.001 + length / 1e10) * noise.uniform(0.5, 1.5))
        assert cost(other, 64 * MIB) < cost(reading, 64 * MIB)
