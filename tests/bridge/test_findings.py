"""What a cache process finds about its engines and their prompts, in its status and its log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.bridge.protocol import Found, Lookup, Notice
from kvtier.bridge.session import MIN_LENGTHS
from kvtier.fleet.member.served_models import EngineModel
from kvtier.logs import Finding
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys
from kvtier.memory.layout import GroupLayout
from kvtier.version import __version__
from tests.rigs.scripted_engine import CHUNK_TOKENS, LAYOUT, ROOT, Host, Peer, open_host

pytestmark = pytest.mark.anyio

FACTS = {"files or --revision": "files 12ab"}
WIDE = msgspec.structs.replace(LAYOUT, groups=(GroupLayout(16, (65_536,)),))
"""A chunk takes 512 KiB, an eighth of the first tier."""


def findings(host: Host) -> list[str]:
    found: Any = host.server.status()["findings"]
    return [f"{each['found']} | {each['remedy']}" for each in found]


def model(**more: Any) -> EngineModel:
    return EngineModel(["llama"], facts=FACTS, **more)


async def ask(engine: Peer, keys: list[ChunkKey], tokens: int, ticket: int, **more: Any) -> None:
    """Look up a prompt whose last chunk may be shorter."""
    await engine.request(Lookup(ticket, join_keys(keys), tokens, **more), Found)


async def test_engines_that_share_no_chunk_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = msgspec.structs.replace(LAYOUT, platform="cuda|LBNHC|fp8")
    async with open_host(tmp_path) as host:
        with host.server.notices.listening(logging.getLogger("kvtier")):
            async with host.peer("scheduler", engine="a", model=model()):
                assert findings(host) == []
                assert host.server.status()["version"] == __version__
                namespace = bytes(32)
                async with host.peer() as peer:
                    await peer.greet(engine="b", layout=other, namespace=namespace, model=model())
                    (found,) = findings(host)
                    assert found.startswith(
                        "engine b and engine a share no chunk of llama: kind of device cuda"
                    )
                    assert found.endswith("--kv-cache-dtype")
                    assert "engine b and engine a share no chunk of llama" in caplog.text
                    notice = await peer.receive(Notice)  # In the log of the engine as well.
                    assert "share no chunk of llama" in notice.text
        await host.wait_until_idle()
        assert findings(host) == []


async def test_what_an_engine_has_found_is_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Finding("the template inserts the date", "vllm serve … --chat-template FILE")
    async with open_host(tmp_path) as host, host.peer("scheduler", model=model(findings=[found])):
        assert findings(host) == [f"{found.found} | {found.remedy}"]
        assert str(found) in caplog.text


@pytest.mark.parametrize(
    ("layout", "max_tokens", "found"),
    [
        (LAYOUT, 0, ""),
        (LAYOUT, 4096, ""),
        (WIDE, 8 * CHUNK_TOKENS - 1, ""),
        (WIDE, 10 * CHUNK_TOKENS, "a prompt of 640 tokens takes 5.04MiB, and all of tier ram has 4MiB"),
        (LAYOUT, 16, "hits have at least 16 tokens, and prompts at most 16 (--max-model-len)"),
        (
            msgspec.structs.replace(LAYOUT, groups=(GroupLayout(64, (1024,), state=True),)),
            64,
            "hits have at least 64 tokens, and prompts at most 64 (--max-model-len)",
        ),
    ],
    ids=["unknown length", "fits", "fits just", "longer than memory", "shorter than a block", "no state"],
)
async def test_longest_prompt_must_fit(layout: Any, max_tokens: int, found: str, tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer() as engine:
        await engine.greet(layout=layout, model=model(max_tokens=max_tokens))
        assert len(findings(host)) == bool(found)
        assert found in "".join(findings(host))


@pytest.mark.parametrize(
    ("tokens", "found"), [(1, True), (CHUNK_TOKENS - 1, True), (CHUNK_TOKENS, False), (500, False)]
)
async def test_chunks_longer_than_most_prompts(tokens: int, found: bool, tmp_path: Path) -> None:
    whole = -(-tokens // CHUNK_TOKENS)
    keys = chunk_keys(ROOT, list(range(whole * CHUNK_TOKENS)), CHUNK_TOKENS)
    async with open_host(tmp_path) as host, host.peer("scheduler") as engine:
        for ticket in range(MIN_LENGTHS - 1):
            await ask(engine, keys, tokens, ticket + 1)
        assert findings(host) == []
        await ask(engine, keys, tokens, MIN_LENGTHS)
        assert len(findings(host)) == found
        if found:
            assert "9 of 10 prompts are shorter than chunk_tokens (64)" in findings(host)[0]
            assert findings(host)[0].endswith("| chunk_tokens: 16")


async def test_repeated_lookups_of_one_request_are_one_prompt(tmp_path: Path) -> None:
    keys = chunk_keys(ROOT, list(range(CHUNK_TOKENS)), CHUNK_TOKENS)
    async with open_host(tmp_path) as host, host.peer("scheduler") as engine:
        for ticket in range(2 * MIN_LENGTHS):
            await ask(engine, keys, 10, ticket + 1, repeated=True)
        assert findings(host) == []
