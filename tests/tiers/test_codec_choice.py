"""``codec: auto`` encodes while that makes reads faster, or while the tier is full; all times are given."""

from __future__ import annotations

import pytest

from kvtier.tiers.codec_choice import TRIAL_SECONDS, TRIALS, CodecChoice
from tests.rigs.clock import Clock

GB = 1e9
BATCH = 10_000_000


class Chosen:
    """A choice whose medium and codec have given speeds, in GB/s."""

    def __init__(self, *, ratio: float = 0.7, decoding: float = 4.0) -> None:
        self.clock, self.full = Clock(), False
        self.ratio, self.decoding = ratio, decoding
        self.choice = CodecChoice(lambda: self.full, 0.05, clock=self.clock)

    def measure(self, *, reads: float | None = None, writes: float | None = None) -> None:
        while self.choice.needs_trial:
            self.choice.tried(BATCH, round(self.ratio * BATCH), BATCH / self.decoding / GB)
        for throughput, speed in ((self.choice.reads, reads), (self.choice.writes, writes)):
            for _ in range(8 if speed else 0):
                throughput.begin(BATCH)
                self.clock.now += BATCH / speed / GB
                throughput.end(BATCH, BATCH)


@pytest.mark.parametrize(
    ("reads", "gain"), [(0.125, 1.37), (0.5, 1.21), (1.0, 1.05), (3.0, 0.69)], ids="{}".format
)
def test_gain(reads: float, gain: float) -> None:
    chosen = Chosen()
    chosen.measure(reads=reads)
    assert chosen.choice.gain == pytest.approx(gain, abs=0.01)
    assert chosen.choice.encodes == (gain >= 1)


def test_unknown_media_are_encoded_for_and_measured_by_writes_at_first() -> None:
    chosen = Chosen()
    assert chosen.choice.encodes
    chosen.measure(writes=3.0)
    assert not chosen.choice.encodes
    chosen.measure(reads=0.1)
    assert chosen.choice.encodes, "reads count more"


def test_begins_only_if_it_is_clearly_worthwhile() -> None:
    chosen = Chosen()
    chosen.measure(reads=1.0)
    assert chosen.choice.encodes, "it continues"
    chosen.measure(reads=3.0)
    assert not chosen.choice.encodes
    chosen.measure(reads=1.0)
    assert not chosen.choice.encodes, "a gain of 5 % does not begin it"
    chosen.measure(reads=0.5)
    assert chosen.choice.encodes


def test_full_tier_encodes_unless_reads_take_twice_as_long() -> None:
    chosen = Chosen()
    chosen.full = True
    chosen.measure(reads=3.0)
    assert chosen.choice.encodes
    chosen.measure(reads=20.0)
    assert not chosen.choice.encodes


def test_kv_that_does_not_become_smaller() -> None:
    chosen = Chosen(ratio=0.97)
    chosen.full = True
    chosen.measure(reads=0.01)
    assert not chosen.choice.encodes


def test_codec_is_measured_again_after_a_while() -> None:
    chosen = Chosen(ratio=1.0)
    chosen.measure(reads=0.1)
    assert not chosen.choice.needs_trial
    assert not chosen.choice.encodes
    chosen.clock.now += TRIAL_SECONDS
    chosen.ratio = 0.7
    trials = 0
    while chosen.choice.needs_trial:
        chosen.choice.tried(BATCH, round(0.7 * BATCH), 0.001)
        trials += 1
    assert trials == TRIALS
    chosen.measure(reads=0.1)
    assert chosen.choice.encodes


def test_decision_stays_if_nothing_is_read_for_long() -> None:
    chosen = Chosen()
    chosen.measure(reads=3.0)
    assert not chosen.choice.encodes
    chosen.clock.now += 10 * TRIAL_SECONDS
    assert chosen.choice.gain is None
    assert not chosen.choice.encodes
