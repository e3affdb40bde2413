"""Leases and reservations of an engine, compared with a model, and invalid messages."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from kvtier import Settings, hookimpl
from kvtier.backends.base import Backend
from kvtier.backends.cpu import MemoryBackend
from kvtier.bridge import protocol
from kvtier.bridge.protocol import Abandon, Found, Hello, Lookup, Reserve, Reserved, Run
from kvtier.bridge.server import BridgeServer, Connection
from kvtier.bridge.session import EngineSession
from kvtier.catalog.catalog import State
from kvtier.catalog.hints import ChunkHints
from kvtier.errors import ProtocolError
from kvtier.instance import Instance
from kvtier.memory.header import ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey, chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.memory.slices import Lease, Slices
from kvtier.peers.staging.buffers import EngineStaging
from kvtier.plugins import Plugins
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import encode_body
from kvtier.rpc.wire import Wire
from kvtier.tiers.planner import FIRST
from tests.rigs.engine_sessions import NAMESPACE, ROOT, engine_of, session

pytestmark = pytest.mark.anyio

CHUNK_TOKENS = 64
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(16, (1024,)),))
OBJECT_BYTES = object_bytes(LAYOUT.payload_bytes(CHUNK_TOKENS))
KEYS = chunk_keys(ROOT, range(CHUNK_TOKENS * 12), CHUNK_TOKENS)


def reserve(
    engine: EngineSession, keys: list[ChunkKey], parent: ChunkKey = ROOT, last: int = CHUNK_TOKENS
) -> Reserved:
    return engine.reserve(Reserve(1, [Run(parent, join_keys(keys), last)]))


def store(engine: EngineSession, keys: list[ChunkKey]) -> None:
    engine.commit([lease for lease in reserve(engine, keys).leases if lease], 0)


def look_up(engine: EngineSession, ticket: int, keys: list[ChunkKey]) -> Found:
    found, _ = engine.look_up(Lookup(ticket, join_keys(keys), len(keys) * CHUNK_TOKENS))
    assert not found.fetching
    return found


# Leases.


async def test_leases_are_released_singly_and_in_bulk() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS)
        first, second = look_up(engine, 1, KEYS), look_up(engine, 2, KEYS)
        assert len({*first.leases, *second.leases}) == 24
        assert first.offsets == second.offsets
        assert cache.arena.leases == 36
        engine.reads.release(first.leases[3:5])
        assert engine.reads.holds(first.leases[:3] + first.leases[5:])
        assert not engine.reads.holds(first.leases[3:4])
        engine.reads.release(first.leases)
        engine.reads.release(first.leases)
        assert cache.arena.leases == 24
        engine.reads.release(second.leases)
        assert engine.status()["tickets"] == 0
        assert cache.arena.leases == 12


async def test_leases_of_several_lookups_are_held_in_any_order_and_part() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS)
        first, second = look_up(engine, 1, KEYS), look_up(engine, 2, KEYS)
        every = first.leases + second.leases
        for leases in (every, every[::-1], every[3:15], every[12:] + every[:5], every[4:7], []):
            assert engine.reads.holds(leases)
        assert not engine.reads.holds([*every, max(every) + 1])
        assert not engine.reads.holds([min(every) - 1, *every])
        engine.reads.release(every[10:14])
        assert cache.arena.leases == 12 + 20
        assert [engine.reads.holds([lease]) for lease in every] == [True] * 10 + [False] * 4 + [True] * 10
        assert not engine.reads.holds(every)
        engine.reads.cancel(1)
        assert engine.reads.holds(every[14:])
        assert not engine.reads.holds(every[9:10])
        assert len(engine.reads) == 10


async def test_unknown_lease_numbers_are_ignored() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS)
        found = look_up(engine, 1, KEYS)
        engine.reads.release([0, -1, 10**18, found.leases[0], found.leases[0]])
        assert cache.arena.leases == 12 + 11
        assert not engine.reads.holds([found.leases[0]])
        engine.reads.cancel(1)
        engine.reads.cancel(1)
        assert cache.arena.leases == 12


async def test_reused_ticket_is_a_new_lookup() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS)
        first, second = look_up(engine, 1, KEYS), look_up(engine, 1, KEYS[:3])
        engine.reads.release(first.leases)
        assert (cache.arena.leases, engine.status()["tickets"]) == (15, 1)
        engine.reads.cancel(1)
        assert not engine.reads.holds(second.leases[:1])
        assert (cache.arena.leases, engine.status()["tickets"]) == (12, 0)


async def test_random_operations_match_a_model() -> None:
    """Random lookups, releases in any order, cancellations and reconnects."""
    rng = random.Random(7)
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS)
        held: dict[int, set[int]] = {}
        for ticket in range(1, 400):
            found = look_up(engine, ticket, KEYS[: rng.randint(1, len(KEYS))])
            held[ticket] = set(found.leases)
            all_leases = sorted(set().union(*held.values()))
            operation = rng.randrange(6)
            if operation == 0:
                released = set(rng.sample(all_leases, rng.randint(0, len(all_leases))))
                engine.reads.release(rng.sample(sorted(released), len(released)))
            elif operation == 1:
                released = set(found.leases)
                engine.reads.release(found.leases)
            elif operation == 2:
                released = set(all_leases) - set(retained := rng.sample(all_leases, len(all_leases) // 2))
                engine.reads.release_all(but=retained)
            elif operation == 3:
                cancelled = rng.choice(sorted(held))
                released = held[cancelled]
                engine.reads.cancel(cancelled)
            else:
                released = set()
            held = {number: remaining for number, leases in held.items() if (remaining := leases - released)}
            status = engine.status()
            assert status["tickets"] == len(held)
            assert status["leases"] == sum(map(len, held.values()))
            assert engine.reads.holds([lease for leases in held.values() for lease in leases])
            assert not any(engine.reads.holds([lease]) for lease in released)
            assert cache.arena.leases == 12 + sum(map(len, held.values()))


async def test_memory_is_freed_with_the_last_lease() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS)
        found = look_up(engine, 1, KEYS)
        await cache.clear(KEYS)
        assert cache.arena.used == 12 * OBJECT_BYTES
        engine.reads.release(found.leases[:5])
        assert cache.arena.used == 7 * OBJECT_BYTES
        engine.reads.release(found.leases[5:])
        assert (cache.arena.used, len(cache.arena._free_by_start)) == (0, 1)


# Leases in a staging buffer.


class Buffer:
    """A staging buffer that holds pushed chunks."""

    number = 7
    closed = False

    def __init__(self, engine: EngineSession, keys: list[ChunkKey]) -> None:
        self.slices = Slices(1 << 20)
        self.chunks = {key: lease for key in keys if (lease := self.slices.allocate(4096))}
        engine.staging = cast("EngineStaging", SimpleNamespace(current=self))

    def find(self, key: ChunkKey) -> Lease | None:
        lease = self.chunks.get(key)
        return None if lease is None else lease.share()

    def drop(self, key: ChunkKey) -> None:
        lease = self.chunks.pop(key, None)
        if lease is not None:
            lease.release()


async def test_arena_and_buffer_leases_interleave_and_are_released_together() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS[:3])
        store(engine, KEYS[6:])
        buffer = Buffer(engine, KEYS[3:6])
        found = look_up(engine, 1, KEYS)
        assert found.sources == [FIRST] * 3 + [1] * 3 + [FIRST] * 6
        assert found.staging == 7
        assert found.offsets[3:6] == [0, 4096, 8192]
        assert engine.reads.holds(found.leases)
        assert (cache.arena.leases, buffer.slices.leases) == (18, 6)
        engine.reads.release(found.leases)
        assert (cache.arena.leases, cache.arena.used) == (9, 9 * OBJECT_BYTES)
        assert (buffer.slices.leases, buffer.slices.used, len(buffer.slices._free_by_start)) == (0, 0, 1)
        assert engine.status()["tickets"] == 0
        assert look_up(engine, 2, KEYS).sources == [FIRST] * 3


async def test_staged_chunk_is_removed_when_its_lease_is_released() -> None:
    async with engine_of(LAYOUT) as (engine, _):
        buffer = Buffer(engine, KEYS)
        first, second = look_up(engine, 1, KEYS), look_up(engine, 2, KEYS)
        engine.reads.release(first.leases[2:4])
        assert sorted(buffer.chunks) == sorted(KEYS[:2] + KEYS[4:])
        assert engine.reads.holds(second.leases)
        assert len(look_up(engine, 3, KEYS).leases) == 2
        engine.reads.cancel(1)
        assert (buffer.chunks, buffer.slices.leases) == ({}, 12 + 2)
        engine.reads.release_all()
        assert (buffer.slices.leases, buffer.slices.used) == (0, 0)


async def test_leases_do_not_outlive_their_buffer() -> None:
    async with engine_of(LAYOUT) as (engine, _):
        store(engine, KEYS[:3])
        buffer = Buffer(engine, KEYS[3:6])
        found = look_up(engine, 1, KEYS[:6])
        assert engine.reads.holds(found.leases)
        buffer.closed = True
        assert engine.reads.holds(found.leases[:3])
        assert not engine.reads.holds(found.leases[3:4])
        assert not engine.reads.holds(found.leases)
        engine.reads.release(found.leases)


# Reservations.


async def test_reserved_chunks_have_headers_and_are_pending_in_order() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        reserved = reserve(engine, KEYS, last=10)
        assert all(reserved.leases)
        for at, (key, offset) in enumerate(zip(KEYS, reserved.offsets, strict=True)):
            header = ChunkHeader.parse(cache.arena.view(offset, OBJECT_BYTES))
            tokens = CHUNK_TOKENS if at < 11 else 10
            parent = KEYS[at - 1] if at else ROOT
            assert header == ChunkHeader(key, parent, NAMESPACE, LAYOUT.payload_bytes(tokens), b"", tokens)
            assert cache.catalog.state(key, FIRST) is State.PENDING
        engine.commit(reserved.leases, 0)
        assert cache.catalog.victims(FIRST) == KEYS[::-1]
        assert cache.catalog.keys(FIRST, NAMESPACE) == KEYS


async def test_hints_are_stored_with_the_chunks_and_replaced_by_lookups() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        catalog = cache.catalog
        runs = [
            Run(ROOT, join_keys(KEYS[:2]), CHUNK_TOKENS, hints=ChunkHints(priority=1)),
            Run(KEYS[1], join_keys(KEYS[2:4]), CHUNK_TOKENS, hints=ChunkHints(priority=2)),
            Run(KEYS[3], join_keys(KEYS[4:6]), CHUNK_TOKENS),
        ]
        engine.commit(engine.reserve(Reserve(1, runs)).leases, 0)

        def priorities() -> list[int]:
            return [catalog.columns.hints.priority(catalog.row(key)) for key in KEYS[:6]]

        assert priorities() == [1, 1, 2, 2, 0, 0]
        look_up(engine, 1, KEYS[:6])
        assert priorities() == [1, 1, 2, 2, 0, 0]
        engine.look_up(Lookup(2, join_keys(KEYS[:5]), 5 * CHUNK_TOKENS, hints=ChunkHints(priority=7)))
        assert priorities() == [7, 7, 7, 7, 7, 0]


async def test_held_and_duplicate_chunks_are_refused() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, KEYS[3:6])
        granted = reserve(engine, KEYS).leases
        assert [bool(lease) for lease in granted] == [True] * 3 + [False] * 3 + [True] * 6
        engine.writes.abandon(granted)
        engine.writes.abandon(granted)
        repeated = reserve(engine, [KEYS[0], KEYS[1], KEYS[0], KEYS[1]]).leases
        assert [bool(lease) for lease in repeated] == [True, True, False, False]
        engine.writes.abandon(repeated)
        counts = cache.counts
        assert (counts["store_known"], counts["store_aborted"]) == (5, 11)
        assert cache.arena.used == 3 * OBJECT_BYTES
        assert len(cache.catalog) == 3


@pytest.mark.parametrize(("state", "awaited"), [(False, False), (True, False), (False, True)])
async def test_chunks_are_declined_except_of_models_with_states_and_for_decode_instances(
    state: bool, awaited: bool
) -> None:
    """A state needs its chunks, and these are useless without it."""
    groups = (GroupLayout(16, (1024,)), *([GroupLayout(16, (1024,), state=True)] if state else []))
    async with engine_of(ChunkLayout(CHUNK_TOKENS, groups), "1MiB", eviction="resume") as (engine, cache):
        keys = chunk_keys(ROOT, range(CHUNK_TOKENS * 200), CHUNK_TOKENS)
        worthy = Run(ROOT, join_keys(keys), CHUNK_TOKENS, hints=ChunkHints(priority=100))
        engine.commit([lease for lease in engine.reserve(Reserve(1, [worthy])).leases if lease], 0)
        others = chunk_keys(root_key(bytes(32)), range(CHUNK_TOKENS * 4), CHUNK_TOKENS)
        worthless = Run(
            ROOT, join_keys(others), CHUNK_TOKENS, hints=ChunkHints(priority=-100), awaited=awaited
        )
        leases = engine.reserve(Reserve(2, [worthless])).leases
        assert [bool(lease) for lease in leases] == [state or awaited] * 4
        assert cache.counts["store_declined"] == (0 if state or awaited else 4)


async def test_memory_is_kept_while_another_rank_may_write() -> None:
    layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(16, (1024,)),), ranks=2)
    async with engine_of(layout) as (engine, cache):
        lost, stored = reserve(engine, KEYS[:2]).leases
        engine.writes.give_up([lost], 1)
        engine.commit([stored], 1)
        assert cache.arena.leases == 2
        engine.commit([lost, stored], 0)
        assert cache.arena.leases == 1
        assert cache.catalog.state(KEYS[0], FIRST) is State.ABSENT
        assert cache.catalog.state(KEYS[1], FIRST) is State.READY


async def test_reserve_evicts_cold_chunks_and_ends_at_capacity() -> None:
    async with engine_of(LAYOUT, "1MiB") as (engine, cache):
        fitting = cache.arena.capacity // OBJECT_BYTES
        keys = chunk_keys(ROOT, range(CHUNK_TOKENS * (fitting + 5)), CHUNK_TOKENS)
        reserved = reserve(engine, keys)
        assert [bool(lease) for lease in reserved.leases] == [True] * fitting + [False] * 5
        assert cache.counts["store_dropped"] == 5
        engine.commit(reserved.leases, 0)
        others = chunk_keys(root_key(bytes(32)), range(CHUNK_TOKENS * 4), CHUNK_TOKENS)
        assert all(reserve(engine, others).leases)
        assert cache.catalog.prefix(keys) == [FIRST] * (fitting - 4)


@pytest.mark.parametrize("last", [0, -1, CHUNK_TOKENS + 1, 2**62])
async def test_invalid_size_of_last_chunk_is_refused(last: int) -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        with pytest.raises(ProtocolError, match="invalid run"):
            reserve(engine, KEYS, last=last)
        assert (cache.arena.used, len(cache.catalog)) == (0, 0)


@pytest.mark.parametrize("parent", [b"", bytes(31), bytes(33)])
async def test_invalid_parent_key_is_refused(parent: bytes) -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        with pytest.raises(ProtocolError, match="invalid run"):
            reserve(engine, KEYS, parent=ChunkKey(parent))
        assert (cache.arena.used, len(cache.catalog)) == (0, 0)


# Backends and scheduling.


class PluginMemory(MemoryBackend):
    """Host memory of a plugin."""


class MemoryPlugin:
    @hookimpl
    def kvtier_backends(self) -> dict[str, type[Backend]]:
        return {"mine": PluginMemory}


async def test_memory_of_a_plugin_can_be_the_first_tier() -> None:
    plugins = Plugins.load([])
    plugins.register(MemoryPlugin(), "mine", "a test")
    async with engine_of(LAYOUT, type="mine", plugins=plugins) as (engine, cache):
        store(engine, KEYS)
        found = look_up(engine, 1, KEYS)
        assert found.offsets == look_up(engine, 2, KEYS).offsets
        assert engine.reads.holds(found.leases)
        assert cache.arena.leases == 36


async def test_flooding_engine_does_not_starve_other_tasks() -> None:
    """Neither its reads nor its replies ever block, so the server must yield."""

    hello = Hello(protocol.VERSION, "engine", "scheduler", 0, LAYOUT, NAMESPACE)

    class Flood(Wire):
        unsent = 0

        def __init__(self) -> None:
            self.first = iter([[encode_body(hello)]])
            self.replies = 0

        async def receive(self) -> list[bytes]:
            return next(self.first, [encode_body(Abandon([1])), encode_body(Lookup(1, b"", 0))])

        def write(self, body: bytes, fds: object = ()) -> None:
            self.replies += 1

        def flush_now(self) -> None:
            pass

        async def flush(self) -> None:
            pass

        def close(self) -> None:
            pass

    settings = Settings(chunk_tokens=CHUNK_TOKENS, tiers=[{"name": "ram", "type": "cpu", "capacity": "1MiB"}])
    flood = Flood()
    async with Instance.open(settings) as instance, anyio.create_task_group() as tasks:
        endpoint = Endpoint(flood, protocol.decode_from_engine)
        tasks.start_soon(Connection(BridgeServer(instance), endpoint, tasks).serve)
        while flood.replies < 20:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_engine_reserves_at_most_its_share() -> None:
    """Known chunks need no memory, and what is stored or given up counts no more."""
    async with engine_of(LAYOUT, f"{16 * OBJECT_BYTES}B", reserve_share=0.25) as (engine, cache):
        first = reserve(engine, KEYS)
        assert [bool(lease) for lease in first.leases] == [True] * 4 + [False] * 8
        assert cache.counts["store_dropped"] == 8
        other = session(cache, LAYOUT, first_lease=100)
        assert all(reserve(other, KEYS[4:8], KEYS[3]).leases), "the share is that of each engine"
        other.close()
        engine.commit(first.leases[:3], 0)
        engine.writes.abandon(first.leases[3:4])
        second = reserve(engine, KEYS)
        assert [bool(lease) for lease in second.leases] == [False] * 3 + [True] * 4 + [False] * 5
        assert engine.writes.reserved_bytes == 4 * OBJECT_BYTES


async def test_engine_may_always_reserve_one_chunk() -> None:
    """A share that is smaller than a chunk would keep it from storing any."""
    async with engine_of(LAYOUT, f"{16 * OBJECT_BYTES}B", reserve_share=0.01) as (engine, _):
        assert [bool(lease) for lease in reserve(engine, KEYS[:2]).leases] == [True, False]
        assert not any(reserve(engine, KEYS[1:2], KEYS[0]).leases)
        engine.commit([1], 0)
        assert all(reserve(engine, KEYS[1:2], KEYS[0]).leases)
        engine.writes.void_all()
