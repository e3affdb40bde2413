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

from .conftest import RAM, Kvtier, held, spawn, store

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
def tiers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def configure(*tiers: dict[str, Any]) -> None:
        monkeypatch.setenv("KVTIER_TIERS", json.dumps([RAM, *tiers], default=str))

    return configure


@pytest.fixture
def examine(kvtier: Kvtier) -> Doctor:
    """Run the doctor, and return its checks of backends."""

    def run(*arguments: object, status: int = 0) -> list[Found]:
        result = kvtier("doctor", "--json", *arguments)
        assert result.status == status, result
        report = json.loads(result.output)
        assert report["ok"] is (status == 0)
        return [Found(**check) for check in report["checks"] if check["name"].startswith("backend ")]

    return run


def disk(path: Path, **options: object) -> dict[str, Any]:
    return {"name": "ssd", "type": "disk", "capacity": "64MiB", "path": str(path), **options}


def shelf(**options: object) -> dict[str, Any]:
    return {"name": "pool", "type": "shelf", **options}


def test_memory_and_disk(examine: Doctor, tiers: Callable[..., None], tmp_path: Path) -> None:
    tiers(disk(tmp_path / "disk"))
    ram, ssd = examine("--backend", "all")
    assert ram[:2] == ("backend ram (cpu)", "ok")
    assert ssd[:2] == ("backend ssd (disk)", "ok")
    assert re.fullmatch(f"4MiB {TIMES}", ram.found)
    assert re.fullmatch(f"{DISK}; 4MiB {TIMES}", ssd.found)
    assert list(tmp_path.iterdir()) == []


def test_chunk_size_option(examine: Doctor, tiers: Callable[..., None], tmp_path: Path) -> None:
    tiers(disk(tmp_path / "disk", capacity="1MiB"), shelf())
    _, ssd, pool = examine("--backend", "all", "--size", "1100000")
    assert "; 1MiB written" in ssd.found, "at most the capacity of the tier"
    assert "1.05MiB written" in pool.found, "rounded up to whole pages"


def test_tier_of_less_than_two_pages(examine: Doctor, tiers: Callable[..., None], tmp_path: Path) -> None:
    tiers(disk(tmp_path / "disk", capacity="8191"))
    (ssd,) = examine("--backend", "ssd")
    assert "; 4KiB written" in ssd.found


