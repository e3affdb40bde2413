"""The commands that query a controller, with a real controller and real instances."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread
import pytest

import kvtier.cli.controller_api
import kvtier.cli.controller_output  # noqa: F401
from kvtier.cli.controller_api import ControllerAPI
from kvtier.errors import KVTierError
from kvtier.http import serving
from tests.rigs.certificates import make_certificate
from tests.rigs.fleet import CHUNK_TOKENS, MODEL, Fleet, fleet
from tests.test_http import hello

from .conftest import Kvtier

pytestmark = pytest.mark.anyio

TOKENS = list(range(3 * CHUNK_TOKENS + 5))
COUNT = len(TOKENS)


@pytest.fixture
async def pair(tmp_path: Path, kvtier: Kvtier) -> AsyncIterator[Fleet]:
    """Two instances. The first holds a prompt."""
    async with fleet(tmp_path, kvtier, "instance-1", "instance-2") as running:
        await running.store("instance-1", TOKENS)
        yield running


async def held(running: Fleet) -> dict[str, dict[str, int]]:
    instances: dict[str, dict[str, int]] = (await running.json("lookup", "--tokens", TOKENS))["instances"]
    return instances


async def test_lookup_and_move(pair: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"count": COUNT, "tokens": TOKENS}))
    looked_up = await pair.run("lookup", "--tokens-file", file)
    assert looked_up.output.splitlines()[1].split() == ["instance-1", "ram", str(COUNT), "100%"]
    moved = await pair.run("move", "instance-1/cpu", "instance-2/ram", "--tokens-file", file)
    assert moved.status == 0
    assert moved.output.startswith(
        f"{COUNT} tokens moved (instance-1/ram -> instance-2/ram): 4 of 4 chunks, "
    )
    assert await held(pair) == {"instance-2": {"ram": COUNT}}
    again = await pair.run("move", "instance-1/cpu", "instance-2/ram", "--tokens-file", file)
    assert (again.status, again.errors) == (0, "")
    back = await pair.run("move", "instance-2/ram", "instance-1/ssd", "--tokens-file", file, "--copy")
    assert back.output.startswith(
        f"{COUNT} tokens copied (instance-2/ram -> instance-1/ssd): 4 of 4 chunks, "
    )
    assert await held(pair) == {"instance-2": {"ram": COUNT}, "instance-1": {"ssd": COUNT}}


async def test_pins_are_listed_and_a_move_reports_those_that_it_ends(pair: Fleet) -> None:
    assert (await pair.run("pins")).output == "Nothing is pinned.\n"
    await pair.run("pin", "instance-1/ram", "--tokens", TOKENS)
    listed = (await pair.run("pins", "instance-1")).output.splitlines()
    assert (listed[0].split(), listed[1].split()[:3]) == (
        ["instance", "chunks", "held", "pinned", "until"],
        ["instance-1", "4", "4"],
    )
    assert listed[1].endswith("unpinned")
    assert (await pair.json("pins", "--limit", 1))["total"] == 1
    shown = (await pair.run("instances", "instance-1")).output.splitlines()
    assert ["pinned", "4", "chunks"] in [line.split() for line in shown]
    moved = await pair.run("move", "instance-1/ram", "instance-2/ram", "--tokens", TOKENS)
    assert moved.output.rstrip().endswith("4 of them were pinned, and are not any more.")
    assert (await pair.run("pins")).output == "Nothing is pinned.\n"


async def test_events(pair: Fleet) -> None:
    move = ["move", "instance-1/ram", "instance-2/ram", "--tokens", TOKENS]
    event_id = (await pair.run(*move, "--no-wait")).output.strip()
    followed = await pair.json("events", event_id, "--follow")
    assert (followed["event_id"], followed["state"], followed["chunks_done"]) == (event_id, "done", 4)
    assert followed["result"]["removed"] == 4
    assert (await pair.json("events", event_id)) == followed
    assert (await pair.json("events"))["events"] == [followed]
    assert f"{COUNT} tokens moved" in (await pair.run("events", event_id)).output
    assert event_id in (await pair.run("events")).output


async def test_prefetch_pin_and_clear(pair: Fleet) -> None:
    fetched = await pair.run("prefetch", "instance-2/ram", "--tokens", TOKENS, "--deadline", "30s")
    assert fetched.output.startswith(f"{COUNT} tokens prefetched (instance-2/ram): 4 of 4 chunks, ")
    pinned = await pair.run("pin", "instance-2/ram", "--tokens", TOKENS, "--ttl", "1h")
    assert pinned.output == f"{COUNT} tokens pinned (instance-2/ram): 4 of 4 chunks.\n"
    unpinned = await pair.run("unpin", "instance-2/ram", "--tokens", TOKENS)
    assert unpinned.output == f"{COUNT} tokens unpinned (instance-2/ram): 4 of 4 chunks.\n"
    cleared = await pair.run("clear", "instance-2/ram", "--tokens", TOKENS, "--yes")
    assert cleared.output.startswith("4 chunks removed (instance-2/ram), ")
    assert await held(pair) == {"instance-1": {"ram": COUNT}}
    cleared = await pair.run("clear", "instance-1", "--yes")
    assert cleared.output.startswith("4 chunks removed (instance-1), ")
    assert await held(pair) == {}
    nothing = await pair.run("move", "instance-1/ram", "instance-2/ram", "--tokens", TOKENS)
    assert (nothing.status, nothing.output.partition(":")[0]) == (0, "No chunk of it is held there")


async def test_instances(pair: Fleet) -> None:
    every = (await pair.json("instances"))["instances"]
    assert [instance["instance"] for instance in every] == ["instance-1", "instance-2"]
    assert every[0]["models"] == [MODEL]
    listed = (await pair.run("instances")).output.splitlines()
    assert [line.split()[:3] for line in listed[1:3]] == [
        ["instance-1", "ram", "cpu"],
        ["instance-1", "ssd", "disk"],
    ]
    details = await pair.json("instances", "instance-2")
    assert "history" in details
    assert details["peer"] in (await pair.run("instances", "instance-2")).output


async def test_unknown_names(pair: Fleet) -> None:
    tokens = ["--tokens", TOKENS]
    for command, message in [
        (["instances", "instance-3"], "instance 'instance-3'; known: instance-1, instance-2"),
        (["events", "none"], "event 'none'"),
        (["move", "instance-1/tape", "instance-2/ram", *tokens], "known: peers, ram, ssd"),
        (["lookup", *tokens, "--model", "other"], f"known: {MODEL}"),
        (["lookup", "--prompt", "Why?"], "send `tokens` instead"),
        (["move", "instance-1/ram", "instance-1/ram", *tokens], "are the same"),
    ]:
        result = await pair.run(*command)
        assert (result.status, result.output) == (1, "")
        assert message in result.errors, result.errors


async def test_token(tmp_path: Path, kvtier: Kvtier) -> None:
    token = "a token of the controller"
    (tmp_path / "token").write_text(token)
    async with fleet(tmp_path, kvtier, token=token) as running:
        assert "requires a token" in (await running.run("instances")).errors
        listed = await running.json("instances", "--token-file", tmp_path / "token")
        assert listed == {"instances": [], "gone": []}


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_certificate_of_another_authority_is_refused(scheme: str, tmp_path: Path) -> None:
    files = make_certificate(tmp_path / "own")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)

    def ask() -> None:
        with ControllerAPI([f"{scheme}://{host}:{port}"]) as controller:
            controller.events(1)

    async with serving(hello, "127.0.0.1:0", ssl=context) as (host, port):
        with pytest.raises(KVTierError, match="CERTIFICATE_VERIFY_FAILED"):
            await anyio.to_thread.run_sync(ask)
