"""Warnings of the cache process are forwarded to the engine's log, bounded and without recursion."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import yaml

from kvtier.bridge import notices
from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.notices import MAX_CHARACTERS, MAX_NOTICES, Notices
from kvtier.bridge.protocol import Notice
from tests.rigs.bridges import KEYS, Start, hello, store
from tests.rigs.scripted_engine import open_host
from tests.rigs.scripted_server import connected
from tests.rigs.waiting import until, wait_until

logger = logging.getLogger("kvtier.test_notices")


@asynccontextmanager
async def forwarded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    monkeypatch.setattr(notices, "INTERVAL_SECONDS", 0.01)
    sent: list[str] = []

    async def send(texts: list[str]) -> None:
        sent.extend(texts)

    forwarder = Notices()
    with forwarder.listening(logger):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(forwarder.forward, send)
            await anyio.wait_all_tasks_blocked()
            yield sent
            tasks.cancel_scope.cancel()
    assert logger.handlers == []


@pytest.mark.anyio
async def test_only_warnings_and_errors_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with forwarded(monkeypatch) as sent:
        logger.info("connected")
        logger.warning("tier %s: deadline of %d s exceeded", "ssd", 5)
        try:
            logger.handlers[9]
        except IndexError:
            logger.exception("it failed\nand this is why")
        await until(lambda: len(sent) == 2)
        assert sent == ["tier ssd: deadline of 5 s exceeded", "it failed"]


@pytest.mark.anyio
async def test_excess_notices_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with forwarded(monkeypatch) as sent:
        for number in range(MAX_NOTICES + 30):
            logger.warning("%d%s", number, "x" * 10_000)
        await until(lambda: sent)
        assert len(sent) == MAX_NOTICES + 1
        assert all(len(text) <= MAX_CHARACTERS for text in sent)
        assert sent[-1] == "30 further warnings are in the cache process's log"
        logger.warning("later")
        await until(lambda: sent[-1] == "later")


@pytest.mark.anyio
async def test_warning_of_a_thread_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with forwarded(monkeypatch) as sent:
        asyncio.get_running_loop().set_debug(True)  # What is not thread-safe fails then, and wakes nobody.
        thread = threading.Thread(target=logger.warning, args=("from a thread",))
        thread.start()
        await until(lambda: sent)
        thread.join()
        assert sent == ["from a thread"]


@pytest.mark.anyio
async def test_only_schedulers_are_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "INTERVAL_SECONDS", 0.01)
    async with (
        open_host(tmp_path) as host,
        host.peer("scheduler") as scheduler,
        host.peer("worker") as worker,
    ):
        with host.server.notices.listening(logger):
            await anyio.wait_all_tasks_blocked()
            logger.warning("tier ssd: circuit breaker open for 1 s")
            assert await scheduler.receive() == Notice("tier ssd: circuit breaker open for 1 s")
            assert await worker.status(), "its next message is this answer"


def test_engine_logs_notice(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    bridge = SchedulerBridge(hello("scheduler"), path, logger=logging.getLogger("vllm.kvtier"))
    with connected(path, bridge) as cache:
        cache.send(Notice("tier ssd: " + "x" * 10_000))
        wait_until(lambda: (bridge.poll(), caplog.records)[1])
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("vllm.kvtier", "WARNING")
    assert record.getMessage().startswith("cache process: tier ssd: xxx")
    assert len(record.getMessage()) < MAX_CHARACTERS + 20


def test_slow_tier_is_named_in_both_logs(
    tmp_path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["tiers"][1]["deadline"] = "1us"
    file.write_text(yaml.safe_dump(config))
    process = start()
    with caplog.at_level(logging.WARNING, "vllm.kvtier"):
        scheduler, _ = store(tmp_path / "socket", KEYS)

        def notified() -> bool:
            scheduler.poll()
            return "tier ssd: deadline of 1us exceeded writing" in caplog.text

        wait_until(notified, 60)
    process.terminate()
    process.wait(60)
    assert process.stderr is not None
    assert "tier ssd: deadline of 1us exceeded writing" in process.stderr.read()
