"""Where prompts part: what is kept of many places, and the same of a recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.lab.simulation.breakers import breakers_of
from kvtier.lab.simulation.trace import Trace
from kvtier.memory.keys import ChunkKey
from kvtier.observability.breakers import MAX_PLACES, MIN_PARTED, Breakers, merged
from kvtier.observability.recording.reader import TraceRequest

CHUNK = 16
DAY = 86_400.0


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_the_most_frequent_places_stay() -> None:
    now, times = 0.0, 0
    breakers = Breakers(lambda: now)
    for number in range(20 * MAX_PLACES):
        now += 1
        breakers.parted(key(number), 16, 100, 0.0)
        if number % 50 == 0:
            times += 1
            breakers.parted(key(0xFFFFFF), 32, 1000, 0.5)
    now = DAY
    [(found, _)] = breakers.report()
    assert (found.position, found.parted) == (32, times)
    assert found.tokens_per_day == pytest.approx(1000 * times, rel=0.01)


def test_a_place_that_two_have_seen_is_one() -> None:
    one, two = Breakers(), Breakers()
    for _ in range(MIN_PARTED):
        one.parted(key(1), 16, 100, 1.0, again=True)
        two.parted(key(1), 16, 100, 1.0)
        two.parted(key(2), 16, 10, 0.0)
    found = merged([breaker for each in (one, two) for breaker, _ in each.report()], 5)
    assert [(each.parted, each.again) for each in found] == [(6, 3), (3, 0)]
    assert found[0].tokens_per_day == 24 * 600


def trace(*prompts: list[int], tail: int = 0) -> Trace:
    """Return a trace of these prompts, given by the numbers of their chunks, one a minute."""
    requests = [
        TraceRequest(60.0 * number, chunks, CHUNK * len(chunks) - tail)
        for number, chunks in enumerate(prompts)
    ]
    return Trace.load("test", requests, CHUNK)


def test_prompts_of_a_recording_that_part_after_a_common_beginning() -> None:
    dated = [[1, 2, 100 + day, 200 + day] for day in range(5)]
    [found] = breakers_of(trace(*dated, [1, 2, 100, 200]), tokens_per_second=16.0)
    assert (found.position, found.parted, found.passed, found.again) == (2 * CHUNK, 4, 5, 0)
    assert found.tokens_per_day == 24 * 4 * 2 * CHUNK
    assert found.seconds_per_day == found.tokens_per_day / 16.0


def test_conversations_that_grow_do_not_part() -> None:
    growing = [list(range(count)) for count in range(2, 9)]
    assert breakers_of(trace(*growing)) == []


def test_a_chunk_that_is_not_whole_may_be_the_beginning_of_another() -> None:
    assert breakers_of(trace(*([1, 2, last] for last in range(10, 20)), tail=4)) == []


def test_a_trace_of_another_cache_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    row = '{"timestamp": %d, "input_length": 1536, "output_length": 1, "hash_ids": [1, %d, %d]}\n'
    file.write_text("".join(row % (1000 * at, 2 + at, 100 + at) for at in range(5)))
    [found] = breakers_of(Trace.read(file, 512))
    assert (found.position, found.parted, found.seconds_per_day) == (512, 4, 0.0)
