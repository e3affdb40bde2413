"""The bridge server with scripted engines, in one event loop."""

from __future__ import annotations

import array
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from kvtier.bridge import protocol, server, watched
from kvtier.bridge.protocol import (
    Abandon,
    Cancel,
    Clear,
    Cleared,
    Confirm,
    Confirmed,
    Explained,
    Found,
    Held,
    Hello,
    Leave,
    Lookup,
    Notice,
    RequestInfo,
    Reserve,
    Reserved,
    Run,
    Status,
    Watch,
)
from kvtier.catalog.misses import MissReason
from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys, split_keys
from kvtier.rpc.frames import Ping, Pong, Refused, encode
from kvtier.tiers import batches
from tests.rigs.scripted_engine import (
    CHUNK_TOKENS,
    KEYS,
    LAYOUT,
    NAMESPACE,
    ROOT,
    TOKENS,
    Peer,
    open_host,
    store,
)
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

logger = logging.getLogger("kvtier.test_server")


async def test_instance_tracks_models_of_its_engines(tmp_path: Path) -> None:
    model = EngineModel(["llama"], TokenizerSource("/models/llama"))
    async with open_host(tmp_path) as host:
        served = host.instance.served
        async with host.peer() as worker, host.peer() as scheduler:
            await worker.greet("worker")
            assert (served.engines, served.models) == (["engine"], [])
            await scheduler.greet(model=model)
            assert [(model.names, model.namespace) for model in served.models] == [(["llama"], NAMESPACE)]
            assert served.tokenizer(NAMESPACE) == model.tokenizer
        await host.wait_until_idle()
        assert (served.engines, len(served.models)) == ([], 1)


