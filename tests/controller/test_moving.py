"""Real instances and a real controller in one process: what is moved arrives whole, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.instance import Instance
from kvtier.testing.servers.base import free_port
from tests.controller.controlling import RunningController, running_controller
from tests.controller.holding import (
    BUILT_IN,
    CHUNK_TOKENS,
    PATIENCE,
    Holder,
    holding,
    prompt,
    rows,
    settings_of,
)

pytestmark = pytest.mark.anyio

CHUNKS = 20
TOKENS = prompt(CHUNKS)
RAM, SSD = 0, 1


async def registered(controller: RunningController, *names: str) -> None:
    """Wait until these have told all that they hold, and what they serve."""

    def there() -> bool:
        members = controller.registry.members
        return all(name in members and members[name].in_step and members[name].models for name in names)

    with anyio.fail_after(PATIENCE):
        while not there():
            await anyio.sleep(0.005)


async def known(controller: RunningController, wanted: dict[str, dict[str, int]]) -> None:
    """Wait until the controller knows that just so many chunks of the prompt are there."""
    in_tokens = {
        name: {tier: count * CHUNK_TOKENS for tier, count in tiers.items()} for name, tiers in wanted.items()
    }
    with anyio.fail_after(PATIENCE):
        while await controller.held(tokens=TOKENS) != in_tokens:
            await anyio.sleep(0.005)


async def known_in_part(controller: RunningController) -> None:
    """Wait until the controller knows of the prompt's first chunk in the first one's memory."""
    with anyio.fail_after(PATIENCE):
        while not (await controller.held(tokens=TOKENS)).get("a"):
            await anyio.sleep(0.005)


def between(source: str, target: str, **more: Any) -> dict[str, Any]:
    old, new = source.split("/"), target.split("/")
    return {"old_position": old, "new_position": new, "tokens": TOKENS, **more}


def all_there(*holders: tuple[Holder, int]) -> bool:
    """Whether each chunk of the prompt is somewhere."""
    keys = {key for holder, tier in holders for key in holder.held(TOKENS, tier)}
    return len(keys) == CHUNKS


async def test_a_move_takes_a_prompt_from_one_instance_to_another(controller: RunningController) -> None:
    url = controller.url
    async with holding("a", url, ram=64) as a, holding("b", url, ram=64) as b:
        await registered(controller, "a", "b")
        await a.store(TOKENS)
        await known(controller, {"a": {"ram": CHUNKS}})
        event = await controller.done("/move", **between("a/cpu", "b/cpu"))
        assert (event["num_tokens"], event["chunks"]) == (len(TOKENS), CHUNKS)
        assert (event["result"]["chunks"], event["result"]["removed"]) == (CHUNKS, CHUNKS)
        assert event["result"]["reason"] is None
        # At once, and not only after a while: what a command has changed is told before its end.
        assert await controller.held(tokens=TOKENS) == {"b": {"ram": len(TOKENS)}}
        assert (len(a.held(TOKENS, RAM)), len(b.held(TOKENS, RAM))) == (0, CHUNKS)
        assert b.intact(TOKENS)
        again = await controller.done("/move", **between("a/ram", "b/ram"))
        assert again["num_tokens"] == 0
        back = await controller.done("/move", **between("b/ram", "a/ram"), copy=True)
        assert (back["kind"], back["result"]["removed"]) == ("copy", 0)
        assert await controller.held(tokens=TOKENS) == {
            "a": {"ram": len(TOKENS)},
            "b": {"ram": len(TOKENS)},
        }
        assert a.intact(TOKENS)


async def test_between_the_tiers_of_one_and_from_a_disk_to_a_peers_memory(
    controller: RunningController, tmp_path: Path
) -> None:
    url = controller.url
    async with (
        holding("a", url, ram=64, disk=tmp_path / "a") as a,
        holding("b", url, ram=64, disk=tmp_path / "b") as b,
    ):
        await registered(controller, "a", "b")
        await a.store(TOKENS)
        await known(controller, {"a": {"ram": CHUNKS}})
        await controller.done("/move", **between("a/ram", "a/ssd"))
        assert await controller.held(tokens=TOKENS) == {"a": {"ssd": len(TOKENS)}}
        assert not a.held(TOKENS, RAM)
        event = await controller.done("/move", **between("a/ssd", "b/ram"))
        assert event["result"]["removed"] == CHUNKS
        assert await controller.held(tokens=TOKENS) == {"b": {"ram": len(TOKENS)}}
        assert not a.held(TOKENS, RAM), "where they were raised for the move alone"
        assert b.intact(TOKENS)
        await controller.done("/move", **between("b/ram", "a/ssd"))
        assert await controller.held(tokens=TOKENS) == {"a": {"ssd": len(TOKENS)}}
        await controller.done("/move", **between("a/ssd", "a/ram"))
        assert await controller.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
        assert a.intact(TOKENS)


async def test_prefetch_brings_up_what_is_below_and_what_a_peer_has(
    controller: RunningController, tmp_path: Path
) -> None:
    url = controller.url
    first = prompt(8)
    async with (
        holding("a", url, ram=64, disk=tmp_path / "a") as a,
        holding("b", url, ram=64) as b,
    ):
        await registered(controller, "a", "b")
        await a.store(first)
        await b.store(TOKENS)
        await known(controller, {"a": {"ram": 8}, "b": {"ram": CHUNKS}})
        await controller.done("/move", **between("a/ram", "a/ssd") | {"tokens": first})
        place = {"instance": "a", "tier": "ram"}
        event = await controller.done("/prefetch", **place, tokens=TOKENS, deadline="10s")
        assert (event["num_tokens"], event["result"]["chunks"]) == (len(TOKENS), CHUNKS)
        assert len(a.held(TOKENS, RAM)) == CHUNKS
        assert a.intact(TOKENS)
        assert len(b.held(TOKENS, RAM)) == CHUNKS


async def test_what_is_pinned_stays_when_memory_is_full(controller: RunningController) -> None:
    async with holding("a", controller.url, ram=30) as a:
        await registered(controller, "a")
        await a.store(TOKENS)
        await known(controller, {"a": {"ram": CHUNKS}})
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


async def test_clearing_frees_what_it_says(controller: RunningController, tmp_path: Path) -> None:
    async with holding("a", controller.url, ram=64, disk=tmp_path / "a", write="through") as a:
        await registered(controller, "a")
        await a.store(TOKENS)
        await a.store(prompt(4, 1))
        await a.cache.drain(PATIENCE)
        await known(controller, {"a": {"ram": CHUNKS, "ssd": CHUNKS}})
        event = await controller.done("/clear", instance="a", tier="ram", tokens=TOKENS)
        assert (event["result"]["removed"], event["num_tokens"]) == (CHUNKS, len(TOKENS))
        assert event["result"]["bytes"] > 0
        assert await controller.held(tokens=TOKENS) == {"a": {"ssd": len(TOKENS)}}
        await controller.done("/clear", instance="a")
        assert not any(a.cache.hierarchy.catalog.count(tier) for tier in (RAM, SSD))
        assert await controller.held(tokens=prompt(4, 1)) == {}


async def test_a_target_that_is_full_takes_what_fits(controller: RunningController) -> None:
    url = controller.url
    async with holding("a", url, ram=64) as a, holding("b", url, ram=8) as b:
        await registered(controller, "a", "b")
        await a.store(TOKENS)
        await known(controller, {"a": {"ram": CHUNKS}})
        event = await controller.ended(await controller.ask("/move", **between("a/ram", "b/ram")))
        taken = len(b.held(TOKENS, RAM))
        assert 0 < taken <= 8
        assert event["state"] == "done"
        assert "no room" in event["result"]["reason"]
        assert (event["result"]["chunks"], event["result"]["removed"]) == (taken, taken)
        assert all_there((a, RAM), (b, RAM))
        assert a.intact(TOKENS)
        assert b.intact(TOKENS)


async def test_moves_in_all_directions_at_once_lose_nothing(controller: RunningController) -> None:
    url = controller.url
    async with (
        holding("a", url, ram=64) as a,
        holding("b", url, ram=64) as b,
        holding("c", url, ram=64) as c,
    ):
        await registered(controller, "a", "b", "c")
        await a.store(TOKENS)
        await known(controller, {"a": {"ram": CHUNKS}})
        ways = [("a/ram", "b/ram"), ("b/ram", "a/ram"), ("a/ram", "b/ram"), ("b/ram", "c/ram")]
        accepted: list[Any] = []

        async def ask(source: str, target: str) -> None:
            accepted.append(await controller.ask("/move", **between(source, target)))

        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for source, target in [*ways, ("c/ram", "a/ram")]:
                    tasks.start_soon(ask, source, target)
        for one in accepted:
            assert (await controller.ended(one))["state"] == "done"
        assert sorted(len(holder.held(TOKENS, RAM)) for holder in (a, b, c)) == [0, 0, CHUNKS]
        assert all(holder.intact(TOKENS) for holder in (a, b, c))


async def test_a_move_that_races_eviction_ends_and_says_what_became_of_it(
    controller: RunningController,
) -> None:
    url = controller.url
    async with holding("a", url, ram=24) as a, holding("b", url, ram=24) as b:
        await registered(controller, "a", "b")
        for attempt in range(2):
            # What the last move has promised to the other keeps its memory for a while.
            await a.model.store(TOKENS, rows(TOKENS))
            await known_in_part(controller)
            accepted = await controller.ask("/move", **between("a/ram", "b/ram"))
            for holder in (a, b):
                await holder.model.store(prompt(12, attempt + 1), b"x" * 12 * CHUNK_TOKENS * 1024)
            event = await controller.ended(accepted)
            result = event["result"]
            if result["chunks"] < event["chunks"]:
                assert result["reason"] or event["error"]
            assert result["removed"] <= result["chunks"]
            assert a.intact(TOKENS)
            assert b.intact(TOKENS)
            await controller.done("/clear", instance="b")
            await controller.done("/clear", instance="a")


async def test_a_controller_that_comes_back_knows_everything_again(tmp_path: Path) -> None:
    # Instances must be told where it is before it is there, and outlive it.
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with holding("a", url, ram=64) as a, holding("b", url, ram=64) as b:
        await a.store(TOKENS)
        async with running_controller(tmp_path, listen=f"127.0.0.1:{port}") as first:
            await registered(first, "a", "b")
            await known(first, {"a": {"ram": CHUNKS}})
            pinned = await first.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        a.cache.unpin(a.model.keys(TOKENS))
        async with running_controller(tmp_path, listen=f"127.0.0.1:{port}") as second:
            await registered(second, "a", "b")
            assert await second.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
            assert await second.get(f"/events/{pinned['event_id']}") == pinned
            catalog = a.cache.hierarchy.catalog
            await second.until(lambda: all(key in catalog._pins for key in a.model.keys(TOKENS)))
            await second.done("/move", **between("a/ram", "b/ram"))
            assert b.intact(TOKENS)


async def test_the_second_of_one_name_and_who_has_no_token_are_told_why(tmp_path: Path) -> None:
    token = "a token that nobody guesses"
    async with running_controller(tmp_path, token=token) as controller:
        url = controller.url
        async with holding("a", url, ram=8, token=token):
            await registered(controller, "a")
            for name, given, said in (
                ("a", token, "instance id 'a' is taken"),
                ("b", "wrong", "its token is"),
            ):
                settings = settings_of(name, url, ram=8, token=given)
                async with Instance.open(settings, plugins=BUILT_IN) as other:
                    with anyio.fail_after(PATIENCE):
                        while not (refused := other.status()["controller"]["refused"]):  # type: ignore[index]
                            await anyio.sleep(0.01)
                    assert said in refused
            assert list(controller.registry.members) == ["a"]
