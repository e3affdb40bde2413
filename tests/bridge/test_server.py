"""The cache process against engines that are scripted frame by frame, in one loop."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from kvtier.agent.served import EngineModel, TokenizerSource
from kvtier.bridge import protocol
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Changed,
    Clear,
    Cleared,
    Commit,
    Confirm,
    Confirmed,
    Found,
    Hello,
    LookUp,
    Refused,
    Release,
    Reserve,
    Reserved,
    Run,
    Status,
)
from kvtier.header import HEADER_BYTES
from kvtier.keys import chunk_keys, join_keys
from kvtier.pipeline import prefetch
from kvtier.sockets.frames import encode

from .scripted import CHUNK_TOKENS, KEYS, LAYOUT, NAMESPACE, ROOT, TOKENS, Peer, host, store

pytestmark = pytest.mark.anyio


async def test_an_instance_knows_which_models_its_engines_serve(tmp_path: Path) -> None:
    model = EngineModel(["llama"], TokenizerSource("/models/llama"))
    async with host(tmp_path) as home:
        served = home.server._instance.served
        async with home.peer() as worker, home.peer() as scheduler:
            await worker.greet("worker")
            assert (served.engines, served.models) == (["engine"], [])
            await scheduler.greet(model=model)
            assert [(one.names, one.namespace) for one in served.models] == [(["llama"], NAMESPACE)]
            assert served.tokenizer(NAMESPACE) == model.tokenizer
        await home.nobody()
        assert (served.engines, len(served.models)) == ([], 1)


async def test_what_one_engine_stored_is_found_when_every_rank_has_committed(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as scheduler, home.peer() as one, home.peer() as two:
        await scheduler.greet()
        await one.greet("worker", 0)
        await two.greet("worker", 1)
        leases = await store(scheduler, [one], KEYS)
        assert all(leases)
        assert await scheduler.ask(LookUp(5, join_keys(KEYS), TOKENS)) == Found(5, [], [], [], 0)
        await two.say(Commit(leases))
        await two.status()
        found = await scheduler.ask(LookUp(6, join_keys(KEYS), TOKENS))
        assert isinstance(found, Found)
        assert (len(found.leases), found.fetching, set(found.sources)) == (6, 0, {0})
        assert bytes(one.arena.view(found.offsets[2] + HEADER_BYTES, 32)) == KEYS[2]
        assert await one.ask(Confirm(7, found.leases)) == Confirmed(7, held=True)
        await scheduler.say(Release(found.leases[:3]))
        assert await scheduler.ask(Confirm(8, found.leases)) == Confirmed(8, held=False)
        await scheduler.say(Cancel(6))
        assert (await scheduler.status())["engines"] == [
            {"name": "engine", "leases": 0, "reservations": 0, "tickets": 0}
        ]


async def test_what_is_on_disk_is_fetched_and_told_when_it_is_there(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as scheduler, home.peer() as one, home.peer() as two:
        await scheduler.greet()
        await one.greet("worker", 0)
        await two.greet("worker", 1)
        await store(scheduler, [one, two], KEYS)
        cache = home.server.cache
        assert await cache.drain(5)
        assert await cache.move(KEYS[2:], "ram", "ssd") == 4
        first = await scheduler.ask(LookUp(1, join_keys(KEYS), TOKENS))
        assert isinstance(first, Found)
        assert (len(first.leases), first.fetching) == (2, 4)
        final = await scheduler.hear()
        assert isinstance(final, Found)
        assert (final.ticket, len(final.leases), final.fetching, set(final.sources)) == (1, 4, 0, {1})
        assert bytes(one.arena.view(final.offsets[0] + HEADER_BYTES, 32)) == KEYS[2]


async def test_an_engine_hears_of_each_batch_that_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "READ_BYTES", 1)
    monkeypatch.setattr(prefetch, "READS_IN_FLIGHT", 1)
    async with host(tmp_path) as home, home.peer() as scheduler, home.peer() as one, home.peer() as two:
        await scheduler.greet()
        await one.greet("worker", 0)
        await two.greet("worker", 1)
        await store(scheduler, [one, two], KEYS)
        assert await home.server.cache.drain(5)
        assert await home.server.cache.move(KEYS, "ram", "ssd") == 6
        answers = [await scheduler.ask(LookUp(1, join_keys(KEYS), TOKENS))]
        while answers[-1].fetching:
            answers.append(await scheduler.hear())
        assert [answer.fetching for answer in answers] == [6, 5, 4, 3, 2, 1, 0]
        assert [len(answer.leases) for answer in answers] == [0] * 6 + [6]


async def test_an_engine_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    async with host(tmp_path) as home:
        async with home.peer() as scheduler, home.peer() as one, home.peer() as two:
            await scheduler.greet()
            await one.greet("worker", 0)
            await two.greet("worker", 1)
            await store(scheduler, [one, two], KEYS[:3])
            await store(scheduler, [one], KEYS[3:])
            await scheduler.ask(LookUp(5, join_keys(KEYS), TOKENS))
        await home.nobody()
        assert home.server.cache.hierarchy.catalog.count(0) == 3


async def test_half_an_engine_keeps_what_it_may_still_write_to(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as worker:
        async with home.peer() as scheduler:
            await scheduler.greet()
            await worker.greet("worker", 0)
            await store(scheduler, [worker], KEYS)
            await worker.status()
        assert (await worker.status())["engines"][0]["reservations"] == 6  # type: ignore[index]


async def test_a_new_scheduler_takes_over_what_it_names(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as one, home.peer() as two:
        await one.greet("worker", 0)
        await two.greet("worker", 1)
        async with home.peer() as scheduler:
            await scheduler.greet()
            await store(scheduler, [one, two], KEYS)
            found = await scheduler.ask(LookUp(5, join_keys(KEYS), TOKENS))
            assert isinstance(found, Found)
        async with home.peer() as successor:
            await successor.greet(holding=found.leases[:2])
            assert await one.ask(Confirm(1, found.leases[:2])) == Confirmed(1, held=True)
            assert await one.ask(Confirm(2, found.leases[2:3])) == Confirmed(2, held=False)


async def test_reservations_are_refused_where_known_or_full_and_can_be_given_back(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as scheduler:
        await scheduler.greet()
        first = await scheduler.ask(Reserve(1, [Run(ROOT, join_keys(KEYS), CHUNK_TOKENS)]))
        again = await scheduler.ask(Reserve(2, [Run(ROOT, join_keys(KEYS), CHUNK_TOKENS)]))
        assert isinstance(first, Reserved)
        assert again == Reserved(2, [0] * 6, [0] * 6)
        await scheduler.say(Abandon(first.leases))
        many = chunk_keys(ROOT, list(range(CHUNK_TOKENS * 300)), CHUNK_TOKENS)
        flood = await scheduler.ask(Reserve(3, [Run(ROOT, join_keys(many), CHUNK_TOKENS)]))
        assert isinstance(flood, Reserved)
        granted = sum(map(bool, flood.leases))
        assert 0 < granted < 300
        assert not any(flood.leases[granted:])


async def test_clear_takes_one_namespace(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as scheduler, home.peer() as one, home.peer() as two:
        await scheduler.greet()
        await one.greet("worker", 0)
        await two.greet("worker", 1)
        await store(scheduler, [one, two], KEYS)
        await home.server.cache.drain(5)
        assert await scheduler.ask(Clear(1)) == Cleared(1, 6)
        assert await scheduler.ask(LookUp(2, join_keys(KEYS), TOKENS)) == Found(2, [], [], [], 0)


async def test_changes_are_told_to_who_wants_them(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as scheduler, home.peer() as one, home.peer() as two:
        await scheduler.greet(changes=True)
        await one.greet("worker", 0)
        await two.greet("worker", 1)
        reserved = await scheduler.ask(Reserve(1, [Run(ROOT, join_keys(KEYS), CHUNK_TOKENS)]))
        assert isinstance(reserved, Reserved)
        await one.say(Commit(reserved.leases))
        await two.say(Commit(reserved.leases))
        told: dict[int, bytes] = {}
        while len(told) < 2:
            changed = await scheduler.hear()
            assert isinstance(changed, Changed)
            told[changed.tier] = told.get(changed.tier, b"") + changed.stored
        assert told == {0: join_keys(KEYS), 1: join_keys(KEYS)}


async def test_an_observer_may_only_watch(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as observer:
        await observer.greet("observer")
        assert (await observer.status())["pid"] == os.getpid()
        assert isinstance(await observer.ask(LookUp(1, join_keys(KEYS), TOKENS)), Refused)


async def test_a_status_counts_the_tasks_by_name(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as observer:
        await observer.greet("observer")
        before = await tasks_of(observer)
        async with home.peer() as engine:
            await engine.greet()
            assert sum((await tasks_of(observer)).values()) > sum(before.values())
        with anyio.fail_after(60):
            while await tasks_of(observer) != before:
                await anyio.sleep(0.01)


async def tasks_of(observer: Peer) -> dict[str, int]:
    tasks = (await observer.status())["tasks"]
    assert isinstance(tasks, dict)
    return tasks


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1",
        encode(Status(1)),
        encode(Hello(999, "engine", "scheduler", 0, LAYOUT, NAMESPACE)),
        encode(Hello(protocol.VERSION, "engine", "worker", 7, LAYOUT, NAMESPACE)),
    ],
    ids=["endless", "not-msgpack", "no-hello", "wrong-version", "rank-that-is-none"],
)
async def test_nonsense_is_refused_and_others_are_served_on(tmp_path: Path, frame: bytes) -> None:
    async with host(tmp_path) as home, home.peer() as good, home.peer() as bad:
        await good.greet()
        await bad.stream.send(frame)
        assert isinstance(await bad.hear(), Refused)
        assert await good.ask(LookUp(1, join_keys(KEYS), TOKENS)) == Found(1, [], [], [], 0)


async def test_keys_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    async with host(tmp_path) as home, home.peer() as bad:
        await bad.greet()
        assert isinstance(await bad.ask(LookUp(1, join_keys(KEYS)[:-1], TOKENS)), Refused)
        assert home.server.engines == 1, "it may still be copying until it closes"


async def test_a_file_descriptor_comes_with_the_welcome_only(tmp_path: Path) -> None:
    async with host(tmp_path) as home:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5)
            await to_thread.run_sync(raw.connect, str(home.path))
            raw.sendall(encode(Hello(protocol.VERSION, "e", "observer", 0, LAYOUT, NAMESPACE)))
            _, control, _, _ = await to_thread.run_sync(raw.recvmsg, 65536, 64)
            fds = array.array("i", control[0][2])
            assert len(fds) == 1
            os.close(fds[0])
