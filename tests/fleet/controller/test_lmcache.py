"""The requests of LMCache's guide on moving KV, to a real controller process and two instances."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
from anyio import to_thread

from kvtier.fleet.controller.member import PEERS
from kvtier.fleet.member.protocol import TierDescription
from kvtier.fleet.member.served_models import EngineModel
from kvtier.instance import Instance
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from kvtier.rpc.frames import Ping
from kvtier.settings import load_settings
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.fleet import CHUNK_TOKENS, MODEL, PLUGINS, SECRET, TOKEN_BYTES
from tests.rigs.running_controller import KEYS, POOL, RAM, TIERS, running_controller
from tests.rigs.running_controller import TOKENS as PROMPT

pytestmark = pytest.mark.anyio

FIRST, SECOND = "lmcache_instance_1", "lmcache_instance_2"
TOKENS = [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
MOVE = """{
    "old_position": ["lmcache_instance_1", "LocalCPUBackend"],
    "new_position": ["lmcache_instance_2", "LocalCPUBackend"],
    "tokens": [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
}"""


class Running(NamedTuple):
    """A controller process, and what its clients of LMCache send it."""

    url: str

    async def send(self, path: str, body: str | dict[str, Any], status: int = 200) -> Any:
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, verify=False) as client:
            answer = await client.post(path, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def finished(self, accepted: dict[str, Any]) -> None:
        """Poll an event until it is done, as clients of LMCache do."""
        with anyio.fail_after(60):
            while (state := await self.send("/check_finish", {"event_id": accepted["event_id"]})) != {
                "status": "done"
            }:
                assert state["status"] in ("queued", "running")
                await anyio.sleep(0.01)

    async def wait_until_held(self, layout: dict[str, list[Any]]) -> None:
        with anyio.fail_after(60):
            while (await self.send("/lookup", {"tokens": TOKENS}))["layout_info"] != layout:
                await anyio.sleep(0.01)


@asynccontextmanager
async def instance(folder: Path, url: str, name: str) -> AsyncIterator[Instance]:
    disk = {"name": "ssd", "type": "disk", "path": str(folder / name), "capacity": "16MiB", "write": "never"}
    settings = load_settings(
        {
            "chunk_tokens": CHUNK_TOKENS,
            "tiers": [{"name": "ram", "type": "cpu", "capacity": "4MiB"}, disk],
            "peer": {"listen": "127.0.0.1:0", "secret": SECRET},
            "controller": {"url": url, "instance_id": name},
        }
    )
    async with Instance.open(settings, plugins=PLUGINS) as opened:
        layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(1, (TOKEN_BYTES,)),), platform="rows")
        opened.served.add("vllm", namespace(MODEL, layout), layout, EngineModel([MODEL]))
        yield opened


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """The two instances of the guide, of which the first holds its prompt."""
    process = ControllerProcess(tmp_path)
    try:
        await to_thread.run_sync(process.start)
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(instance(tmp_path, process.url, FIRST))
            await stack.enter_async_context(instance(tmp_path, process.url, SECOND))
            await to_thread.run_sync(process.wait_until_registered, FIRST, SECOND)
            model = first.cache.model(MODEL, token_bytes=TOKEN_BYTES)
            assert await model.store(TOKENS, os.urandom(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)
            controller = Running(process.url)
            await controller.wait_until_held({FIRST: ["LocalCPUBackend", 12]})
            yield controller
    finally:
        await to_thread.run_sync(process.close)


async def test_requests_of_the_guide(running: Running) -> None:
    accepted = await running.send("/move", MOVE)
    assert accepted == {"num_tokens": 12, "event_id": accepted["event_id"]}
    await running.finished(accepted)
    await running.wait_until_held({SECOND: ["LocalCPUBackend", 12]})


async def test_fields_and_tiers_have_the_names_of_lmcache(running: Running) -> None:
    to_disk = {
        "old_position": [FIRST, "LocalCPUBackend"],
        "new_position": [FIRST, "LocalDiskBackend"],
        "tokens": TOKENS,
        "should_copy": True,
    }
    await running.finished(await running.send("/move", to_disk))
    await running.finished(await running.send("/move", {**to_disk, "should_copy": False}))
    await running.wait_until_held({FIRST: ["LocalDiskBackend", 12]})
    on_disk = {"instance_id": FIRST, "location": "LocalDiskBackend"}
    pinned = await running.send("/pin", {**on_disk, "tokens": TOKENS})
    assert pinned["num_tokens"] == 12
    await running.finished(pinned)
    await running.finished(await running.send("/clear", {**on_disk, "location": "LocalCPUBackend"}))
    await running.wait_until_held({FIRST: ["LocalDiskBackend", 12]})
    await running.finished(await running.send("/clear", on_disk))
    await running.wait_until_held({})


async def test_errors_name_what_exists(running: Running) -> None:
    wrong = json.loads(MOVE)
    wrong["new_position"] = [SECOND, "GdsBackend"]
    assert (await running.send("/move", wrong, 404))["known"] == ["peers", "ram", "ssd"]
    wrong["new_position"] = ["lmcache_instance_3", "LocalCPUBackend"]
    assert (await running.send("/move", wrong, 404))["known"] == [FIRST, SECOND]
    assert "RemoteBackend" in (await running.send("/move", MOVE.replace("LocalCPU", "Remote"), 404))["detail"]
    assert "event" in (await running.send("/check_finish", {"event_id": "none"}, 404))["detail"]
    assert (
        "instance_i" in (await running.send("/pin", {"instance_i": FIRST, "tokens": TOKENS}, 422))["detail"]
    )
    strange = {"instance_id": FIRST, "location": "LocalCPUBackend", "tokens": ["x"]}
    assert "tokens[0]" in (await running.send("/pin", strange, 422))["detail"]
    codec = {"instance_id": FIRST, "method": "cachegen", "location": "LocalDiskBackend", "tokens": TOKENS}
    for path in ("/compress", "/decompress"):
        detail = (await running.send(path, codec, 422))["detail"]
        assert f"set `codec` of that tier in the settings of instance '{FIRST}'" in detail


async def test_state_of_instances(running: Running) -> None:
    known = {"instance_id": SECOND}
    assert await running.send("/health", known) == {"event_id": "", "error_codes": {"0": 0}}
    assert (await running.send("/health", {"instance_id": "none"}, 404))["known"] == [FIRST, SECOND]
    (worker,) = (await running.send("/query_worker_info", known))["worker_infos"]
    assert worker["registration_time"] <= worker["last_heartbeat_time"] <= time.time() + 1
    peer = worker["peer_init_url"]
    assert (worker["instance_id"], worker["worker_id"]) == (SECOND, 0)
    assert f"{worker['ip']}:{worker['port']}" == peer
    none = await running.send("/query_worker_info", {**known, "worker_ids": [1, 2]})
    assert none == {"event_id": "", "worker_infos": []}
    for ip in ("127.0.0.1", socket.gethostname()):
        found = await running.send("/query_instance", {"event_id": "mine", "ip": ip})
        assert found == {"event_id": "mine", "res": FIRST}
    unknown = await running.send("/query_instance", {"event_id": "", "ip": "10.0.0.1"}, 404)
    assert "127.0.0.1" in unknown["known"]


async def test_instance_that_does_not_answer(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as scripted, scripted.connect("one", peer=None) as instance:
        asked = partial(scripted.post, "/health", instance_id="one")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_check, asked, {"event_id": "", "error_codes": {"0": -1001}})
        assert isinstance(await instance.receive(), Ping)
        (worker,) = (await scripted.post("/query_worker_info", instance_id="one"))["worker_infos"]
        assert (worker["ip"], worker["port"], worker["peer_init_url"]) == ("test-host", 0, None)
        assert (await scripted.post("/query_instance", ip="test-host"))["res"] == "one"


async def _check(asked: Callable[[], Awaitable[Any]], expected: dict[str, Any]) -> None:
    assert await asked() == expected


async def test_a_shared_pool_is_its_remote_backend(tmp_path: Path) -> None:
    tiers = [TIERS[RAM], TierDescription("peers", PEERS, None, True), TIERS[POOL]]
    at_pool = {"instance_id": "one", "location": "RemoteBackend"}
    moving = {
        "old_position": ["one", "LocalCPUBackend"],
        "new_position": ["one", "RemoteBackend"],
        "tokens": PROMPT,
    }
    back = {"old_position": moving["new_position"], "new_position": moving["old_position"], "tokens": PROMPT}
    async with (
        running_controller(tmp_path) as scripted,
        scripted.instance("one", ram=KEYS, tiers=tiers) as instance,
    ):
        await scripted.done("/move", **moving)
        assert (list(instance.held[POOL]), instance.held[RAM]) == (KEYS, {})
        refused = await scripted.post_refused("/move", 422, **back)
        assert "tier 'pool' of instance 'one' is a shared pool" in refused["detail"]
        await scripted.done("/clear", **at_pool)
        assert instance.held[POOL] == {}
