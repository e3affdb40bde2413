"""Real instances and a real controller in one process: moves are complete, and lose nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.instance import Instance
from kvtier.testing.servers import free_port
from tests.rigs.nodes import (
    BUILT_IN,
    CHUNK_TOKENS,
    TIMEOUT_SECONDS,
    TOKEN_BYTES,
    Node,
    open_node,
    prompt,
    rows,
    settings_of,
)
from tests.rigs.running_controller import RunningController, running_controller
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

CHUNKS = 20
TOKENS = prompt(CHUNKS)
RAM, SSD = 0, 1


async def wait_until_registered(controller: RunningController, *names: str) -> None:
    """Wait until these instances have reported what they hold and serve."""

    def is_registered() -> bool:
        members = controller.registry.members
        return all(name in members and members[name].up_to_date and members[name].models for name in names)

    await until(lambda: is_registered())


async def wait_until_held(controller: RunningController, expected: dict[str, dict[str, int]]) -> None:
    """Wait until the controller reports exactly these numbers of leading chunks of the prompt."""
    in_tokens = {
        name: {tier: count * CHUNK_TOKENS for tier, count in tiers.items()}
        for name, tiers in expected.items()
    }
    with anyio.fail_after(TIMEOUT_SECONDS):
        while await controller.held(tokens=TOKENS) != in_tokens:
            await anyio.sleep(0.005)


async def wait_until_partly_held(controller: RunningController) -> None:
    """Wait until the controller reports the prompt's first chunk at instance ``a``."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        while not (await controller.held(tokens=TOKENS)).get("a"):
            await anyio.sleep(0.005)


def move_request(source: str, target: str, **fields: Any) -> dict[str, Any]:
    old, new = source.split("/"), target.split("/")
    return {"old_position": old, "new_position": new, "tokens": TOKENS, **fields}


def all_held(*holders: tuple[Node, int]) -> bool:
    """Whether each chunk of the prompt is held in one of these tiers."""
    keys = {key for holder, tier in holders for key in holder.held(TOKENS, tier)}
    return len(keys) == CHUNKS


async def test_move_from_one_instance_to_another(controller: RunningController) -> None:
    url = controller.url
    async with open_node("a", url, ram=64) as a, open_node("b", url, ram=64) as b:
        await wait_until_registered(controller, "a", "b")
        await a.store(TOKENS)
        await wait_until_held(controller, {"a": {"ram": CHUNKS}})
        event = await controller.done("/move", **move_request("a/cpu", "b/cpu"))
        assert (event["num_tokens"], event["chunks"]) == (len(TOKENS), CHUNKS)
        assert (event["result"]["chunks"], event["result"]["removed"]) == (CHUNKS, CHUNKS)
        assert event["result"]["reason"] is None
        # Immediately, because the changes of a command are reported before its end.
        assert await controller.held(tokens=TOKENS) == {"b": {"ram": len(TOKENS)}}
        assert (len(a.held(TOKENS, RAM)), len(b.held(TOKENS, RAM))) == (0, CHUNKS)
        assert b.is_intact(TOKENS)
        again = await controller.done("/move", **move_request("a/ram", "b/ram"))
        assert again["num_tokens"] == 0
        back = await controller.done("/move", **move_request("b/ram", "a/ram"), copy=True)
        assert (back["kind"], back["result"]["removed"]) == ("copy", 0)
        assert await controller.held(tokens=TOKENS) == {
            "a": {"ram": len(TOKENS)},
            "b": {"ram": len(TOKENS)},
        }
        assert a.is_intact(TOKENS)


async def test_moves_between_the_tiers_of_one_instance_and_from_a_disk_to_a_peers_memory(
    controller: RunningController, tmp_path: Path
) -> None:
    url = controller.url
    async with (
        open_node("a", url, ram=64, disk=tmp_path / "a") as a,
        open_node("b", url, ram=64, disk=tmp_path / "b") as b,
    ):
        await wait_until_registered(controller, "a", "b")
        await a.store(TOKENS)
        await wait_until_held(controller, {"a": {"ram": CHUNKS}})
        await controller.done("/move", **move_request("a/ram", "a/ssd"))
        assert await controller.held(tokens=TOKENS) == {"a": {"ssd": len(TOKENS)}}
        assert not a.held(TOKENS, RAM)
        event = await controller.done("/move", **move_request("a/ssd", "b/ram"))
        assert event["result"]["removed"] == CHUNKS
        assert await controller.held(tokens=TOKENS) == {"b": {"ram": len(TOKENS)}}
        assert not a.held(TOKENS, RAM), "memory held them only for the move"
        assert b.is_intact(TOKENS)
        await controller.done("/move", **move_request("b/ram", "a/ssd"))
        assert await controller.held(tokens=TOKENS) == {"a": {"ssd": len(TOKENS)}}
        await controller.done("/move", **move_request("a/ssd", "a/ram"))
        assert await controller.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
        assert a.is_intact(TOKENS)


