"""The thread that writes the connector's log."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from logging import Handler, Logger, LogRecord

import pytest

from kvtier.integrations.vllm import log_thread
from kvtier.integrations.vllm.log_thread import LogThread
from tests.bridge.conftest import wait_until


class SlowDisk(Handler):
    """Takes no line before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.lines: list[str] = []

    def emit(self, record: LogRecord) -> None:
        self.may.wait()
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
    disk.may.set()
    child.handlers.clear()
    child.propagate = True
    parent.handlers.clear()


def test_who_logs_does_not_wait_for_the_disk(logger: Logger, disk: SlowDisk) -> None:
    thread = LogThread.of(logger)
    logger.info("%d tokens hit", 5)
    logger.debug("not wanted")
    logger.warning("late")
    assert disk.lines == []
    disk.may.set()
    thread.flush()
    assert disk.lines == ["INFO 5 tokens hit", "WARNING late"]


def test_there_is_one_for_all_connectors_of_a_process(logger: Logger, disk: SlowDisk) -> None:
    assert LogThread.of(logger) is LogThread.of(logger)
    disk.may.set()
    logger.info("once")
    LogThread.of(logger).flush()
    assert disk.lines == ["INFO once"]


def test_a_disk_that_hangs_costs_lines_and_a_second_at_the_end(
    logger: Logger, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_thread, "MAX_RECORDS", 10)
    monkeypatch.setattr(log_thread, "FLUSH_SECONDS", 0.2)
    thread = LogThread.of(logger)
    for number in range(100):
        logger.info("%d", number)
    started = time.monotonic()
    thread.flush()
    assert time.monotonic() - started >= 0.2
    disk.may.set()
    wait_until(lambda: not thread._records.unfinished_tasks)
    assert 10 <= len(disk.lines) <= 11
    assert disk.lines[0] == "INFO 0"


def test_the_child_of_a_fork_writes_itself(logger: Logger, disk: SlowDisk) -> None:
    LogThread.of(logger)
    disk.may.set()
    child = os.fork()
    if child == 0:
        logger.info("from the child")
        os._exit(0 if disk.lines == ["INFO from the child"] else 1)
    assert os.waitpid(child, 0)[1] == 0
