"""Keys of a simulation are as good as the digests of a cache: policies take parts of them as hashes."""

from __future__ import annotations

import pytest

from kvtier import native
from kvtier.catalog.sampling import POLICY_SAMPLE, SAMPLED
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.memory.keys import KEY_BYTES

NUMBERS = range(1 << 14)


def test_keys_are_distinct_and_the_same_each_time() -> None:
    keys = chunk_keys(NUMBERS)
    assert len(set(keys)) == len(NUMBERS)
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert chunk_keys(NUMBERS[5:9]) == keys[5:9]
    assert chunk_keys([]) == []


def test_keys_are_the_same_without_the_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chunk_keys(NUMBERS[:99])
    monkeypatch.setattr(native, "available", lambda: False)
    assert chunk_keys(NUMBERS[:99]) == keys


def test_each_part_that_serves_as_a_hash_varies() -> None:
    """Ghosts take the lower and the upper half of 64 bits: nearly all of them are different."""
    keys = chunk_keys(NUMBERS)
    for start, stop, distinct in ((0, 1, 256), (0, 4, len(NUMBERS) - 5), (4, 8, len(NUMBERS) - 5)):
        assert len({key[start:stop] for key in keys}) >= distinct


def test_samples_have_their_part_of_consecutive_chunks() -> None:
    """A prompt's chunks are numbered one after the other: none must be sampled whole, or not at all."""
    chosen = POLICY_SAMPLE.of(chunk_keys(NUMBERS), SAMPLED // 4)
    for start in range(0, len(NUMBERS), 512):
        assert 70 < sum(chosen[start : start + 512]) < 190
