"""What reading costs, from what reads have cost: by a clock that the test sets."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.costs import HALF_LIFE_SECONDS, LEAST_SUCCESS, ReadCost

MIB = 1 << 20


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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


def test_nothing_is_known_before_the_first_read(reading: ReadCost) -> None:
    assert reading.expected(MIB) is None
    reading.failed()
    assert reading.expected(MIB) is None, "that it failed does not tell how long it takes"
    reading.succeeded(0, 0.001)
    assert reading.expected(MIB) is None, "nor does a batch that brought nothing"


def test_reads_of_one_length_tell_seconds_a_byte(reading: ReadCost) -> None:
    for _ in range(5):
        reading.succeeded(8 * MIB, 0.04)
    assert cost(reading, 8 * MIB) == pytest.approx(0.04)
    assert cost(reading, 2 * MIB) == pytest.approx(0.01)


def test_what_is_known_is_told(reading: ReadCost) -> None:
    nothing = {"latency_seconds": None, "seconds_a_mib": None, "failed_share": None}
    assert reading.status() == nothing
    for length in (1, 40, 3, 17, 64, 8):
        reading.succeeded(length * MIB, 0.02 + 0.001 * length)
    assert reading.status() == pytest.approx(
        {"latency_seconds": 0.02, "seconds_a_mib": 0.001, "failed_share": 0.0}
    )
    reading.failed()
    assert 0 < float(str(reading.status()["failed_share"])) < 0.5


def test_reads_of_many_lengths_tell_the_latency_too(reading: ReadCost) -> None:
    for length in (1, 40, 3, 17, 64, 8):
        reading.succeeded(length * MIB, 0.02 + 0.001 * length)
    assert cost(reading, 100 * MIB) == pytest.approx(0.12)
    assert cost(reading, 0) == pytest.approx(0.02)


def test_long_reads_that_were_quicker_do_not_make_bytes_pay(reading: ReadCost) -> None:
    reading.succeeded(1 * MIB, 0.03)
    reading.succeeded(64 * MIB, 0.01)
    assert 0.01 <= cost(reading, 0) <= 0.03
    assert cost(reading, 1000 * MIB) == cost(reading, 0)


def test_the_newest_weighs_most(reading: ReadCost) -> None:
    for _ in range(20):
        reading.succeeded(MIB, 0.001)
    for _ in range(10):
        reading.succeeded(MIB, 0.1)
    assert cost(reading, MIB) == pytest.approx(0.1, rel=0.1)


def test_failures_make_it_dearer_and_successes_cheap_again(reading: ReadCost) -> None:
    reading.succeeded(MIB, 0.01)
    costs = [cost(reading, MIB)]
    for _ in range(2):
        reading.failed()
        costs.append(cost(reading, MIB))
    assert costs[0] < costs[1] < costs[2]
    assert costs[2] > 1.5 * costs[0], "two in a row are enough to prefer an equal"
    for _ in range(20):
        reading.succeeded(MIB, 0.01)
    assert cost(reading, MIB) == pytest.approx(0.01, rel=0.02)


def test_failures_without_end_cost_no_more_than_a_bound(reading: ReadCost) -> None:
    reading.succeeded(MIB, 0.01)
    for _ in range(1000):
        reading.failed()
        seconds = reading.expected(MIB)
        assert seconds is None or seconds <= 0.01 / LEAST_SUCCESS + 1e-9


@pytest.mark.parametrize(("reads", "half_lives"), [(1, 3.1), (50, 5.1)])
def test_what_is_known_is_forgotten_over_minutes(
    reading: ReadCost, clock: Clock, reads: int, half_lives: float
) -> None:
    for _ in range(reads):
        reading.succeeded(MIB, 10.0)
    clock.now += HALF_LIFE_SECONDS * (half_lives - 0.5)
    assert cost(reading, MIB) == pytest.approx(10.0), "it fades in weight, not in value"
    clock.now += HALF_LIFE_SECONDS * 0.5
    assert reading.expected(MIB) is None
    reading.succeeded(MIB, 0.01)
    assert cost(reading, MIB) < 2.0, "what was is next to nothing against the new"
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
# Of numbers as small as that rounding takes more than there is.
@example([(24, 2.2250738585072014e-308, 0.0, False, 0)])
def test_no_history_makes_nonsense(history: list[tuple[int, float, float, bool, int]]) -> None:
    clock = Clock()
    reading = ReadCost(clock)
    for length, seconds, pause, failed, asked in history:
        clock.now += pause
        if failed:
            reading.failed()
        else:
            reading.succeeded(length, seconds)
        expected = reading.expected(asked)
        assert expected is None or 0 <= expected < float("inf")
        if expected is not None and asked:
            assert reading.expected(2 * asked) >= expected * 0.999999  # type: ignore[operator]


def test_noise_does_not_hide_a_tenfold_difference(reading: ReadCost, clock: Clock) -> None:
    noise, other = random.Random(0), ReadCost(clock)
    for _ in range(200):
        length = noise.randint(1, 64) * MIB
        reading.succeeded(length, (0.001 + length / 1e9) * noise.uniform(0.5, 1.5))
        other.succeeded(length, (0.001 + length / 1e10) * noise.uniform(0.5, 1.5))
        assert cost(other, 64 * MIB) < cost(reading, 64 * MIB)
