from __future__ import annotations

import logging

import pytest

from kvtier.rpc.client import UNRESPONSIVE_SECONDS, Health
from tests.rigs.clock import Clock

logger = logging.getLogger("kvtier.test_health")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    health = Health(logger, "the server", clock)
    health.reset()
    return health


def test_missed_reply_makes_it_late_until_any_message(health: Health) -> None:
    health.request_sent(first=True)
    assert not health.late
    health.late = True
    assert (health.late, health.unresponsive) == (True, False)
    health.message_received()
    assert not health.late


def test_idle_server_is_responsive(health: Health, clock: Clock) -> None:
    clock.now += 100 * UNRESPONSIVE_SECONDS
    health.check([])
    assert not health.unresponsive


def test_time_counts_from_the_first_outstanding_request(health: Health, clock: Clock) -> None:
    clock.now += 100 * UNRESPONSIVE_SECONDS
    health.request_sent(first=True)
    clock.now += 0.6 * UNRESPONSIVE_SECONDS
    health.request_sent(first=False)
    health.check(["lookups", "lookups"])
    assert not health.unresponsive
    clock.now += 0.6 * UNRESPONSIVE_SECONDS
    health.check(["lookups", "lookups"])
    assert health.unresponsive


def test_any_message_postpones(health: Health, clock: Clock) -> None:
    health.request_sent(first=True)
    for _ in range(10):
        clock.now += 0.6 * UNRESPONSIVE_SECONDS
        health.message_received()
        health.check(["lookups"])
    assert not health.unresponsive


def test_unresponsive_is_logged_once_with_what_is_outstanding(
    health: Health, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    health.request_sent(first=True)
    clock.now += 2 * UNRESPONSIVE_SECONDS
    health.check(["lookups", "pings", "lookups"])
    clock.now += UNRESPONSIVE_SECONDS
    health.check(["lookups", "pings", "lookups"])
    assert (health.late, health.unresponsive) == (True, True)
    (warning,) = caplog.messages
    assert warning.startswith("the server has not answered for 2.00 s (open: 2 lookups, 1 pings)")
    health.message_received()
    assert (health.late, health.unresponsive) == (False, False)
    assert caplog.messages[1:] == ["the server answers again, after 3.0 s"]
    health.message_received()
    assert len(caplog.messages) == 2


def test_limit_can_be_set(health: Health, clock: Clock) -> None:
    health.limit = 10.0
    health.request_sent(first=True)
    clock.now += 9.0
    health.check(["lookups"])
    assert not health.unresponsive
    clock.now += 2.0
    health.check(["lookups"])
    assert health.unresponsive