def test_memory_is_allocated_only_for_the_chunk(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TIERS", json.dumps([{**RAM, "capacity": "1000TiB"}]))
    (ram,) = examine("--backend", "ram")
    assert ram.status == "ok"


def test_disk_in_use_by_a_cache_process_is_not_affected(
    examine: Doctor, tiers: Callable[..., None], tmp_path: Path
) -> None:
    chunk = store(tmp_path, 1)
    content = chunk.read_bytes()
    tiers(disk(tmp_path))
    with held(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        (ssd,) = examine("--backend", "ssd")
    assert ssd.status == "ok"
    assert re.search(rf"{tmp_path} is in use by process \d+ on host .*, which is not affected", ssd.found)
    assert sorted(tmp_path.rglob("*")) == before
    assert chunk.read_bytes() == content


def test_unwritable_disk(examine: Doctor, tiers: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers(disk(tmp_path / "file" / "disk"))
    (ssd,) = examine("--backend", "ssd", status=1)
    assert ssd.status == "fail"
    assert ssd.found == f"{tmp_path}/file is not a folder"
    assert f"mv {tmp_path}/file" in ssd.remedy


def test_pool_describes_itself(examine: Doctor, tiers: Callable[..., None]) -> None:
    tiers(shelf())
    (pool,) = examine("--backend", "shelf")
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
    fault: str,
    found: str,
    checksum: str,
    examine: Doctor,
    tiers: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVTIER_CHECKSUM", checksum)
    tiers(shelf(fault=fault))
    (pool,) = examine("--backend", "pool", status=1)
    assert pool.status == "fail"
    assert pool.found.startswith(found)
    assert pool.remedy


def test_unreachable_server(examine: Doctor, tiers: Callable[..., None]) -> None:
    tiers({"name": "pool", "type": "redis", "url": f"redis://127.0.0.1:{free_port()}"})
    (pool,) = examine("--backend", "pool", status=1)
    assert pool.status == "fail"
    assert "Connection refused" in pool.found
    assert pool.remedy.startswith("check that it runs and is reachable")


def test_corruption_is_reported_with_the_logged_warning(examine: Doctor, tiers: Callable[..., None]) -> None:
    tiers(shelf(fault="flip"))
    (pool,) = examine("--backend", "pool", status=1)
    assert pool.found.endswith("payload that does not match its checksum")


def test_pool_that_never_deletes(examine: Doctor, tiers: Callable[..., None]) -> None:
    tiers(shelf(hangs_in="never delete", deadline=SHORT))
    (pool,) = examine("--backend", "pool", status=1)
    assert pool.found == f"it still holds a chunk {SHORT} after it was deleted"


def test_pool_that_logs_a_warning(examine: Doctor, tiers: Callable[..., None]) -> None:
    tiers(shelf(warning="it is getting late"))
    (pool,) = examine("--backend", "pool")
    assert pool.status == "warn"
    assert pool.found.endswith("; it is getting late")


def test_error_of_a_pool_without_secrets(examine: Doctor, tiers: Callable[..., None]) -> None:
    refusal = "shelf://user:letmein@host refuses the password letmein too: see `password`"
    tiers(shelf(refusal=refusal, password="letmein"))
    (pool,) = examine("--backend", "pool", status=1)
    assert pool.found == "shelf://**********@host refuses the password ********** too: see `password`"


@pytest.mark.parametrize(("method", "doing"), [("check", "checking the backend"), ("get", "reading a chunk")])
def test_hanging_pool(method: str, doing: str, examine: Doctor, tiers: Callable[..., None]) -> None:
    tiers(shelf(hangs_in=method, deadline=SHORT))
    (pool,) = examine("--backend", "pool", status=1)
    assert pool.found == f"{doing} takes longer than {SHORT}, the tier's `deadline`"
    assert "raise the tier's `deadline`" in pool.remedy


STUCK_PLUGIN = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
import anyio
from kvtier import hookimpl
from kvtier.backends.cpu import CpuBackend
from kvtier.concurrency.threads import WorkerThreads, spread

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


def test_table(kvtier: Kvtier, tiers: Callable[..., None], tmp_path: Path) -> None:
    tiers(disk(tmp_path / "disk"), shelf(fault="full"))
    result = kvtier("doctor", "--backend", "ssd", "-b", "pool")
    assert result.status == 1
    assert re.search(rf"^OK +backend ssd \(disk\) +{DISK}; 4MiB {TIMES}", result.output, re.MULTILINE)
    assert re.search(r"^FAIL +backend pool \(shelf\) +it has no room", result.output, re.MULTILINE)
    assert doctor.HINT not in result.output


def test_without_backend_no_chunk_is_written(kvtier: Kvtier, tiers: Callable[..., None]) -> None:
    tiers(shelf(fault="full"))
    result = kvtier("doctor")
    assert result.status == 0
    assert "tiers: ram (cpu, 64MiB), pool (shelf)" in result.output
    assert "backend pool" not in result.output
    assert result.output.splitlines()[-1] == doctor.HINT


def test_stopped_pool_is_reported_without_backend(kvtier: Kvtier, tiers: Callable[..., None]) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    tiers({"name": "pool", "type": "redis", "url": url}, shelf(name="other"))
    result = kvtier("doctor")
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
def test_invalid_options(
    arguments: tuple[str, ...], message: str, kvtier: Kvtier, tiers: Callable[..., None]
) -> None:
    tiers(shelf())
    result = kvtier("doctor", *arguments)
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
