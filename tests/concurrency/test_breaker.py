from __future__ import annotations

import itertools

from kvtier.concurrency.breaker import Backoff, Breaker
from tests.rigs.clock import Clock


def test_opens_after_consecutive_failures_and_for_longer_each_time() -> None:
    clock = Clock()
    breaker = Breaker(3, Backoff(), clock)
    breaker.record_failure("one thing")
    breaker.record_success("one thing")
    pauses = []
    for _ in range(4):
        opened = [breaker.record_failure("one thing") for _ in range(3)]
        assert opened.count(True) == 1
        assert breaker.reason == "one thing"
        start = clock.now
        while not breaker.probe_is_due:
            clock.now += 0.01
        pauses.append(clock.now - start)
        breaker.close()
        assert breaker.reason is None
    assert all(later > 1.2 * earlier for earlier, later in itertools.pairwise(pauses))
    breaker.record_success("one thing")
    assert not breaker.record_failure("one thing")


def test_failures_of_different_kinds_do_not_add_up() -> None:
    breaker = Breaker(2, Backoff())
    assert not breaker.record_failure("one thing")
    assert not breaker.record_failure("another thing")
    assert breaker.record_failure("one thing")
    assert breaker.failures["another thing"] == 1


def test_a_failed_probe_keeps_it_open_for_longer() -> None:
    clock = Clock()
    breaker = Breaker(1, Backoff(1.0, 10.0, jitter=0.0), clock)
    assert breaker.record_failure("one thing")
    clock.now += 1.0
    assert breaker.probe_is_due
    breaker.open("one thing")
    clock.now += 1.9
    assert not breaker.probe_is_due
    clock.now += 0.2
    assert breaker.probe_is_due


def test_delay_grows_to_a_limit_until_reset() -> None:
    backoff = Backoff(0.2, 10.0)
    seconds = [backoff.next() for _ in range(8)]
    limits = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert all(0.75 * limit <= value <= limit for value, limit in zip(seconds, limits, strict=True))
    backoff.reset()
    assert backoff.next() <= 0.2
