"""The log thread of the connector."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from logging import Handler, Logger, LogRecord

import pytest

from kvtier.integrations.vllm import logs
from kvtier.integrations.vllm.logs import INTERVAL_SECONDS, LogThread, StoreLog
from tests.rigs.waiting import wait_until


class SlowDisk(Handler):
    """A handler that blocks until an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: LogRecord) -> None:
        self.may_write.wait()
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def logger(disk: SlowDisk) -> Iterator[Logger]:
    parent = logging.getLogger("engine")
    parent.setLevel(logging.INFO)
    parent.addHandler(disk)
    child = parent.getChild("kvtier")
    yield child
    disk.may_write.set()
    child.handlers.clear()
    child.propagate = True
    parent.handlers.clear()


def test_logging_does_not_wait_for_the_disk(logger: Logger, disk: SlowDisk) -> None:
    thread = LogThread.of(logger)
    logger.info("%d tokens hit", 5)
    logger.debug("not logged")
    logger.warning("late")
    assert disk.lines == []
    disk.may_write.set()
    thread.flush()
    assert disk.lines == ["INFO 5 tokens hit", "WARNING late"]


def test_connectors_of_a_process_share_one_thread(logger: Logger, disk: SlowDisk) -> None:
    assert LogThread.of(logger) is LogThread.of(logger)
    disk.may_write.set()
    logger.info("once")
    LogThread.of(logger).flush()
    assert disk.lines == ["INFO once"]


def test_hanging_disk_drops_lines_and_flush_times_out(
    logger: Logger, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_RECORDS", 10)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.2)
    thread = LogThread.of(logger)
    for number in range(100):
        logger.info("%d", number)
    start = time.monotonic()
    thread.flush()
    assert time.monotonic() - start >= 0.2
    disk.may_write.set()
    wait_until(lambda: len(disk.lines) >= 10)
    thread.flush()
    assert 10 <= len(disk.lines) <= 11
    assert disk.lines[0] == "INFO 0"


def test_forked_child_writes_directly(logger: Logger, disk: SlowDisk) -> None:
    LogThread.of(logger)
    disk.may_write.set()
    child = os.fork()
    if child == 0:
        logger.info("from the child")
        os._exit(0 if disk.lines == ["INFO from the child"] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def store_log(caplog: pytest.LogCaptureFixture) -> StoreLog:
    caplog.set_level(logging.INFO)
    return StoreLog(logging.getLogger("kvtier"))


def test_steps_of_a_second_share_a_line(
    store_log: StoreLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    store_log.add(["a"], 256, 10**9, 0.25)
    store_log.add(["a", "b"], 512, 10**9, 0.25)
    assert caplog.messages == []
    clock[0] += INTERVAL_SECONDS
    store_log.add(["b"], 256, 10**9, 0.5)
    assert caplog.messages == ["stored 1024 tokens for 2 requests in 1000.0 ms (3.0 GB/s)"]
    store_log.add(["c"], 256, 10**9, 0.5)
    assert len(caplog.messages) == 1, "the next second has begun"


def test_line_is_written_on_request(store_log: StoreLog, caplog: pytest.LogCaptureFixture) -> None:
    store_log.write()
    store_log.add(["a"], 256, 10**9, 0.5)
    store_log.write()
    store_log.write()
    assert caplog.messages == ["stored 256 tokens for request a in 500.0 ms (2.0 GB/s)"]
