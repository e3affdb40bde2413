"""Load or compute: the decision, and what it does to a lookup."""

from __future__ import annotations

import logging
from functools import partial

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.catalog import ALL_TIERS
from kvtier.events import Observer, Report
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.load_or_compute import CLEARLY_EARLIER, MIN_GAIN_SECONDS, Pace, worth_loading
from kvtier.pipeline.query import Query
from kvtier.tiers import batches
from kvtier.tiers.throughput import MIN_SAMPLES
from tests.rigs.clock import Clock
from tests.rigs.faulty_sources import CacheHarness, opened

from .conftest import CHUNK_OBJECT_BYTES, MakeSettings, Prompt, rows

ARRIVALS = st.lists(st.floats(0, 100), max_size=12).map(sorted)
COMPUTE = st.floats(0, 10)


def first_token(arrivals: list[float], compute: float, loaded: int) -> float:
    return (arrivals[loaded - 1] if loaded else 0.0) + compute * (len(arrivals) - loaded)


@given(ARRIVALS, COMPUTE)
def test_first_token_is_as_early_as_with_any_other_number(arrivals: list[float], compute: float) -> None:
    loaded = worth_loading(arrivals, compute)
    chosen = first_token(arrivals, compute, loaded)
    for other in range(len(arrivals) + 1):
        best = first_token(arrivals, compute, other)
        assert chosen <= max(best / CLEARLY_EARLIER, best + MIN_GAIN_SECONDS) + 1e-9


@given(ARRIVALS, COMPUTE)
def test_all_or_nothing(arrivals: list[float], compute: float) -> None:
    loaded = worth_loading(arrivals, compute, whole=True)
    assert loaded in (0, len(arrivals))
    chosen = first_token(arrivals, compute, loaded)
    best = min(first_token(arrivals, compute, number) for number in (0, len(arrivals)))
    assert chosen <= max(best / CLEARLY_EARLIER, best + MIN_GAIN_SECONDS) + 1e-9


@given(ARRIVALS, COMPUTE, st.floats(1, 10))
def test_slower_engine_loads_as_much_or_more(arrivals: list[float], compute: float, factor: float) -> None:
    slower = worth_loading(arrivals, compute * factor)
    assert slower >= worth_loading(arrivals, compute) or slower == len(arrivals)


@given(st.integers(0, 10), ARRIVALS, COMPUTE)
def test_chunks_in_memory_are_always_used(held: int, arrivals: list[float], compute: float) -> None:
    assert worth_loading([0.0] * held + arrivals, compute) >= held


@pytest.mark.parametrize(
    ("arrivals", "compute", "loaded"),
    [
        ([0, 0, 1, 2], 2.0, 4),
        ([0, 0, 5, 10], 2.0, 2),
        ([0, 1, 2, 30], 2.0, 3),
        ([0.5, 1, 1.5, 2], 0.49, 4),
        ([0.01, 0.02], 0.001, 2),
        ([], 1.0, 0),
        ([5, 1], 2.0, 0),
    ],
    ids=[
        "faster disk",
        "slower disk",
        "slow end",
        "hardly slower",
        "too short to matter",
        "nothing",
        "the second arrives first",
    ],
)
def test_examples(arrivals: list[float], compute: float, loaded: int) -> None:
    assert worth_loading(arrivals, compute) == loaded


def set_speed(harness: CacheHarness, tier: str, chunks_per_second: float) -> None:
    """Set the measured throughput of a tier."""
    throughput = harness.cache._reader._throughputs[harness.tier(tier).index]
    for _ in range(MIN_SAMPLES):
        throughput.record(64 * CHUNK_OBJECT_BYTES, 64 / chunks_per_second)


async def half_in_memory(harness: CacheHarness, tokens: list[int]) -> list[ChunkKey]:
    """Store a prompt of eight chunks, of which memory holds the first four and a source all."""
    await harness.fill(tokens, "near")
    keys = harness.model.keys(tokens)
    await harness.cache.prefetch(Query(keys[:4]))
    return keys


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("speed", "compute", "adaptive", "found"),
    [
        (1.0, 0.1, True, 4),
        (1.0, 2.0, True, 8),
        (100.0, 0.1, True, 8),
        (None, 0.1, True, 8),
        (1.0, 0.1, False, 8),
    ],
    ids=["slow source", "slow engine", "fast source", "unknown speed", "switched off"],
)
async def test_lookup_finds_what_is_worth_waiting_for(
    settings: MakeSettings,
    prompt: Prompt,
    caplog: pytest.LogCaptureFixture,
    speed: float | None,
    compute: float,
    adaptive: bool,
    found: int,
) -> None:
    async with opened(settings, "near", prefetch={"deadline": "60s", "adaptive": adaptive}) as harness:
        keys = await half_in_memory(harness, prompt(2048))
        if speed is not None:
            set_speed(harness, "near", speed)
        with caplog.at_level(logging.INFO, "kvtier"):
            lookup = harness.cache.look_up(Query(keys, compute_seconds=compute * len(keys)))
        assert (lookup.count, lookup.in_flight) == (found, found - 4)
        assert harness.cache.counts["computed_instead"] == 8 - found
        assert lookup.expected == 0 or found == 8
        assert ("4 of 8 chunks are computed" in caplog.text) == (found == 4)
        await harness.cache.settle(lookup)
        lookup.release()


