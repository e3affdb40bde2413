"""Hand-overs that an engine asks for: real instances, real transports, engines scripted frame by frame."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from kvtier.bridge.protocol import (
    Cancel,
    Commit,
    EndHandOver,
    Found,
    HandedOver,
    HandOver,
    LookUp,
    Refused,
    Release,
    Reserve,
    Reserved,
    Run,
)
from kvtier.header import HEADER_BYTES
from kvtier.keys import join_keys
from kvtier.layout import ChunkLayout
from kvtier.plugins import Plugins

from .scripted import CHUNK_TOKENS, KEYS, LAYOUT, ROOT, TOKENS, Host, Peer, host, store

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """What loads for a second when the first instance is opened would block the loop of the first test."""
    import_module("kvtier.peers.handing")
    import_module("kvtier.peers.server")
    Plugins.load([])


PEER = {"listen": "127.0.0.1:0", "secret": "sixteen or more characters", "share": 0.9}
IDLE = [{"name": "engine", "leases": 0, "reservations": 0, "tickets": 0}]
ALL = join_keys(KEYS)


class Hosts(NamedTuple):
    """The prefiller's host with its engine, and the decoder's with the scheduler of its engine."""

    here: Host
    there: Host
    scheduler: Peer
    workers: list[Peer]
    decoder: Peer
    to: str

    async def hand_over(self, ticket: int = 1) -> None:
        await self.scheduler.say(HandOver(ticket, self.to, ROOT, ALL, TOKENS))
        await until(lambda: waiting(self.there)["coming"] == len(KEYS))

    async def expect(self, ticket: int = 1) -> Found:
        """Look the prompt up at the decoder, where not all of it is yet."""
        found = await self.decoder.ask(LookUp(ticket, ALL, TOKENS, len(KEYS), 60.0))
        assert isinstance(found, Found)
        assert len(found.leases) + found.fetching == len(KEYS)
        assert found.fetching
        return found


def waiting(home: Host) -> dict[str, int]:
    """What a host says of chunks that are pushed to it."""
    status: Any = home.server.status()
    return dict(status["pushed"])


def is_quiet(home: Host) -> bool:
    """Whether nothing is handed over, reserved or awaited, and nothing leased but by the first tier."""
    status: Any = home.server.status()
    cache = home.server.cache
    taking = status["serving"]["reserving"]
    counts = (
        status["hand_overs"]["open"],
        status["hand_overs"]["leased_bytes"],
        status["pushed"]["coming"],
        status["pushed"]["waiting"],
        taking["reserved_bytes"],
        taking["announcements"],
        status["serving"]["grants"],
        cache.pending_bytes,
        cache.arena.leases - cache.hierarchy.catalog.count(0),
    )
    return not any(counts)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.005)


@asynccontextmanager
async def hosts(tmp_path: Path, **more: Any) -> AsyncIterator[Hosts]:
    """Two hosts on this one. At the end nothing may be held by anybody."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    async with host(folders[0], peer=PEER, **more) as here, host(folders[1], peer=PEER) as there:
        async with here.peer() as scheduler, here.peer() as one, here.peer() as two, there.peer() as decoder:
            await scheduler.greet()
            await one.greet("worker", 0)
            await two.greet("worker", 1)
            welcome = await decoder.greet()
            assert welcome.peer is not None
            yield Hosts(here, there, scheduler, [one, two], decoder, welcome.peer)
        await here.nobody()
        await there.nobody()
        await until(lambda: is_quiet(here) and is_quiet(there))


async def test_chunks_are_pushed_when_every_rank_has_filled_them(tmp_path: Path) -> None:
    """Those that were there before, at once; those that are filled after the prompt's end, too."""
    async with hosts(tmp_path) as both:
        await store(both.scheduler, both.workers, KEYS[:2])
        await both.hand_over()
        first = await both.expect()
        reserved = await both.scheduler.ask(Reserve(2, [Run(KEYS[1], join_keys(KEYS[2:]), CHUNK_TOKENS)]))
        assert isinstance(reserved, Reserved)
        last = reserved.offsets[-1] + HEADER_BYTES
        both.workers[0].arena.view(last, 32)[:] = KEYS[-1]
        await both.workers[0].say(Commit(reserved.leases))
        await both.workers[0].status()
        await both.scheduler.say(EndHandOver(1, complete=True))
        await until(lambda: both.there.server.cache.hierarchy.catalog.count(0) == 2)
        assert waiting(both.there)["waiting"] == 1, "half of what is missing is still to be filled"
        await both.workers[1].say(Commit(reserved.leases))
        assert await both.scheduler.hear() == HandedOver(1, TOKENS, "")
        found = await both.decoder.hear()
        assert isinstance(found, Found)
        assert (len(first.leases + found.leases), found.fetching) == (6, 0)
        assert bytes(both.decoder.arena.view(found.offsets[-1] + HEADER_BYTES, 32)) == KEYS[-1]
        await both.decoder.say(Release(first.leases + found.leases))


