"""``kvtier doctor`` asks the cache process that runs with the settings, and the controller of a fleet."""

from __future__ import annotations

import json
import socket as sockets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio import to_thread

from kvtier.bridge.client import SchedulerBridge
from kvtier.cli import checks_running
from kvtier.fleet.member.served_models import EngineModel
from kvtier.memory.layout import namespace
from tests.rigs.bridges import LAYOUT, hello
from tests.rigs.fleet import fleet
from tests.rigs.waiting import until

from .conftest import RAM, Kvtier, cache_process

FACTS = {"files or --revision": "files 12ab"}
Checks = Callable[..., list[dict[str, str]]]


@pytest.fixture
def checks(kvtier: Kvtier) -> Checks:
    """Run ``kvtier doctor``, and return the checks of what runs."""

    def run(*arguments: object) -> list[dict[str, str]]:
        result = kvtier("doctor", "--json", *arguments)
        assert result.status == 0, result.output
        names = (
            checks_running.PROCESS,
            checks_running.FOUND,
            checks_running.FLEET,
            "cache processes",
            "controller",
        )
        every = json.loads(result.output)["checks"]
        return [
            check for check in every if check["name"] in names or check["name"].startswith("chat template")
        ]

    return run


def connect(path: Path, engine: str, platform: str, *names: str) -> SchedulerBridge:
    layout = msgspec.structs.replace(LAYOUT, platform=platform)
    greeting = msgspec.structs.replace(
        hello("scheduler", engine),
        layout=layout,
        namespace=namespace("m", layout),
        model=EngineModel(list(names or ("llama",)), facts=FACTS),
    )
    bridge = SchedulerBridge(greeting, path)
    bridge.connect()
    return bridge


def config(folder: Path, name: str = "other.yaml", **settings: Any) -> Path:
    (folder / name).write_text(json.dumps({"tiers": [RAM], **settings}))
    return folder / name


def test_without_a_cache_process(checks: Checks, tmp_path: Path) -> None:
    (check,) = checks("-c", config(tmp_path))
    assert check["status"] == "ok"
    assert check["found"].endswith("; an engine starts one")


def test_without_the_cache_process_that_engines_only_connect_to(checks: Checks, tmp_path: Path) -> None:
    (check,) = checks("-c", config(tmp_path, socket=str(tmp_path / "none.sock")))
    assert (check["status"], check["found"], check["remedy"]) == (
        "warn",
        f"none on {tmp_path}/none.sock; engines start none there",
        "start one: kvtier serve",
    )


def test_socket_that_nobody_serves(checks: Checks, tmp_path: Path) -> None:
    """It is left by a process that was killed."""
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "left.sock"))
    (check,) = checks("-c", config(tmp_path, socket=str(tmp_path / "left.sock")))
    assert check["status"] == "warn"
    assert "kvtier serve" in check["remedy"]


def test_two_engines_with_different_dtypes(checks: Checks, kvtier: Kvtier, tmp_path: Path) -> None:
    with cache_process(tmp_path, tiers=[RAM]) as running:
        assert [check["status"] for check in checks("-c", running.config)] == ["ok"]
        engines = [connect(running.socket, "a", "cuda|LBHNC|auto|torch.float16")]
        assert [check["status"] for check in checks("-c", running.config)] == ["ok"]
        engines.append(connect(running.socket, "b", "cuda|LBHNC|auto|torch.bfloat16"))
        process, found = checks("-c", running.config)
        table = kvtier("status", "-c", running.config).output
        for engine in engines:
            engine.close()
    assert process["found"] == f"process {running.pid} on {running.socket}"
    assert found["status"] == "warn"
    assert "share no chunk of llama: --dtype torch.bfloat16 instead of torch.float16" in found["found"]
    assert found["remedy"] == "start all of them with the same --dtype"
    assert "--dtype" in table


def test_cache_process_with_other_tiers_than_the_settings(checks: Checks, tmp_path: Path) -> None:
    disk = {"name": "ssd", "type": "disk", "path": str(tmp_path / "ssd"), "capacity": "1MiB"}
    with cache_process(tmp_path, tiers=[RAM]) as running:
        (check,) = checks("-c", config(tmp_path, socket=str(running.socket), tiers=[RAM, disk]))
    assert check["status"] == "warn"
    assert check["found"].endswith(", with other tiers than in the settings: ram")
    assert check["remedy"].startswith(f"kill {running.pid}:")


def test_cache_process_of_another_version(
    checks: Checks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_process(tmp_path, tiers=[RAM]) as running:
        monkeypatch.setattr(checks_running, "__version__", "9.9")
        (check,) = checks("-c", running.config)
    assert check["status"] == "warn"
    assert check["found"].endswith(": 9.9 is installed")


@pytest.mark.anyio
async def test_instances_of_a_fleet(checks: Checks, kvtier: Kvtier, tmp_path: Path) -> None:
    async with fleet(tmp_path, kvtier, "one", "two", "three") as running:
        settings = config(
            tmp_path, socket=str(tmp_path / "none.sock"), controller={"url": running.url, "instance_id": "x"}
        )
        _, check = await to_thread.run_sync(checks, "-c", settings)
        assert (check["status"], check["found"][:2]) == ("ok", "3,")
        members = running.controller.registry.members
        for name, dtype in (("one", "half"), ("two", "float"), ("three", "float")):
            layout = msgspec.structs.replace(LAYOUT, platform=f"cuda|LBHNC|auto|{dtype}")
            served = running.instances[name].served
            served.add("vllm-2", namespace("m", layout), layout, EngineModel(["chat"], facts=FACTS))
        await until(lambda: all(any(m.facts for m in member.models) for member in members.values()))
        members["two"].hello = msgspec.structs.replace(members["two"].hello, kvtier="0.1.0")
        _, version, dtype = await to_thread.run_sync(checks, "-c", settings)
    assert version["found"].startswith("kvtier ")
    assert "0.1.0 on two" in version["found"]
    assert dtype["found"] == (
        "engines of one and engines of two, engines of three share no chunk of chat: "
        "--dtype half instead of float"
    )


@pytest.mark.anyio
async def test_one_of_several_controllers_does_not_answer(kvtier: Kvtier, tmp_path: Path) -> None:
    absent = "http://127.0.0.1:9"
    async with fleet(tmp_path, kvtier, "one") as running:
        urls = [running.url, absent]
        settings = config(
            tmp_path, socket=str(tmp_path / "none.sock"), controller={"url": urls, "instance_id": "x"}
        )
        result = await to_thread.run_sync(kvtier, "doctor", "--json", "-c", settings)
    assert result.status == 1
    *_, down, instances = json.loads(result.output)["checks"]
    assert (down["status"], down["name"]) == ("fail", "controller")
    assert absent in down["found"]
    assert (instances["status"], instances["found"][:2]) == ("ok", "1,")


def test_controller_that_does_not_answer(kvtier: Kvtier, tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    result = kvtier("doctor", "--json", "-c", config(tmp_path, controller={"url": url, "instance_id": "x"}))
    assert result.status == 1
    (check,) = [each for each in json.loads(result.output)["checks"] if each["name"] == "controller"]
    assert url in check["found"]