@pytest.mark.anyio
async def test_chunks_in_flight_for_another_request_are_late_as_well(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "near", prefetch={"deadline": "60s"}) as harness:
        keys = await half_in_memory(harness, prompt(2048))
        set_speed(harness, "near", 1.0)
        harness.sources["near"].delays.hang()
        patient = harness.cache.look_up(Query(keys))
        assert patient.in_flight == 4
        hasty = harness.cache.look_up(Query(keys, compute_seconds=0.1 * len(keys)))
        assert (hasty.count, hasty.in_flight) == (4, 0)
        patient.release()
        hasty.release()


@pytest.mark.anyio
async def test_state_is_loaded_with_all_chunks_before_it_or_computed(
    settings: MakeSettings, prompt: Prompt
) -> None:
    async with opened(settings, "near", prefetch={"deadline": "60s"}) as harness:
        keys = await half_in_memory(harness, prompt(2048))
        set_speed(harness, "near", 1.0)
        _, sources = harness.cache.catalog.prefix_rows(keys)
        decide = partial(harness.cache.load_or_compute.decide, keys, sources, ALL_TIERS)
        assert decide(0.1, whole=False)[:2] == (4, 0.0)
        assert decide(0.1, whole=True)[:2] == (0, 0.0)
        assert decide(2.0, whole=True)[0] == 8


@pytest.mark.anyio
async def test_what_was_computed_is_in_memory_for_the_next_request(
    settings: MakeSettings, prompt: Prompt
) -> None:
    """Without a read of the slow source: the engine stores what it computed, though that is held below."""
    async with opened(settings, "near", prefetch={"deadline": "60s"}) as harness:
        tokens = prompt(2048)
        keys = await half_in_memory(harness, tokens)
        set_speed(harness, "near", 1.0)
        harness.sources["near"].delays.hang()
        first = harness.cache.look_up(Query(keys, compute_seconds=0.1 * len(keys)))
        assert first.count == 4
        first.release()
        assert await harness.model.store(tokens, rows(tokens)) == len(tokens)
        second = harness.cache.look_up(Query(keys, compute_seconds=0.1 * len(keys)))
        assert (second.ready, second.in_flight) == (8, 0)
        second.release()


