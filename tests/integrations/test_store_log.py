"""What a worker stores is logged once a second."""

from __future__ import annotations

import logging
import time

import pytest

from kvtier.integrations.vllm.store_log import INTERVAL_SECONDS, StoreLog


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> StoreLog:
    caplog.set_level(logging.INFO)
    return StoreLog(logging.getLogger("kvtier"))


def test_steps_of_a_second_share_a_line(
    log: StoreLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log.add(["a"], 256, 10**9, 0.25)
    log.add(["a", "b"], 512, 10**9, 0.25)
    assert caplog.messages == []
    clock[0] += INTERVAL_SECONDS
    log.add(["b"], 256, 10**9, 0.5)
    assert caplog.messages == ["stored 1024 tokens for 2 requests in 1000.0 ms (3.0 GB/s)"]
    log.add(["c"], 256, 10**9, 0.5)
    assert len(caplog.messages) == 1, "the next second has begun"


def test_line_is_written_on_request(log: StoreLog, caplog: pytest.LogCaptureFixture) -> None:
    log.write()
    log.add(["a"], 256, 10**9, 0.5)
    log.write()
    log.write()
    assert caplog.messages == ["stored 256 tokens for request a in 500.0 ms (2.0 GB/s)"]
