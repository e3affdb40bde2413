"""`kvtier doctor --backend`: on memory, a disk, and pools with every kind of fault."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import anyio
import pytest
import typer
from pydantic import Field

from kvtier import hookimpl
from kvtier.backends.base import Backend, GetItem, Outcome
from kvtier.cli import checks, checks_backend, doctor
from kvtier.cli.checks_backend import without_secrets
from kvtier.cli.options import select
from kvtier.errors import TierError
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.settings.values import Secret
from kvtier.testing.faults import Fault, FaultyBackend
from kvtier.testing.servers import free_port
from tests.plugins.conftest import write_metadata
from tests.rigs.chunks import DictBackend

from .conftest import RAM, Kvtier, Result, held, spawn, store

TIMEOUT_SECONDS = 240
SHORT = "1s"
"""Deadline of tiers that exceed it. Long enough for the steps before, also on a busy machine."""
TIMES = r"written in \S+ \(\S+ [GM]B/s\), read in \S+ \(\S+ [GM]B/s\), looked up in \S+"
DISK = "(?:io_uring|threads), (?:O_DIRECT|through the page cache)"


class PoolSettings(TierSettings):
    fault: Fault | None = None
    password: Secret | None = None
    hangs_in: str = ""
    description: str = "a shelf"
    refusal: str = ""
    warning: str = Field(default="", description="A warning that is logged on open.")


class PoolBackend(FaultyBackend):
    """A shared pool in a dict, with the faults from its settings."""

    settings_type: ClassVar[type[TierSettings]] = PoolSettings

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(CheckedDict(settings))
        self.fault = settings.fault


class CheckedDict(DictBackend):
    opened = 0

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__({})
        self.settings = settings

    async def open(self) -> None:
        CheckedDict.opened += 1
        await self.maybe_hang("open")
        if self.settings.warning:
            checks_backend.logging.getLogger("kvtier").warning(self.settings.warning)

    async def close(self) -> None:
        CheckedDict.opened -= 1

    async def check(self) -> str:
        await self.maybe_hang("check")
        if self.settings.refusal:
            raise TierError(self.settings.refusal)
        return self.settings.description

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        await self.maybe_hang("get")
        return await super().get(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        if self.settings.hangs_in != "never delete":
            await super().delete(keys)

    async def maybe_hang(self, method: str) -> None:
        if self.settings.hangs_in == method:
            await anyio.sleep_forever()


class PoolPlugin:
    @hookimpl
    def kvtier_backends(self) -> dict[str, type[Backend]]:
        return {"shelf": PoolBackend}


class Found(NamedTuple):
    """One row of the table."""

    name: str
    status: str
    found: str
    remedy: str


Doctor = Callable[..., list[Found]]
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _only_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Skip the checks of the machine, register the shelf, and check that every backend is closed."""
    load = Plugins.load

    def with_shelf(*arguments: Any) -> Plugins:
        plugins = load(*arguments)
        plugins.register(PoolPlugin(), "shelf", "the test")
        return plugins

    monkeypatch.setattr(Plugins, "load", with_shelf)
    monkeypatch.setattr(checks, "check_machine", lambda _: [])
    monkeypatch.setattr(CheckedDict, "opened", 0)
    threads = threading.enumerate()
    yield
    assert CheckedDict.opened == 0
    assert checks_backend.join_threads(threads)