async def test_chunks_are_found_once_every_rank_has_committed(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        leases = await store(scheduler, workers[:1], KEYS)
        assert all(leases)
        assert await scheduler.look_up(KEYS, 5) == Found(5, [], [], [], 0)
        await workers[1].commit(leases)
        found = await scheduler.look_up(KEYS, 6)
        assert (len(found.leases), found.fetching, set(found.sources)) == (6, 0, {0})
        assert bytes(workers[0].arena.view(found.offsets[2] + HEADER_BYTES, 32)) == KEYS[2]
        assert await workers[0].request(Confirm(7, found.leases)) == Confirmed(7, held=True)
        await scheduler.send(Cancel(6))
        assert await scheduler.request(Confirm(8, found.leases[:1])) == Confirmed(8, held=False)
        assert (await scheduler.status())["engines"] == [
            {"name": "engine", "weights_id": "", "leases": 0, "reservations": 0, "tickets": 0}
        ]


async def test_chunks_on_disk_are_promoted_and_reported(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await store(scheduler, workers, KEYS)
        cache = host.server.cache
        assert await cache.drain(5)
        assert await cache.move(KEYS[2:], "ram", "ssd") == 4
        first = await scheduler.look_up(KEYS)
        assert (len(first.leases), first.fetching) == (2, 4)
        final = await scheduler.receive(Found)
        assert (final.ticket, len(final.leases), final.fetching, set(final.sources)) == (1, 4, 0, {1})
        assert bytes(workers[0].arena.view(final.offsets[0] + HEADER_BYTES, 32)) == KEYS[2]


async def test_lookups_that_follow_do_not_wait_for_explanations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a reservation, which changes what is held."""
    monkeypatch.setattr(server, "EXPLAIN_SECONDS", 3600.0)
    async with open_host(tmp_path) as host, host.engine() as (scheduler, _):
        for ticket, key in enumerate(KEYS[:3], 1):
            answer = await scheduler.request(
                Lookup(ticket, join_keys([key]), CHUNK_TOKENS, described=RequestInfo())
            )
            assert answer == Found(ticket, [], [], [], 0)
        await scheduler.send(Reserve(9, [Run(ROOT, join_keys(KEYS[:1]), CHUNK_TOKENS)]))
        explained = await scheduler.receive(Explained)
        assert [explanation.ticket for explanation in explained.lookups] == [1, 2, 3]
        assert len((await scheduler.receive(Reserved)).granted) == 1


async def test_chunk_that_another_engine_has_stored_since_was_being_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the answer and its explanation."""
    monkeypatch.setattr(server, "EXPLAIN_SECONDS", 3600.0)
    async with (
        open_host(tmp_path) as host,
        host.engine() as (scheduler, _),
        host.engine("other") as (other, workers),
    ):
        assert await scheduler.look_up(KEYS[:1], described=RequestInfo()) == Found(1, [], [], [], 0)
        await store(other, workers, KEYS[:1])
        await scheduler.send(Reserve(9, []))
        explained = await scheduler.receive(Explained)
        assert [miss.reason for miss in explained.lookups[0].misses] == [MissReason.BEING_STORED]


async def test_engine_is_notified_of_each_arrived_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BATCH_BYTES", 1)
    monkeypatch.setattr(batches, "IN_FLIGHT", 1)
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await store(scheduler, workers, KEYS)
        assert await host.server.cache.drain(5)
        assert await host.server.cache.move(KEYS, "ram", "ssd") == 6
        answers = [await scheduler.look_up(KEYS)]
        while answers[-1].fetching:
            answers.append(await scheduler.receive())
        assert [answer.fetching for answer in answers] == [6, 5, 4, 3, 2, 1, 0]
        assert [len(answer.leases) for answer in answers] == [0] + [1] * 6, "each is granted as it arrives"
        assert [answer.pending_sources for answer in answers] == [
            [(1, count)] for count in (6, 5, 4, 3, 2, 1)
        ] + [[]]


async def test_lookup_is_cancelled_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While chunks are in flight, or when all have arrived."""
    monkeypatch.setattr(batches, "BATCH_BYTES", 1)
    monkeypatch.setattr(batches, "IN_FLIGHT", 1)
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await store(scheduler, workers, KEYS)
        assert await host.server.cache.drain(5)
        assert await host.server.cache.move(KEYS[1:], "ram", "ssd") == 5
        answer = await scheduler.look_up(KEYS)
        granted = 0
        while answer.fetching:
            answer = await scheduler.receive()
            granted += len(answer.leases)
        assert granted == 5
        await scheduler.send(Cancel(1))
        assert await host.server.cache.move(KEYS[1:], "ram", "ssd") == 5
        first = await scheduler.look_up(KEYS, 2)
        assert (len(first.leases), first.fetching) == (1, 5)
        await scheduler.receive()
        await scheduler.send(Cancel(2))
        while (status := (await scheduler.status()))["flights"]:
            pass
        assert [(engine["leases"], engine["tickets"]) for engine in status["engines"]] == [(0, 0)]
        assert status["arena"]["leases"] == 6, "only those of the first tier"


async def test_disconnected_engine_leaks_nothing(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        async with host.engine() as (scheduler, workers):
            await store(scheduler, workers, KEYS[:3])
            await store(scheduler, workers[:1], KEYS[3:])
            await scheduler.look_up(KEYS, 5)
            for worker in workers:  # This process lives on.
                await worker.send(Leave())
        await host.wait_until_idle()
        assert host.server.cache.catalog.count(0) == 3


async def test_reservations_are_kept_while_a_worker_is_connected(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("worker") as worker:
        async with host.peer("scheduler") as scheduler:
            await store(scheduler, [worker], KEYS)
        assert (await worker.status())["engines"][0]["reservations"] == 6


async def test_new_scheduler_takes_over_the_leases_it_names(tmp_path: Path) -> None:
    async with (
        open_host(tmp_path) as host,
        host.peer("worker", 0) as worker0,
        host.peer("worker", 1) as worker1,
    ):
        async with host.peer("scheduler") as scheduler:
            await store(scheduler, [worker0, worker1], KEYS)
            found = await scheduler.look_up(KEYS, 5)
        async with host.peer("scheduler", holding=found.leases[:2]):
            assert await worker0.request(Confirm(1, found.leases[:2])) == Confirmed(1, held=True)
            assert await worker0.request(Confirm(2, found.leases[2:3])) == Confirmed(2, held=False)


async def test_reservations_of_known_chunks_or_beyond_capacity_are_refused(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        first = await scheduler.reserve(KEYS)
        repeated = await scheduler.reserve(KEYS, ticket=2)
        assert isinstance(first, Reserved)
        assert repeated == Reserved(2, [0] * 6, [0] * 6)
        await scheduler.send(Abandon(first.leases))
        many = chunk_keys(ROOT, list(range(CHUNK_TOKENS * 300)), CHUNK_TOKENS)
        oversized = await scheduler.reserve(many, ticket=3)
        granted = sum(map(bool, oversized.leases))
        assert 0 < granted < 300
        assert not any(oversized.leases[granted:])


async def test_clear_removes_one_namespace(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await store(scheduler, workers, KEYS)
        await host.server.cache.drain(5)
        assert await scheduler.request(Clear(1)) == Cleared(1, 6)
        assert await scheduler.look_up(KEYS, 2) == Found(2, [], [], [], 0)


async def held_until(
    scheduler: Peer, done: Callable[[dict[ChunkKey, int]], bool], held: dict[ChunkKey, int] | None = None
) -> dict[ChunkKey, int]:
    """Receive reports until they satisfy a condition; return the last tiers of each chunk."""
    held = {} if held is None else held
    while not done(held):
        message = await scheduler.receive(Held)
        held.update(zip(split_keys(message.keys), message.tiers, strict=True))
    return held


async def test_tiers_of_watched_chunks_are_reported(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await scheduler.send(Watch(join_keys(KEYS[:2])))
        await store(scheduler, workers, KEYS)
        both = dict.fromkeys(KEYS[:2], 0b11)
        assert await held_until(scheduler, lambda held: held == both) == both
        # What is held already is reported as well, and a chunk that nobody watches is not.
        await scheduler.send(Watch(join_keys(KEYS[2:3]), join_keys(KEYS[:1])))
        held = await held_until(scheduler, lambda held: KEYS[2] in held)
        assert held == {KEYS[2]: 0b11}
        await scheduler.send(Clear(2))
        held = {}
        while held != dict.fromkeys(KEYS[1:3], 0):
            message = await scheduler.receive()
            if isinstance(message, Held):
                held.update(zip(split_keys(message.keys), message.tiers, strict=True))
        assert KEYS[0] not in held


async def test_chunks_are_reported_in_the_order_in_which_they_are_watched(tmp_path: Path) -> None:
    """Routers ignore a block whose parent they do not know."""
    async with open_host(tmp_path) as host, host.engine() as (scheduler, workers):
        await store(scheduler, workers, KEYS)
        await scheduler.send(Watch(join_keys(KEYS)))
        message = await scheduler.receive(Held)
        assert split_keys(message.keys) == KEYS


async def test_watching_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MAX_WATCHED_CHUNKS", 4)
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        await scheduler.send(Watch(join_keys(KEYS[:4])))
        await scheduler.send(Watch(join_keys(KEYS[4:6]), join_keys(KEYS[:2])))
        assert await scheduler.status()
        refused = await scheduler.request(Watch(join_keys(KEYS[:1])), Refused)
        assert "the scheduler watches more than 4 chunks" in refused.reason


@pytest.mark.parametrize("user", [os.getuid(), 0, 4711])
async def test_only_this_user_and_root_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, user: int
) -> None:
    monkeypatch.setattr(server, "peer_credentials", lambda _: (1, user))
    async with open_host(tmp_path) as host, host.peer() as engine:
        if user in (0, os.getuid()):
            await engine.greet()
            return
        with pytest.raises(anyio.EndOfStream):
            await engine.receive()
        assert "rejected a connection of user 4711" in caplog.text
        await until(lambda: not host.connections)


async def test_observer_may_only_query_status(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("observer") as observer:
        assert (await observer.status())["pid"] == os.getpid()
        await observer.request(Lookup(1, join_keys(KEYS), TOKENS), Refused)


async def test_status_counts_tasks_by_name(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("observer") as observer:
        before = (await observer.status())["tasks"]
        async with host.peer("scheduler"):
            assert sum((await observer.status())["tasks"].values()) > sum(before.values())
        with anyio.fail_after(60):
            while (await observer.status())["tasks"] != before:
                await anyio.sleep(0.01)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1",
        encode(Status(1)),
        encode(Hello(999, "engine", "scheduler", 0, LAYOUT, NAMESPACE)),
        encode(Hello(protocol.VERSION, "engine", "worker", 7, LAYOUT, NAMESPACE)),
    ],
    ids=["endless", "not-msgpack", "no-hello", "wrong-version", "invalid-rank"],
)
async def test_invalid_frame_is_refused_and_others_are_served(tmp_path: Path, frame: bytes) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as healthy, host.peer() as faulty:
        await faulty.stream.send(frame)
        await faulty.receive(Refused)
        assert await healthy.look_up(KEYS) == Found(1, [], [], [], 0)


async def test_truncated_keys_are_refused(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as faulty:
        await faulty.request(Lookup(1, join_keys(KEYS)[:-1], TOKENS), Refused)
        assert host.server.engines == 1, "it may still be copying until it disconnects"


async def test_refused_engine_keeps_its_leases_until_it_disconnects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still be copying."""
    async with open_host(tmp_path) as host:
        async with host.peer("scheduler") as scheduler, host.peer("observer") as observer:
            await scheduler.reserve(KEYS)
            await scheduler.request(Reserve(2, [Run(ROOT, b"?", 1)]), Refused)
            assert "rejected an engine: " in caplog.text
            for _ in range(10):
                await scheduler.send(Lookup(1, join_keys(KEYS), TOKENS))
                assert (await observer.status())["engines"] == [
                    {
                        "name": "engine",
                        "weights_id": "",
                        "leases": 0,
                        "reservations": len(KEYS),
                        "tickets": 0,
                    }
                ]
        await host.wait_until_idle()


async def test_engine_with_invalid_rank_leaves_nothing(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer() as faulty:
        await faulty.send(Hello(protocol.VERSION, "engine", "worker", 7, LAYOUT, NAMESPACE))
        await faulty.receive(Refused)
        assert host.server.engines == 0


@pytest.mark.parametrize("role", ["scheduler", "worker", "observer"])
async def test_pings_are_answered(tmp_path: Path, role: protocol.Role) -> None:
    async with open_host(tmp_path) as host, host.peer(role) as engine:
        assert await engine.request(Ping(5)) == Pong(5)


async def test_notifications_are_sent_during_a_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        cleared, clear = anyio.Event(), host.server.cache.clear

        async def slow_clear(**options: Any) -> Any:
            logger.warning("clearing")
            await cleared.wait()
            return await clear(**options)

        monkeypatch.setattr(host.server.cache, "clear", slow_clear)
        with host.server.notices.listening(logger):
            assert await scheduler.request(Clear(1)) == Notice("clearing")
        cleared.set()
        assert await scheduler.receive() == Cleared(1, 0)


async def test_engine_that_does_not_read_is_waited_for(tmp_path: Path) -> None:
    """It may be stopped, and still be copying."""
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        (connection,) = host.server._connections["engine"]
        notices = 64
        sent = 0

        async def notify() -> None:
            nonlocal sent
            await connection.notify(Notice("x" * (1 << 20)))
            sent += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(notices):
                tasks.start_soon(notify)
            await anyio.sleep(0.2)
            assert 0 < sent < 8
            assert host.server.engines == 1
            for _ in range(notices):
                await scheduler.receive(Notice)
        assert await scheduler.request(Ping(1)) == Pong(1)


async def test_descriptor_is_sent_with_welcome_only(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(5)
            await to_thread.run_sync(raw.connect, str(host.path))
            raw.sendall(encode(Hello(protocol.VERSION, "e", "observer", 0, LAYOUT, NAMESPACE)))
            _, control, _, _ = await to_thread.run_sync(raw.recvmsg, 65536, 64)
            fds = array.array("i", control[0][2])
            assert len(fds) == 1
            os.close(fds[0])
