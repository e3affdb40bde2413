"""A real controller and real instances in the test's event loop, with commands in a thread."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
from anyio import to_thread

import kvtier.fleet.member.commands

# Imported early: opening an instance would import these and block the event loop.
import kvtier.fleet.member.controller_client
import kvtier.fleet.member.tokenizing
import kvtier.peers.backend
import kvtier.peers.server  # noqa: F401
from kvtier.fleet.controller.serve import Controller, run_controller
from kvtier.fleet.controller.settings import ServiceSettings
from kvtier.fleet.member.served_models import EngineModel
from kvtier.instance import Instance
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from kvtier.plugins import Plugins
from kvtier.settings import load_settings
from tests.cli.conftest import Kvtier, Result
from tests.rigs.waiting import until

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CHUNK_TOKENS = 16
TOKEN_BYTES = 512
SECRET = "sixteen or more characters"
TIMEOUT_SECONDS = 30
PLUGINS = Plugins.load([])


class Fleet(NamedTuple):
    """A running controller and its instances."""

    controller: Controller
    instances: dict[str, Instance]
    kvtier: Kvtier

    @property
    def url(self) -> str:
        host, port = self.controller.address
        return f"http://{host}:{port}"

    async def store(self, name: str, tokens: list[int]) -> None:
        """Store a prompt in an instance's first tier, and wait until the controller has indexed it."""
        instance = self.instances[name]
        rows = os.urandom(len(tokens) * TOKEN_BYTES)
        model = instance.cache.model(MODEL, token_bytes=TOKEN_BYTES)
        assert await model.store(tokens, rows) == len(tokens)
        await self.wait_until_held(tokens, name, "ram")

    async def wait_until_held(self, tokens: list[int], name: str, tier: str) -> None:
        """Wait until the controller has indexed all of a prompt in a tier."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, verify=False) as http:
            with anyio.fail_after(TIMEOUT_SECONDS):
                while True:
                    found = (await http.post("/lookup", json={"tokens": tokens})).json()
                    if found.get("instances", {}).get(name, {}).get(tier) == len(tokens):
                        return
                    await anyio.sleep(0.01)

    async def wait_for_heartbeats(self) -> None:
        """Wait until every instance has sent a heartbeat."""
        members = self.controller.registry.members
        await until(lambda: all(members[name].heartbeat for name in self.instances))

    async def run(self, *arguments: object) -> Result:
        """Run a command."""
        return await to_thread.run_sync(lambda: self.kvtier(*arguments, "--url", self.url))

    async def json(self, *arguments: object) -> Any:
        """Run a command with ``--json``, and return its output."""
        result = await self.run(*arguments, "--json")
        assert result.status == 0, result.errors
        return json.loads(result.output)


@asynccontextmanager
async def fleet(folder: Path, kvtier: Kvtier, *names: str, **options: Any) -> AsyncIterator[Fleet]:
    """Run registered instances with these names. Each has memory and a disk, and serves one model."""
    settings = ServiceSettings.of(listen="127.0.0.1:0", state=folder / "state.sqlite", **options)
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(run_controller(settings))
        running = Fleet(controller, {}, kvtier)
        for name in names:
            instance = await stack.enter_async_context(
                Instance.open(_settings(folder, name, running.url), plugins=PLUGINS)
            )
            layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(1, (TOKEN_BYTES,)),), platform="rows")
            instance.served.add("vllm", namespace(MODEL, layout), layout, EngineModel([MODEL]))
            running.instances[name] = instance
        members = controller.registry.members
        await until(
            lambda: all(
                name in members and members[name].up_to_date and members[name].models for name in names
            )
        )
        yield running


def _settings(folder: Path, name: str, url: str) -> Any:
    disk = {"name": "ssd", "type": "disk", "path": str(folder / name), "capacity": "16MiB", "write": "never"}
    return load_settings(
        {
            "chunk_tokens": CHUNK_TOKENS,
            "partial_chunks": True,
            "tiers": [{"name": "ram", "type": "cpu", "capacity": "4MiB"}, disk],
            "peer": {"listen": "127.0.0.1:0", "secret": SECRET},
            "controller": {"url": url, "instance_id": name},
        }
    )
