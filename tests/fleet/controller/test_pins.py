"""Pins are persisted until they end."""

from __future__ import annotations

import pytest

from kvtier.fleet.controller.errors import TooManyPins
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.state import FileState
from tests.rigs.clock import Clock
from tests.rigs.running_controller import keys_of

KEYS = keys_of("prompt", 6)


def test_pins_survive_a_restart(state: FileState) -> None:
    clock = Clock()
    pins = Pins(state, clock=clock)
    pins.add("a", KEYS, None, ())
    pins.add("a", KEYS[:2], 60, ())
    pins.add("b", KEYS[:1], 60, ())
    pins.add("b", [], 60, ())
    clock.now += 20
    again = Pins(state, clock=clock)
    assert len(again) == 9
    assert sorted(again.of("a"), key=lambda pin: len(pin[0])) == [(KEYS[:2], 40), (KEYS, None)]
    assert again.of("b") == [(KEYS[:1], 40)]
    assert again.of("c") == []
    clock.now += 41
    assert again.of("a") == [(KEYS, None)]
    assert not again.count("b")
    assert len(again) == 6
    assert len(Pins(state, clock=clock)) == 6


@pytest.mark.parametrize("longer", [20.0, None])
@pytest.mark.parametrize("first", ["shorter", "longer"])
def test_of_two_pins_on_the_same_chunks_the_longer_counts(
    state: FileState, first: str, longer: float | None
) -> None:
    """As on the instance: else it would hold what is not listed."""
    pins = Pins(state, clock=Clock())
    for seconds in (10.0, longer) if first == "shorter" else (longer, 10.0):
        pins.add("a", KEYS, seconds, ())
    for found in (pins, Pins(state, clock=Clock())):
        assert found.of("a") == [(KEYS, longer)]
        assert len(found) == 6


def test_rest_of_a_pin_does_not_replace_another(state: FileState) -> None:
    pins = Pins(state, clock=Clock())
    pins.add("a", KEYS, 10, ())
    pins.add("a", KEYS[:2], None, ())
    pins.drop("a", KEYS[2:])
    for found in (pins, Pins(state, clock=Clock())):
        assert found.of("a") == [(KEYS[:2], None)]
        assert len(found) == 2


def test_count_of_an_instance_does_not_look_at_all_pins(state: FileState) -> None:
    """A list of a thousand instances asks for the count of each, every second."""

    class Now(float):
        compared = 0

        def __ge__(self, other: float) -> bool:
            Now.compared += 1
            return super().__ge__(other)

    pins = Pins(state, clock=lambda: Now(1000.0))
    for number in range(100):
        pins.add(f"instance-{number}", keys_of(str(number), 2), 60, ())
    Now.compared = 0
    assert [pins.count(f"instance-{number}") for number in range(100)] == [2] * 100
    assert Now.compared == 0


def test_unpinned_chunks_are_removed_from_every_pin(state: FileState) -> None:
    pins = Pins(state, clock=Clock())
    pins.add("a", KEYS[:3], None, ())
    pins.add("a", KEYS, None, ())
    pins.add("b", KEYS, None, ())
    assert set(pins.keys("a")) == set(KEYS)
    pins.drop("a", KEYS[:4])
    for loaded in (pins, Pins(state)):
        assert loaded.of("a") == [(KEYS[4:], None)]
        assert loaded.of("b") == [(KEYS, None)]
        assert len(loaded) == 8
    pins.drop("a", KEYS)
    pins.drop("a", KEYS)
    assert not pins.count("a")
    assert pins.keys("a") == []


def test_limit_evicts_the_pins_of_disconnected_instances(state: FileState) -> None:
    clock = Clock()
    pins = Pins(state, max_keys=10, clock=clock)
    pins.add("gone", KEYS[:2], None, ())
    clock.now += 1
    pins.add("gone", KEYS[:4], None, ())
    pins.add("here", KEYS[:3], None, ["here"])
    pins.add("here", KEYS[:2], None, ["here"])
    assert pins.of("gone") == [(KEYS[:4], None)]
    pins.add("here", KEYS[:5], None, ["here"])
    assert not pins.count("gone")
    with pytest.raises(TooManyPins, match="unpin some"):
        pins.add("here", KEYS, None, ["here"])
    with pytest.raises(TooManyPins):
        pins.check(1, ["here"])