async def test_what_is_never_stored_is_not_waited_for(tmp_path: Path) -> None:
    async with hosts(tmp_path) as both:
        await both.hand_over()
        await both.expect()
        await store(both.scheduler, both.workers, KEYS[:4])
        await both.scheduler.say(EndHandOver(1, complete=True))
        assert await both.scheduler.hear() == HandedOver(1, 4 * CHUNK_TOKENS, "")
        found = await both.decoder.hear()
        assert isinstance(found, Found)
        assert (len(found.leases), found.fetching) == (4, 0)
        await both.decoder.say(Cancel(1))


@pytest.mark.parametrize("how", ["told", "gone"])
async def test_one_that_is_given_up_leaves_nobody_waiting(tmp_path: Path, how: str) -> None:
    async with hosts(tmp_path) as both:
        await both.hand_over()
        await both.expect()
        if how == "told":
            await both.scheduler.say(EndHandOver(1, complete=False))
            told = await both.scheduler.hear()
            assert isinstance(told, HandedOver)
            assert told.tokens == 0
        else:
            await both.scheduler.stream.aclose()
        found = await both.decoder.hear()
        assert found == Found(1, [], [], [], 0)


async def test_a_look_up_that_is_cancelled_lets_go_at_once(tmp_path: Path) -> None:
    async with hosts(tmp_path) as both:
        await store(both.scheduler, both.workers, KEYS[:2])
        await both.hand_over()
        await both.expect()
        await until(lambda: both.there.server.cache.hierarchy.catalog.count(0) == 2)
        await both.decoder.say(Cancel(1))
        await until(lambda: waiting(both.there)["waiting"] == 0)
        await until(lambda: both.there.server.status()["engines"] == IDLE)


async def test_where_nobody_can_be_pushed_to_the_engine_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with host(tmp_path) as home, home.peer() as scheduler:
        await scheduler.greet()
        for ticket in (1, 2):
            told = await scheduler.ask(HandOver(ticket, "127.0.0.1:1", ROOT, ALL, TOKENS))
            assert isinstance(told, HandedOver)
            assert (told.ticket, told.tokens) == (ticket, 0)
            assert "write peer.secret" in told.reason
        await scheduler.say(EndHandOver(1, complete=True))
    assert caplog.text.count("cannot hand over to 127.0.0.1:1") == 1


async def test_another_layout_is_refused_with_both_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts(tmp_path) as both:
        other = ChunkLayout(CHUNK_TOKENS, LAYOUT.groups, ranks=1, platform="bfloat16")
        await both.decoder.stream.aclose()
        await both.there.nobody()
        async with both.there.peer() as decoder:
            await decoder.greet(layout=other, namespace=bytes(32))
            await store(both.scheduler, both.workers, KEYS)
            for ticket in (1, 2):
                await both.scheduler.say(HandOver(ticket, both.to, ROOT, ALL, TOKENS))
                told = await both.scheduler.hear()
                assert isinstance(told, HandedOver)
                assert (told.ticket, told.tokens) == (ticket, 0)
            assert f"{other}; here: {LAYOUT}" in told.reason
            assert await decoder.ask(LookUp(1, ALL, TOKENS)) == Found(1, [], [], [], 0)
    assert "1 rank, bfloat16" in caplog.text
    assert caplog.text.count("cannot hand over") == 1


@pytest.mark.parametrize(
    "ask",
    [
        HandOver(1, "a:1", ROOT, ALL[:-1], TOKENS),
        HandOver(1, "a:1", ROOT, ALL, TOKENS + 1),
        HandOver(1, "a:1", ROOT, ALL, 0),
        HandOver(1, "a:1", ROOT, b"", 1),
    ],
    ids=["cut-short", "too-many-tokens", "no-tokens", "no-keys"],
)
async def test_nonsense_is_refused(tmp_path: Path, ask: HandOver) -> None:
    async with host(tmp_path) as home, home.peer() as bad:
        await bad.greet()
        assert isinstance(await bad.ask(ask), Refused)


async def test_a_worker_hands_nothing_over(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as worker:
        await worker.greet("worker", 0)
        assert isinstance(await worker.ask(HandOver(1, "a:1", ROOT, ALL, TOKENS)), Refused)