@pytest.fixture
def run(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the doctor with these tiers below memory."""

    def run(tiers: Sequence[dict[str, Any]], *arguments: object) -> Result:
        monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, *tiers], default=str))
        return kvtier("doctor", *arguments)

    return run


@pytest.fixture
def examine(run: Run) -> Doctor:
    """Run the doctor on the first of these tiers, or on those that are named, and return its checks."""

    def examine(*tiers: dict[str, Any], names: str = "", status: int = 0, size: str = "4MiB") -> list[Found]:
        result = run(tiers, "--json", "--backend", names or tiers[0]["name"], "--size", size)
        assert result.status == status, result
        report = json.loads(result.output)
        assert report["ok"] is (status == 0)
        return [Found(**check) for check in report["checks"] if check["name"].startswith("backend ")]

    return examine


def disk(path: Path, **options: object) -> dict[str, Any]:
    return {"name": "ssd", "type": "disk", "capacity": "64MiB", "path": str(path), **options}


def shelf(**options: object) -> dict[str, Any]:
    return {"name": "pool", "type": "shelf", **options}


def test_memory_and_disk(examine: Doctor, tmp_path: Path) -> None:
    ram, ssd = examine(disk(tmp_path / "disk"), names="all")
    assert ram[:2] == ("backend ram (cpu)", "ok")
    assert ssd[:2] == ("backend ssd (disk)", "ok")
    assert re.fullmatch(f"4MiB {TIMES}", ram.found)
    assert re.fullmatch(f"{DISK}; 4MiB {TIMES}", ssd.found)
    assert list(tmp_path.iterdir()) == []


def test_chunk_size_option(examine: Doctor, tmp_path: Path) -> None:
    _, ssd, pool = examine(disk(tmp_path / "disk", capacity="1MiB"), shelf(), names="all", size="1100000")
    assert "; 1MiB written" in ssd.found, "at most the capacity of the tier"
    assert "1.05MiB written" in pool.found, "rounded up to whole pages"


def test_tier_of_less_than_two_pages(examine: Doctor, tmp_path: Path) -> None:
    (ssd,) = examine(disk(tmp_path / "disk", capacity="8191"))
    assert "; 4KiB written" in ssd.found


def test_memory_is_allocated_only_for_the_chunk(examine: Doctor) -> None:
    (large,) = examine({"name": "large", "type": "cpu", "capacity": "1000TiB"})
    assert large.status == "ok"


def test_disk_in_use_by_a_cache_process_is_not_affected(examine: Doctor, tmp_path: Path) -> None:
    chunk = store(tmp_path, 1)
    content = chunk.read_bytes()
    with held(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        (ssd,) = examine(disk(tmp_path))
    assert ssd.status == "ok"
    assert re.search(rf"{tmp_path} is in use by process \d+ on host .*, which is not affected", ssd.found)
    assert sorted(tmp_path.rglob("*")) == before
    assert chunk.read_bytes() == content


def test_unwritable_disk(examine: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (ssd,) = examine(disk(tmp_path / "file" / "disk"), status=1)
    assert ssd.status == "fail"
    assert ssd.found == f"{tmp_path}/file is not a folder"
    assert f"mv {tmp_path}/file" in ssd.remedy


def test_pool_describes_itself(examine: Doctor) -> None:
    (pool,) = examine(shelf(), names="shelf")
    assert pool[:2] == ("backend pool (shelf)", "ok")
    assert re.fullmatch(f"a shelf; 4MiB {TIMES}", pool.found)


@pytest.mark.parametrize("checksum", ["true", "false"])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("fail", "it did not store a chunk"),
        ("full", "it has no room for a chunk of 4MiB"),
        ("raise", "the lookup of a chunk failed: injected fault"),
        ("short", "looking a chunk up: it returned 0 results for one item"),
        ("flip", "it returned other bytes than were written"),
        ("forget", "it does not hold a chunk whose write it confirmed"),
    ],
)
def test_faulty_pool(
    fault: str, found: str, checksum: str, examine: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_CHECKSUM", checksum)
    (pool,) = examine(shelf(fault=fault), status=1)
    assert pool.status == "fail"
    assert pool.found.startswith(found)
    assert pool.remedy


def test_unreachable_server(examine: Doctor) -> None:
    (pool,) = examine({"name": "pool", "type": "redis", "url": f"redis://127.0.0.1:{free_port()}"}, status=1)
    assert pool.status == "fail"
    assert "Connection refused" in pool.found
    assert pool.remedy.startswith("check that it runs and is reachable")


def test_corruption_is_reported_with_the_logged_warning(examine: Doctor) -> None:
    (pool,) = examine(shelf(fault="flip"), status=1)
    assert pool.found.endswith("payload that does not match its checksum")


def test_pool_that_logs_a_warning(examine: Doctor) -> None:
    (pool,) = examine(shelf(warning="it is getting late"))
    assert pool.status == "warn"
    assert pool.found.endswith("; it is getting late")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"hangs_in": "check", "deadline": SHORT},
            f"checking the backend takes longer than {SHORT}, the tier's `deadline`",
        ),
        (
            {"hangs_in": "get", "deadline": SHORT},
            f"reading a chunk takes longer than {SHORT}, the tier's `deadline`",
        ),
        (
            {"hangs_in": "never delete", "deadline": SHORT},
            f"it still holds a chunk {SHORT} after it was deleted",
        ),
        (
            {"refusal": "shelf://user:letmein@host refuses letmein: see `password`", "password": "letmein"},
            "shelf://**********@host refuses **********: see `password`",
        ),
    ],
    ids=["check", "get", "delete", "secrets"],
)
def test_message_of_a_pool(options: dict[str, Any], found: str, examine: Doctor) -> None:
    (pool,) = examine(shelf(**options), status=1)
    assert pool.found == found
    assert ("raise the tier's `deadline`" in pool.remedy) == ("takes longer" in found)


STUCK_PLUGIN = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
import anyio
from kvtier import hookimpl
from kvtier.backends.cpu import CpuBackend
from kvtier.cli import checks
from kvtier.concurrency.threads import WorkerThreads, spread

checks.which = lambda *_, **__: "/bin/true"  # The vllm command takes ten seconds to print its version.

def hang(item=None):
    threading.Event().wait()

class StuckBackend(CpuBackend):
    async def get(self, items):
        await {call}

@hookimpl
def kvtier_backends():
    return {{"stuck": StuckBackend}}
"""


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("anyio.to_thread.run_sync(hang)", marks=pytest.mark.slow),
        "asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(), hang)",
        "spread(hang, items, parts=1, executor=WorkerThreads(1))",
    ],
)
def test_hanging_thread_does_not_block_the_command(call: str, tmp_path: Path) -> None:
    (tmp_path / "stuck_pool.py").write_text(STUCK_PLUGIN.format(call=call))
    write_metadata(tmp_path, "stuck-pool", "1.0", {"stuck": "stuck_pool"})
    stuck = {"name": "pool", "type": "stuck", "capacity": "64MiB", "deadline": SHORT}
    process = spawn(
        "doctor",
        "--backend",
        "pool",
        "--json",
        KVTIER_TIERS=json.dumps([RAM, stuck]),
        PYTHONPATH=str(tmp_path),
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert (process.returncode, errors) == (1, "")
    pool = json.loads(output)["checks"][-1]
    assert pool["name"] == "backend pool (stuck)"
    assert pool["found"].startswith(f"reading a chunk takes longer than {SHORT}, the tier's `deadline`")
    assert pool["found"].endswith("does not end when it is cancelled") is call.startswith("spread")


def test_table(run: Run, tmp_path: Path) -> None:
    result = run([disk(tmp_path / "disk"), shelf(fault="full")], "--backend", "ssd", "-b", "pool")
    assert result.status == 1
    assert re.search(rf"^OK +backend ssd \(disk\) +{DISK}; 4MiB {TIMES}", result.output, re.MULTILINE)
    assert re.search(r"^FAIL +backend pool \(shelf\) +it has no room", result.output, re.MULTILINE)
    assert doctor.HINT not in result.output


def test_without_backend_no_chunk_is_written(run: Run) -> None:
    result = run([shelf(fault="full")])
    assert result.status == 0
    assert "tiers: ram (cpu, 64MiB), pool (shelf)" in result.output
    assert "backend pool" not in result.output
    assert result.output.splitlines()[-1] == doctor.HINT


def test_stopped_pool_is_reported_without_backend(run: Run) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    result = run([{"name": "pool", "type": "redis", "url": url}, shelf(name="other")])
    assert result.status == 1
    assert re.search(r"^FAIL +tier pool \(redis\) .*Connection refused", result.output, re.MULTILINE)
    assert re.search(r"^OK +tier other \(shelf\) +a shelf; looked up in ", result.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--backend", "tape"),
            "no tier has the name or type 'tape': use one of ram (cpu), pool (shelf), or all",
        ),
        (("--backend", "pool", "--size", "large"), "'large' is not a size"),
        (("--backend", "pool", "--size", "0"), "use a size from 1 to 1GiB"),
        (("--backend", "pool", "--size", "2GiB"), "use a size from 1 to 1GiB"),
        (("--size", "4MiB"), "requires --backend"),
    ],
)
def test_invalid_options(arguments: tuple[str, ...], message: str, run: Run) -> None:
    result = run([shelf()], *arguments)
    assert (result.status, result.output) == (2, "")
    assert message in result.message