@pytest.mark.anyio
async def test_decisions_are_logged_once_a_minute(
    settings: MakeSettings, prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(settings, "near", prefetch={"deadline": "60s"}) as harness:
        keys = await half_in_memory(harness, prompt(2048))
        set_speed(harness, "near", 1.0)
        with caplog.at_level(logging.INFO, "kvtier"):
            for _ in range(100):
                harness.cache.look_up(Query(keys, compute_seconds=0.1 * len(keys))).release()
        assert caplog.text.count("chunks are computed") == 1
        assert harness.cache.counts["computed_instead"] == 400


@pytest.mark.anyio
async def test_wait_is_compared_with_what_was_expected(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", prefetch={"deadline": "60s"}) as harness:
        keys = await half_in_memory(harness, prompt(2048))
        set_speed(harness, "near", 64.0)
        lookup = harness.cache.look_up(Query(keys, compute_seconds=1.0 * len(keys)))
        assert lookup.expected == pytest.approx(4 / 64, rel=0.6)
        await harness.cache.settle(lookup)
        lookup.release()
        deciding = harness.cache.load_or_compute
        assert deciding.expected_seconds == lookup.expected
        assert deciding.actual_seconds > 0


@pytest.mark.anyio
async def test_speed_is_learned_from_reads(settings: MakeSettings, prompt: Prompt) -> None:
    async with opened(settings, "near", prefetch={"deadline": "60s"}) as harness:
        harness.sources["near"].delays.delay = 0.2
        for seed in range(MIN_SAMPLES):
            await half_in_memory(harness, prompt(2048, seed))
        keys = await half_in_memory(harness, prompt(2048, MIN_SAMPLES))
        lookup = harness.cache.look_up(Query(keys, compute_seconds=0.001 * len(keys)))
        assert lookup.count == 4
        lookup.release()


@pytest.mark.anyio
async def test_hanging_source_is_waited_for_as_long_as_computing_takes(
    settings: MakeSettings, prompt: Prompt
) -> None:
    """Even if nothing is known of its speed, and though the deadline is much longer."""
    async with opened(settings, "near", prefetch={"deadline": "600s"}) as harness:
        keys = await half_in_memory(harness, prompt(2048))
        harness.sources["near"].delays.hang()
        lookup = harness.cache.look_up(Query(keys, compute_seconds=0.01 * len(keys)))
        assert lookup.in_flight == 4
        with anyio.fail_after(300):
            await harness.cache.settle(lookup)
        assert lookup.ready == lookup.count == 4
        lookup.release()


def waits(pace: Pace, clock: Clock, seconds: float, total: int) -> int:
    """Return how many chunks arrive, one every ``seconds``, before the others are not worth waiting for."""
    for arrived in range(total):
        if not pace.worth_waiting(arrived, total - arrived):
            return arrived
        clock.now += seconds
    return total


@pytest.mark.parametrize(
    ("seconds", "compute", "arrived"),
    [
        (1.0, 0.4, MIN_SAMPLES),
        (1.0, 1.1, 100),
        (1.0, 0.96, 100),
        (0.0001, 0.00001, 100),
        (0.0, 0.0, 100),
    ],
    ids=["slower than computing", "faster", "hardly slower", "too short to matter", "at once"],
)
def test_pace_decides_after_a_few_arrivals(seconds: float, compute: float, arrived: int) -> None:
    clock = Clock()
    assert waits(Pace(compute, clock), clock, seconds, 100) == arrived


def test_wait_for_the_first_chunk_is_no_pace() -> None:
    """A disk that was asleep is waited for, and then it may be fast."""
    clock = Clock()
    pace = Pace(0.4, clock)
    assert pace.worth_waiting(0, 100)
    clock.now += 60
    assert pace.worth_waiting(1, 99)
    clock.now += 0.1
    assert all(pace.worth_waiting(arrived, 100 - arrived) for arrived in range(2, 100))


def test_chunks_that_were_in_memory_are_no_arrivals() -> None:
    clock = Clock()
    pace = Pace(0.4, clock)
    for arrived in (50, 50, 51, 52):
        assert pace.worth_waiting(arrived, 100 - arrived)
        clock.now += 1.0
    assert not pace.worth_waiting(53, 47)
    assert pace.left_seconds == pytest.approx(47 * 1.0)


class _Reads(Observer):
    """Observes reads, and advances a clock by so many seconds for each chunk."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def observe(self, report: Report) -> None:
        self._clock.now += self._seconds * len(report.keys)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("seconds", "known", "needed", "stops"),
    [(1.0, False, 0, True), (0.01, False, 0, False), (1.0, True, 0, False), (1.0, False, 40, False)],
    ids=["slow source", "fast source", "its speed was known", "useless in part, as with a state"],
)
async def test_lookup_of_unknown_duration_stops_when_it_is_too_slow(
    settings: MakeSettings,
    prompt: Prompt,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    known: bool,
    needed: int,
    stops: bool,
) -> None:
    clock = Clock()
    monkeypatch.setattr(batches, "BATCH_BYTES", CHUNK_OBJECT_BYTES)
    monkeypatch.setattr("kvtier.pipeline.look_up.Pace", partial(Pace, clock=clock))
    async with opened(settings, "near", prefetch={"deadline": "600s"}, ram=64) as harness:
        tokens = prompt(40 * 256)
        await harness.fill(tokens, "near")
        keys = harness.model.keys(tokens)
        harness.cache.add_observer(_Reads(clock, seconds))
        if known:
            set_speed(harness, "near", 1000.0)
        lookup = harness.cache.look_up(Query(keys, compute_seconds=0.1 * len(keys)))
        lookup.needed = needed
        with caplog.at_level(logging.INFO, "kvtier"):
            await harness.cache.settle(lookup)
        missing = len(keys) - lookup.total
        assert lookup.ready == lookup.count
        assert (MIN_SAMPLES <= lookup.total < len(keys)) == stops
        assert (missing > 0) == stops
        assert harness.cache.counts["computed_instead"] == missing
        assert (f"{missing} of 40 chunks are computed" in caplog.text) == stops
        assert "deadline" not in caplog.text
        lookup.release()
