"""Spans of an instance reach a real collector, and its failures delay nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import opentelemetry.exporter.otlp.proto.grpc.trace_exporter

# Imported early: the thread that exports would import these, and keep the GIL from the event loop.
import opentelemetry.exporter.otlp.proto.http.trace_exporter
import opentelemetry.sdk.trace.export  # noqa: F401
import pytest

from kvtier import Settings
from kvtier.errors import SettingsError
from kvtier.instance import Instance
from kvtier.observability.traces import export
from kvtier.observability.traces.spans import MAX_QUEUED, Sampling, Span, Tracer, current, following
from kvtier.plugins import Plugins
from kvtier.testing.servers import free_port
from tests.rigs.collector import Collector
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

PLUGINS = Plugins.load([])
TOKENS, TOKEN_BYTES, CHUNK = list(range(5_000_000, 5_000_512)), 512, 64
SECRET_SALT = "the-salt-of-a-tenant"
TRACE = Sampling.of({}).trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    collector = Collector(tmp_path_factory.mktemp("collector")).start()
    yield collector
    collector.kill()


@pytest.fixture
def collector(running: Collector, monkeypatch: pytest.MonkeyPatch) -> Collector:
    """A running collector that has received nothing, to which this process exports."""
    if running.pid is None:
        running.start()
    running.file.write_text("")
    use(monkeypatch, running)
    return running


def use(monkeypatch: pytest.MonkeyPatch, collector: Collector, protocol: str = "grpc") -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in collector.environment(protocol).items():
        monkeypatch.setenv(name, value)


def settings(folder: Path, **more: Any) -> Settings:
    disk = {"name": "ssd", "type": "disk", "path": str(folder / "ssd"), "capacity": "16MiB"}
    tiers = [{"name": "ram", "type": "cpu", "capacity": "4MiB"}, disk]
    return Settings(**{"traces": True, "tiers": tiers, "chunk_tokens": CHUNK, **more})


async def store_and_read(instance: Instance) -> None:
    """Store a prompt, and read it from the disk in a trace."""
    model = instance.cache.model("llama", token_bytes=TOKEN_BYTES, salt=SECRET_SALT)
    rows = bytearray(len(TOKENS) * TOKEN_BYTES)
    assert await model.store(TOKENS, rows) == len(TOKENS)
    assert await instance.cache.drain(60)
    instance.cache.memory.drop(model.keys(TOKENS))
    with following(TRACE):
        assert await model.retrieve(TOKENS, rows) == len(TOKENS)


@pytest.mark.parametrize("protocol", export.PACKAGES)
async def test_tier_io_reaches_the_collector(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: str
) -> None:
    use(monkeypatch, collector, protocol)
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        await store_and_read(instance)
    spans = collector.spans
    reads = [span for span in spans if span.name == "kvtier.tier.read"]
    writes = [span for span in spans if span.name == "kvtier.tier.write"]
    for found in (reads, writes):
        assert sum(int(span.attributes["kvtier.chunks"]) for span in found) == len(TOKENS) // CHUNK
        assert {span.attributes["kvtier.tier"] for span in found} == {"ssd"}
        assert {(span.service, span.error) for span in found} == {("kvtier", "")}
        assert all(int(span.attributes["kvtier.bytes"]) > 0 and span.end > span.start for span in found)
    # What a request waits for is in its trace; what goes on in the background is in one of its own.
    assert {(span.trace, span.parent) for span in reads} == {(TRACE[:16].hex(), TRACE[16:].hex())}
    assert {span.parent for span in writes} == {""}
    assert len({span.trace for span in writes} | {TRACE[:16].hex()}) == len(writes) + 1
    assert instance.tracer.status() == {"exported": len(spans), "failed": 0, "dropped": 0}


async def test_the_service_has_the_name_that_the_environment_sets(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-cache")
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        await store_and_read(instance)
    assert {span.service for span in collector.spans} == {"llm-cache"}


async def test_nothing_secret_is_exported(collector: Collector, tmp_path: Path) -> None:
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        await store_and_read(instance)
        keys = instance.cache.model("llama", token_bytes=TOKEN_BYTES, salt=SECRET_SALT).keys(TOKENS)
    exported = collector.file.read_text()
    assert "kvtier.tier.read" in exported
    for secret in (SECRET_SALT, *map(str, TOKENS[:3]), *(key.hex() for key in keys), "llama"):
        assert secret not in exported


async def test_a_failed_read_is_an_error(collector: Collector, tmp_path: Path) -> None:
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        model = instance.cache.model("llama", token_bytes=TOKEN_BYTES)
        rows = bytearray(len(TOKENS) * TOKEN_BYTES)
        await model.store(TOKENS, rows)
        assert await instance.cache.drain(60)
        instance.cache.memory.drop(model.keys(TOKENS))
        for path in (tmp_path / "ssd").rglob("*"):
            if path.is_file() and path.stat().st_size > CHUNK * TOKEN_BYTES:
                path.write_bytes(b"\0" * path.stat().st_size)
        with following(TRACE):
            assert await model.retrieve(TOKENS, rows) == 0
    reads = collector.named("kvtier.tier.read")
    assert sum(int(span.attributes["kvtier.missed_chunks"]) for span in reads) > 0


async def test_a_collector_that_is_down_loses_spans_and_nothing_else(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        await store_and_read(instance)
        await until(lambda: instance.tracer.failed)
        await until(lambda: "spans are lost so far" in caplog.text)
    assert instance.tracer.exported == 0
    assert not collector.spans
    [message] = [record.getMessage() for record in caplog.records if "lost so far" in record.getMessage()]
    assert "UNAVAILABLE" in message or "refused" in message
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_wrong_path_is_named(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, collector, "http/protobuf")
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{collector.ports['http/protobuf']}/no"
    )
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        await store_and_read(instance)
        await until(lambda: "lost so far" in caplog.text)
    assert "404" in caplog.text
    assert instance.tracer.failed > 0


async def test_a_stopped_collector_delays_nothing_and_the_queue_is_bounded(
    collector: Collector, tmp_path: Path
) -> None:
    collector.pause()
    try:
        async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
            await store_and_read(instance)
            for _ in range(3):
                for _ in range(MAX_QUEUED):
                    instance.tracer.record("kvtier.test", TRACE, time.monotonic())
                await anyio.lowlevel.checkpoint()
            assert len(instance.tracer.queue) <= MAX_QUEUED
            assert instance.tracer.dropped >= MAX_QUEUED
        # Closing has not waited for the collector, which answers nothing: what is queued is lost.
    finally:
        collector.resume()


async def test_a_collector_that_is_killed_is_used_again_when_it_is_back(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:

        async def record_until(condition: str) -> None:
            with anyio.fail_after(60):
                before = getattr(instance.tracer, condition)
                while getattr(instance.tracer, condition) == before:
                    instance.tracer.record("kvtier.test", TRACE, time.monotonic())
                    await anyio.sleep(0.1)

        await record_until("exported")
        await anyio.to_thread.run_sync(collector.kill)
        await record_until("failed")
        await anyio.to_thread.run_sync(collector.start)
        await record_until("exported")


async def test_a_malformed_span_of_an_engine_fails_alone_with_its_batch(
    collector: Collector, tmp_path: Path
) -> None:
    async with Instance.open(settings(tmp_path), plugins=PLUGINS) as instance:
        instance.tracer.add([Span("x", b"\1" * 99, b"\2" * 99, -1, -1, {}, "")])
        await until(lambda: instance.tracer.failed)
        instance.tracer.record("kvtier.test", TRACE, time.monotonic())
        await until(lambda: instance.tracer.exported)
    assert [span.name for span in collector.spans] == ["kvtier.test"]


def test_an_unknown_protocol_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")

    async def start() -> None:
        async with export.exporting(True, "kvtier", "test"):
            pass

    with pytest.raises(SettingsError, match="use grpc or http/protobuf"):
        anyio.run(start)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HEADERS", "authorization: Bearer a-key-that-is-secret", "HEADERS is not NAME=VALUE"),
        ("TRACES_HEADERS", "a-key-that-is-secret", "HEADERS is not NAME=VALUE"),
        ("TIMEOUT", "soon", "could not convert string to float: 'soon'"),
    ],
)
def test_a_wrong_variable_is_an_error_that_does_not_show_a_key(
    variable: str,
    value: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", value)

    async def start() -> None:
        async with export.exporting(True, "kvtier", "test"):
            pass

    with pytest.raises(SettingsError, match=expected) as raised:
        anyio.run(start)
    assert "secret" not in str(raised.value) + caplog.text


def test_a_missing_package_is_one_error_that_names_what_to_install(tmp_path: Path) -> None:
    shadow = tmp_path / "path" / "opentelemetry"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(shadow.parent), "KVTIER_TRACES": "true"}
    environment["KVTIER_SOCKET"] = str(tmp_path / "socket")
    command = [sys.executable, "-m", "kvtier", "serve"]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 1
    assert result.stderr.count("pip install 'kvtier[otel]'") == 1
    assert "Traceback" not in result.stderr


OFF = """
import sys, threading, anyio
from kvtier import Settings
from kvtier.instance import Instance

async def run() -> None:
    async with Instance.open(Settings(tiers=[{"name": "ram", "type": "cpu", "capacity": "4MiB"}])):
        assert not [name for name in sys.modules if name.startswith(("opentelemetry", "grpc"))]
        assert "kvtier traces" not in [thread.name for thread in threading.enumerate()]

anyio.run(run)
"""


def test_nothing_is_imported_or_started_if_traces_are_off() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True, timeout=240)


async def test_tasks_inherit_the_trace() -> None:
    seen = []

    async def task() -> None:
        seen.append(current.get())

    async with anyio.create_task_group() as tasks:
        with following(TRACE):
            tasks.start_soon(task)
    assert seen == [TRACE]
    assert Tracer().trace() == b""
