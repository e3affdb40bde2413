"""Estimates of how long work takes, from recent work of the same kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.throughput import MAX_AGE_SECONDS, MIN_SAMPLES, SAMPLES, Throughput
from tests.rigs.clock import Clock

MIB = 1 << 20


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_is_known_from_few_samples(clock: Clock) -> None:
    throughput = Throughput(clock=clock)
    for _ in range(MIN_SAMPLES - 1):
        throughput.record(100, 1.0)
    assert throughput.expected(100) is None
    throughput.record(100, 1.0)
    assert throughput.expected(200) == pytest.approx(2.0)


def test_much_smaller_samples_do_not_count(clock: Clock) -> None:
    """They are mostly overhead."""
    throughput = Throughput(sample=1000, clock=clock)
    for _ in range(SAMPLES):
        throughput.record(100, 1.0)
    assert throughput.expected(400) == pytest.approx(4.0)
    assert throughput.expected(401) is None
    for _ in range(MIN_SAMPLES):
        throughput.record(250, 1.0)
    assert throughput.expected(1_000_000) == pytest.approx(4000.0), "larger amounts take the same per unit"


def test_old_samples_are_forgotten(clock: Clock) -> None:
    throughput = Throughput(clock=clock)
    for _ in range(SAMPLES):
        throughput.record(100, 1.0)
    clock.now += MAX_AGE_SECONDS
    assert throughput.expected(100) is not None
    clock.now += 1
    assert throughput.expected(100) is None


@given(st.lists(st.floats(0.9, 1.1), min_size=MIN_SAMPLES, max_size=2 * SAMPLES), st.floats(1, 1e6))
def test_one_slow_sample_changes_nothing(seconds: list[float], slow: float) -> None:
    """Such as the first read of a disk that was asleep."""
    throughput = Throughput()
    throughput.record(100, slow)
    for value in seconds:
        throughput.record(100, value)
    expected = throughput.expected(100)
    assert expected is not None
    assert 0.89 <= expected <= 1.11


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=MIN_SAMPLES, max_size=20),
    st.floats(1, 4),
)
def test_estimate_is_within_what_was_seen_and_proportional(
    samples: list[tuple[float, float]], amount: float
) -> None:
    throughput = Throughput(sample=1.0)
    for sample in samples:
        throughput.record(*sample)
    costs = [seconds / size for size, seconds in samples[-SAMPLES:]]
    expected, double = throughput.expected(amount), throughput.expected(2 * amount)
    assert expected is not None
    assert min(costs) * amount * 0.999 <= expected <= max(costs) * amount * 1.001
    assert double == pytest.approx(2 * expected)


def read(throughput: Throughput, clock: Clock, length: int, seconds: float) -> None:
    throughput.begin(length)
    clock.now += seconds
    throughput.end(length, length)


def test_idle_time_does_not_count(clock: Clock) -> None:
    throughput = Throughput(16 * MIB, clock=clock)
    for _ in range(MIN_SAMPLES):
        read(throughput, clock, 32 * MIB, 1.0)
        clock.now += 5
    assert throughput.expected(64 * MIB) == pytest.approx(2.0)


def test_what_is_pending_is_read_first(clock: Clock) -> None:
    """The queue of other requests, which share the medium."""
    throughput = Throughput(16 * MIB, clock=clock)
    for _ in range(MIN_SAMPLES):
        read(throughput, clock, 32 * MIB, 1.0)
    throughput.begin(64 * MIB)
    assert throughput.expected(32 * MIB) == pytest.approx(3.0)
    throughput.end(64 * MIB, 0)
    assert throughput.expected(32 * MIB) == pytest.approx(1.0), "a failed read says nothing of the speed"


def test_concurrent_reads_share_the_time(clock: Clock) -> None:
    throughput = Throughput(16 * MIB, clock=clock)
    throughput.begin(64 * MIB)
    for _ in range(4):
        clock.now += 1
        throughput.end(16 * MIB, 16 * MIB)
    assert throughput.expected(16 * MIB) == pytest.approx(1.0)