def test_invalid_settings_are_reported(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKEN", "1")
    result = kvtier("doctor", "--backend", "pool")
    assert result.status == 1
    assert "did you mean KVTIER_CHUNK_TOKENS?" in result.output


def test_name_takes_precedence_over_type() -> None:
    local = [
        LocalTierSettings(name=name, type=type_, capacity=4096)
        for name, type_ in [("a", "cpu"), ("disk", "cpu"), ("b", "disk")]
    ]
    assert [tier.name for tier in select(local, ["disk"], "-b")] == ["disk"]
    assert [tier.name for tier in select(local, ["disk", "cpu"], "-b")] == ["a", "disk"]
    assert [tier.name for tier in select(local, ["b", "all"], "-b")] == ["a", "disk", "b"]
    with pytest.raises(typer.BadParameter):
        select(local, ["all", "c"], "-b")


def test_empty_secret_masks_nothing() -> None:
    settings = PoolSettings(name="pool", type="shelf", password="")
    assert without_secrets("as it is", settings) == "as it is"


def test_secrets_in_mappings_are_masked() -> None:
    class Settings(TierSettings):
        credentials: dict[str, Secret]

    tier = Settings.model_validate({"name": "pool", "type": "objects", "credentials": {"key": "hunter2"}})
    assert "hunter2" not in without_secrets("the server refuses hunter2", tier)
