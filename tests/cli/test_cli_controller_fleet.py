"""The commands that ask a controller, against a real one with real instances."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# What takes long to import would block the loop if it came with the first command.
import kvtier.cli.controller_client
import kvtier.cli.controller_follow  # noqa: F401

from .conftest import Kvtier
from .fleet import CHUNK_TOKENS, MODEL, Fleet, fleet

pytestmark = pytest.mark.anyio

TOKENS = list(range(3 * CHUNK_TOKENS + 5))
COUNT = len(TOKENS)


@pytest.fixture
async def two(tmp_path: Path, kvtier: Kvtier) -> AsyncIterator[Fleet]:
    """Two instances, of which the first holds a prompt."""
    async with fleet(tmp_path, kvtier, "instance-1", "instance-2") as running:
        await running.store("instance-1", TOKENS)
        yield running


async def held(running: Fleet) -> dict[str, dict[str, int]]:
    instances: dict[str, dict[str, int]] = (await running.json("lookup", "--tokens", TOKENS))["instances"]
    return instances


async def test_lookup_and_move(two: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"count": COUNT, "tokens": TOKENS}))
    looked_up = await two.run("lookup", "--tokens-file", file)
    assert looked_up.output.splitlines()[1].split() == ["instance-1", "ram", str(COUNT), "100%"]
    moved = await two.run("move", "instance-1/cpu", "instance-2/ram", "--tokens-file", file)
    assert moved.status == 0
    assert moved.output.startswith(
        f"{COUNT} tokens moved (instance-1/ram -> instance-2/ram): 4 of 4 chunks, "
    )
    assert await held(two) == {"instance-2": {"ram": COUNT}}
    again = await two.run("move", "instance-1/cpu", "instance-2/ram", "--tokens-file", file)
    assert (again.status, again.errors) == (0, "")
    back = await two.run("move", "instance-2/ram", "instance-1/ssd", "--tokens-file", file, "--copy")
    assert back.output.startswith(
        f"{COUNT} tokens copied (instance-2/ram -> instance-1/ssd): 4 of 4 chunks, "
    )
    assert await held(two) == {"instance-2": {"ram": COUNT}, "instance-1": {"ssd": COUNT}}


async def test_events(two: Fleet) -> None:
    move = ["move", "instance-1/ram", "instance-2/ram", "--tokens", TOKENS]
    event_id = (await two.run(*move, "--no-wait")).output.strip()
    followed = await two.json("events", event_id, "--follow")
    assert (followed["event_id"], followed["state"], followed["chunks_done"]) == (event_id, "done", 4)
    assert followed["result"]["removed"] == 4
    assert (await two.json("events", event_id)) == followed
    assert (await two.json("events"))["events"] == [followed]
    assert f"{COUNT} tokens moved" in (await two.run("events", event_id)).output
    assert event_id in (await two.run("events")).output


async def test_prefetch_pin_and_clear(two: Fleet) -> None:
    fetched = await two.run("prefetch", "instance-2/ram", "--tokens", TOKENS, "--deadline", "30s")
    assert fetched.output.startswith(f"{COUNT} tokens brought up (instance-2/ram): 4 of 4 chunks, ")
    pinned = await two.run("pin", "instance-2/ram", "--tokens", TOKENS, "--ttl", "1h")
    assert pinned.output == f"{COUNT} tokens pinned (instance-2/ram): 4 of 4 chunks.\n"
    unpinned = await two.run("unpin", "instance-2/ram", "--tokens", TOKENS)
    assert unpinned.output == f"{COUNT} tokens unpinned (instance-2/ram): 4 of 4 chunks.\n"
    cleared = await two.run("clear", "instance-2/ram", "--tokens", TOKENS, "--yes")
    assert cleared.output.startswith("4 chunks removed (instance-2/ram), ")
    assert await held(two) == {"instance-1": {"ram": COUNT}}
    cleared = await two.run("clear", "instance-1", "--yes")
    assert cleared.output.startswith("4 chunks removed (instance-1), ")
    assert await held(two) == {}
    nothing = await two.run("move", "instance-1/ram", "instance-2/ram", "--tokens", TOKENS)
    assert (nothing.status, nothing.output.partition(":")[0]) == (0, "Nothing of this is held there")


async def test_instances(two: Fleet) -> None:
    every = (await two.json("instances"))["instances"]
    assert [one["instance"] for one in every] == ["instance-1", "instance-2"]
    assert every[0]["models"] == [MODEL]
    listed = (await two.run("instances")).output.splitlines()
    assert [line.split()[:3] for line in listed[1:3]] == [
        ["instance-1", "ram", "cpu"],
        ["instance-1", "ssd", "disk"],
    ]
    one = await two.json("instances", "instance-2")
    assert "history" in one
    assert one["peer"] in (await two.run("instances", "instance-2")).output


async def test_what_there_is_not(two: Fleet) -> None:
    tokens = ["--tokens", TOKENS]
    for command, said in [
        (["instances", "instance-3"], "instance 'instance-3'; known: instance-1, instance-2"),
        (["events", "none"], "event 'none'"),
        (["move", "instance-1/tape", "instance-2/ram", *tokens], "known: peers, ram, ssd"),
        (["lookup", *tokens, "--model", "other"], f"known: {MODEL}"),
        (["lookup", "--prompt", "Why?"], "send `tokens` instead"),
        (["move", "instance-1/ram", "instance-1/ram", *tokens], "are the same"),
    ]:
        result = await two.run(*command)
        assert (result.status, result.output) == (1, "")
        assert said in result.errors, result.errors


async def test_a_token(tmp_path: Path, kvtier: Kvtier) -> None:
    token = "a token of the controller"
    (tmp_path / "token").write_text(token)
    async with fleet(tmp_path, kvtier, token=token) as running:
        assert "lets in nobody without a token" in (await running.run("instances")).errors
        listed = await running.json("instances", "--token-file", tmp_path / "token")
        assert listed == {"instances": []}