async def test_prefetch_promotes_from_disk_and_from_a_peer(
    controller: RunningController, tmp_path: Path
) -> None:
    url = controller.url
    first = prompt(8)
    async with (
        open_node("a", url, ram=64, disk=tmp_path / "a") as a,
        open_node("b", url, ram=64) as b,
    ):
        await wait_until_registered(controller, "a", "b")
        await a.store(first)
        await b.store(TOKENS)
        await wait_until_held(controller, {"a": {"ram": 8}, "b": {"ram": CHUNKS}})
        await controller.done("/move", **move_request("a/ram", "a/ssd") | {"tokens": first})
        place = {"instance": "a", "tier": "ram"}
        event = await controller.done("/prefetch", **place, tokens=TOKENS, deadline="10s")
        assert (event["num_tokens"], event["result"]["chunks"]) == (len(TOKENS), CHUNKS)
        assert len(a.held(TOKENS, RAM)) == CHUNKS
        assert a.is_intact(TOKENS)
        assert len(b.held(TOKENS, RAM)) == CHUNKS


async def test_pinned_chunks_stay_when_memory_is_full(controller: RunningController) -> None:
    async with open_node("a", controller.url, ram=30) as a:
        await wait_until_registered(controller, "a")
        await a.store(TOKENS)
        await wait_until_held(controller, {"a": {"ram": CHUNKS}})
        place = {"instance": "a", "tier": "ram", "tokens": TOKENS}
        event = await controller.done("/pin", **place)
        assert event["result"]["chunks"] == CHUNKS
        for number in range(1, 5):
            await a.model.store(prompt(8, number), b"x" * 8 * CHUNK_TOKENS * 1024)
        assert len(a.held(TOKENS, RAM)) == CHUNKS
        await controller.done("/unpin", **place)
        for number in range(5, 9):
            await a.model.store(prompt(8, number), b"x" * 8 * CHUNK_TOKENS * 1024)
        assert len(a.held(TOKENS, RAM)) < CHUNKS


async def test_clear_frees_what_it_reports(controller: RunningController, tmp_path: Path) -> None:
    async with open_node("a", controller.url, ram=64, disk=tmp_path / "a", write="through") as a:
        await wait_until_registered(controller, "a")
        await a.store(TOKENS)
        await a.store(prompt(4, 1))
        await a.cache.drain(TIMEOUT_SECONDS)
        await wait_until_held(controller, {"a": {"ram": CHUNKS, "ssd": CHUNKS}})
        event = await controller.done("/clear", instance="a", tier="ram", tokens=TOKENS)
        assert (event["result"]["removed"], event["num_tokens"]) == (CHUNKS, len(TOKENS))
        assert event["result"]["bytes"] > 0
        assert await controller.held(tokens=TOKENS) == {"a": {"ssd": len(TOKENS)}}
        await controller.done("/clear", instance="a")
        assert not any(a.cache.catalog.count(tier) for tier in (RAM, SSD))
        assert await controller.held(tokens=prompt(4, 1)) == {}


async def test_full_target_takes_what_fits(controller: RunningController) -> None:
    url = controller.url
    async with open_node("a", url, ram=64) as a, open_node("b", url, ram=8) as b:
        await wait_until_registered(controller, "a", "b")
        await a.store(TOKENS)
        await wait_until_held(controller, {"a": {"ram": CHUNKS}})
        event = await controller.wait_for_end(
            await controller.post("/move", **move_request("a/ram", "b/ram"))
        )
        taken = len(b.held(TOKENS, RAM))
        assert 0 < taken <= 8
        assert event["state"] == "done"
        assert "no room" in event["result"]["reason"]
        assert (event["result"]["chunks"], event["result"]["removed"]) == (taken, taken)
        assert all_held((a, RAM), (b, RAM))
        assert a.is_intact(TOKENS)
        assert b.is_intact(TOKENS)


