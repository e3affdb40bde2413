"""Requests may have KV transferred to the instances that are registered with the controller."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtier.memory.keys import ChunkKey
from kvtier.peers import targets as targets_module
from kvtier.peers.kv_transfer import KVTransferSummary
from tests.fleet.member.conftest import SECRET, Node, OpenNode, address_of
from tests.rigs.scripted_controller import ScriptedController, scripted_controller

import kvtier.peers.kv_transfer  # noqa: F401 # isort: skip
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio
CHUNKS = 3
SERVES = {"listen": "127.0.0.1:0", "secret": SECRET}


async def transfer(node: Node, to: str, keys: list[ChunkKey]) -> KVTransferSummary:
    return await node.instance.transfer_kv(to, keys, hinted=True).finish(60)


@asynccontextmanager
async def pair(open_node: OpenNode) -> AsyncIterator[tuple[ScriptedController, Node, Node, list[ChunkKey]]]:
    """Open two instances, of which the controller names the second, and store a prompt in the first."""
    async with (
        scripted_controller() as controller,
        open_node(controller, peer=SERVES) as one,
        open_node(controller, name="two", peer=SERVES) as two,
    ):
        keys = await one.store(CHUNKS)
        await controller.up_to_date(1)
        for conversation in controller.conversations:
            conversation.served = [address_of(two)]
        yield controller, one, two, keys


async def test_instances_that_the_controller_names_are_connected_to(open_node: OpenNode) -> None:
    async with pair(open_node) as (_, one, two, keys):
        assert (await transfer(one, address_of(two), keys)).leading == CHUNKS


async def test_name_of_an_instance_that_the_controller_knows_by_its_address(open_node: OpenNode) -> None:
    """A proxy names the host of an engine as its own settings do."""
    async with pair(open_node) as (_, one, two, keys):
        named = one.instance.transfer_kv(address_of(two).replace("127.0.0.1", "LocalHost"), keys, hinted=True)
        assert (await named.finish(60)).leading == CHUNKS
        assert named.to == address_of(two), "the address that the controller knows, and no other"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_other_addresses_are_not_connected_to(open_node: OpenNode, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        async with pair(open_node) as (controller, one, _, keys):
            for _ in range(3):
                result = await transfer(one, f"{host}:{stranger.getsockname()[1]}", keys)
                assert (result.leading, "kv_transfer.targets" in result.last_error) == (0, True)
            asked = [address for told in controller.conversations for address in told.asked]
            assert len(asked) <= 1 + (host == "localhost") * 2, "not asked for again at once"
        with pytest.raises(BlockingIOError):
            stranger.accept()


async def test_confirmed_address_is_used_while_the_controller_is_down(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(open_node) as (controller, one, two, keys):
        assert (await transfer(one, address_of(two), keys)).leading == CHUNKS
        await controller.kill()
        await until(lambda: not one.status["connected"])
        assert (await transfer(one, address_of(two), keys)).leading == CHUNKS
        assert (await transfer(one, address_of(one), keys)).leading == 0
        monkeypatch.setattr(targets_module, "KEPT_SECONDS", 0.0)
        assert (await transfer(one, address_of(two), keys)).leading == 0
