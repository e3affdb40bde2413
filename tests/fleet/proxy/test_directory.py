"""The proxy looks prompts up at a real controller, and continues without an unresponsive one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.fleet.proxy.upstream import Role
from tests.rigs.running_controller import KEYS, MODEL, TOKENS, running_controller
from tests.rigs.waiting import until

from .conftest import Cluster, running
from .stub import Stub, hangs, responds

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("the controller describes its calls")]


@asynccontextmanager
async def decoders_with_holdings(
    folder: Path, held: int, gone: str | None = None, **settings: Any
) -> AsyncIterator[Cluster]:
    """Run two decoders. The second holds ``held`` chunks of the prompt.

    ``gone`` is the URL of a controller to ask first.
    """
    async with (
        running_controller(folder) as controller,
        running(
            1, 2, controller=[*filter(None, [gone]), controller.url], min_prefill=64, **settings
        ) as cluster,
    ):
        first, second = cluster.proxy.upstreams.of(Role.DECODE)
        first.peer, second.peer = "127.0.0.1:1001", "127.0.0.1:1002"
        first.configured_peer, second.configured_peer = first.peer, second.peer
        async with (
            controller.instance("first", peer=first.peer),
            controller.instance("second", peer=second.peer, ram=KEYS[:held]),
        ):
            directory = cluster.proxy.directory
            assert directory is not None
            for _ in range(1 if gone is None else 2):
                await directory.refresh()
            assert (first.instance, second.instance) == ("first", "second")
            yield cluster


async def complete(cluster: Cluster) -> None:
    answer = await cluster.complete(model=MODEL.names[0], prompt=TOKENS)
    assert answer.status_code == 200


async def test_decoder_with_the_longest_prefix_is_chosen_without_prefill(tmp_path: Path) -> None:
    async with decoders_with_holdings(tmp_path, len(KEYS)) as cluster:
        for _ in range(3):
            await complete(cluster)
        assert [len(decoder.requests) for decoder in cluster.decoders] == [0, 3]
        assert cluster.prefillers[0].requests == []
        assert cluster.proxy.statistics.skipped == {"cached": 3}
        assert cluster.proxy.statistics.lookups == {"answered": 3}


async def test_rest_of_a_partial_hit_is_prefilled_for_its_holder(tmp_path: Path) -> None:
    async with decoders_with_holdings(tmp_path, 1) as cluster:
        await complete(cluster)
        assert [len(decoder.requests) for decoder in cluster.decoders] == [0, 1]
        assert cluster.prefillers[0].requests[0].kvtier_params == {"kv_transfer": {"to": "127.0.0.1:1002"}}


async def test_chat_is_tokenized_by_an_engine(tmp_path: Path) -> None:
    async with decoders_with_holdings(tmp_path, len(KEYS)) as cluster:
        for decoder in cluster.decoders:
            decoder.tokenize = responds(200, {"count": len(TOKENS), "tokens": TOKENS})
        body = {"model": MODEL.names[0], "messages": [{"role": "user", "content": "long " * 500}]}
        for _ in range(3):
            assert (await cluster.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert [len(decoder.requests) for decoder in cluster.decoders] == [0, 3]


async def test_refused_lookup_falls_back_to_the_prefix_memory(tmp_path: Path) -> None:
    async with decoders_with_holdings(tmp_path, len(KEYS)) as cluster:
        for _ in range(2):
            assert (await cluster.complete(model="unknown", prompt=TOKENS)).status_code == 200
        assert cluster.proxy.statistics.lookups == {"refused": 2}
        assert sorted(len(decoder.requests) for decoder in cluster.decoders) == [0, 2]


@pytest.mark.parametrize("fault", [hangs, responds(200, b"no json"), responds(500), None])
async def test_proxy_continues_without_an_unresponsive_controller(
    fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    controller = Stub()
    async with controller.serving():
        controller.always = fault or responds(200)
        if fault is None:
            controller.port = 9
        async with running(controller=[controller.url]) as cluster:
            for _ in range(2):
                assert (await cluster.complete()).status_code == 200
            assert cluster.proxy.statistics.skipped == {"cached": 1}
            await until(lambda: "the controller is unavailable" in caplog.text or fault is hangs)


async def test_next_controller_is_asked_if_one_is_gone(tmp_path: Path) -> None:
    async with decoders_with_holdings(tmp_path, len(KEYS), gone="http://127.0.0.1:9") as cluster:
        await complete(cluster)
        assert cluster.proxy.statistics.lookups == {"answered": 1}


async def test_next_controller_is_asked_if_one_knows_of_none_that_leads(tmp_path: Path) -> None:
    stub = Stub()
    stub.always = responds(503)
    async with stub.serving(), decoders_with_holdings(tmp_path, len(KEYS), gone=stub.url) as cluster:
        directory = cluster.proxy.directory
        assert directory is not None
        directory._urls.rotate(-1)
        await complete(cluster)
        await complete(cluster)
        assert cluster.proxy.statistics.lookups == {"failed": 1, "answered": 1}


async def test_failures_are_forgotten_with_an_answer(tmp_path: Path) -> None:
    """Or several of them, however long ago, would count as an outage of all controllers."""
    async with decoders_with_holdings(tmp_path, len(KEYS), gone="http://127.0.0.1:9") as cluster:
        directory = cluster.proxy.directory
        assert directory is not None
        for _ in range(3):
            directory._urls.rotate(-1)
            await complete(cluster)
            await complete(cluster)
        assert cluster.proxy.statistics.lookups["answered"] == 3