async def test_concurrent_moves_in_all_directions_lose_nothing(controller: RunningController) -> None:
    url = controller.url
    async with (
        open_node("a", url, ram=64) as a,
        open_node("b", url, ram=64) as b,
        open_node("c", url, ram=64) as c,
    ):
        await wait_until_registered(controller, "a", "b", "c")
        await a.store(TOKENS)
        await wait_until_held(controller, {"a": {"ram": CHUNKS}})
        ways = [("a/ram", "b/ram"), ("b/ram", "a/ram"), ("a/ram", "b/ram"), ("b/ram", "c/ram")]
        accepted: list[Any] = []

        async def ask(source: str, target: str) -> None:
            accepted.append(await controller.post("/move", **move_request(source, target)))

        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for source, target in [*ways, ("c/ram", "a/ram")]:
                    tasks.start_soon(ask, source, target)
        for event in accepted:
            assert (await controller.wait_for_end(event))["state"] == "done"
        assert sorted(len(holder.held(TOKENS, RAM)) for holder in (a, b, c)) == [0, 0, CHUNKS]
        assert all(holder.is_intact(TOKENS) for holder in (a, b, c))


async def test_move_races_eviction_and_reports_its_result(
    controller: RunningController,
) -> None:
    url = controller.url
    async with open_node("a", url, ram=24) as a, open_node("b", url, ram=24) as b:
        await wait_until_registered(controller, "a", "b")
        for attempt in range(2):
            # Grants of the last move keep their memory for a while.
            await a.model.store(TOKENS, rows(TOKENS))
            await wait_until_partly_held(controller)
            accepted = await controller.post("/move", **move_request("a/ram", "b/ram"))
            for holder in (a, b):
                await holder.model.store(prompt(12, attempt + 1), b"x" * 12 * CHUNK_TOKENS * 1024)
            event = await controller.wait_for_end(accepted)
            result = event["result"]
            if result["chunks"] < event["chunks"]:
                assert result["reason"] or event["error"]
            assert result["removed"] <= result["chunks"]
            assert a.is_intact(TOKENS)
            assert b.is_intact(TOKENS)
            await controller.done("/clear", instance="b")
            await controller.done("/clear", instance="a")


async def test_restarted_controller_recovers_its_state(tmp_path: Path) -> None:
    # The instances start before the controller and outlive it, so its port is fixed.
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with open_node("a", url, ram=64) as a, open_node("b", url, ram=64) as b:
        await a.store(TOKENS)
        async with running_controller(tmp_path, listen=f"127.0.0.1:{port}") as first:
            await wait_until_registered(first, "a", "b")
            await wait_until_held(first, {"a": {"ram": CHUNKS}})
            pinned = await first.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        a.cache.unpin(a.model.keys(TOKENS))
        async with running_controller(tmp_path, listen=f"127.0.0.1:{port}") as second:
            await wait_until_registered(second, "a", "b")
            assert await second.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
            assert await second.get(f"/events/{pinned['event_id']}") == pinned
            catalog = a.cache.catalog
            await second.wait_until(lambda: catalog.pinned == CHUNKS)
            await second.done("/move", **move_request("a/ram", "b/ram"))
            assert b.is_intact(TOKENS)


async def test_duplicate_id_and_wrong_token_are_refused_with_a_reason(tmp_path: Path) -> None:
    token = "an unguessable token"
    async with running_controller(tmp_path, token=token) as controller:
        url = controller.url
        async with open_node("a", url, ram=8, token=token):
            await wait_until_registered(controller, "a")
            for name, given, message in (
                ("a", token, "instance id 'a' is in use"),
                ("b", "wrong", "the token is missing or wrong"),
            ):
                settings = settings_of(name, url, ram=8, token=given)
                async with Instance.open(settings, plugins=BUILT_IN) as other:
                    with anyio.fail_after(TIMEOUT_SECONDS):
                        while not (refused := other.status()["controller"]["refused"]):  # type: ignore[index]
                            await anyio.sleep(0.01)
                    assert message in refused
            assert list(controller.registry.members) == ["a"]


async def test_models_of_programs_are_known(controller: RunningController) -> None:
    tokens = prompt(4)
    settings = settings_of("program", controller.url, ram=16, token=controller.token)
    async with Instance.open(settings, plugins=BUILT_IN) as instance:
        model = instance.cache.model("my-model", token_bytes=TOKEN_BYTES)
        await model.store(tokens, rows(tokens))
        await controller.wait_until(lambda: len(controller.registry.holders) == 4)
        await controller.wait_until(controller.registry.models.all)
        (found,) = (await controller.get("/instances"))["instances"]
        assert (found["models"], found["engines"]) == (["my-model"], [])
        held = await controller.held(model="my-model", tokens=tokens)
        assert held == {"program": {"ram": len(tokens)}}
