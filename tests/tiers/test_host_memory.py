"""Host memory: slices are adopted without a copy, and the catalog is the only index."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.backends.cpu import CpuBackend, HugePageBackend, HugePageSettings
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key
from kvtier.memory.slices import Lease
from kvtier.settings import LocalTierSettings
from kvtier.testing.noise import noise
from kvtier.tiers.host_memory import HostMemory, Reservation
from kvtier.tiers.sealer import Sealer

CAPACITY = 4 << 20
PAYLOAD = 10_000
ROOT = root_key(bytes(32))
KEYS = chunk_keys(ROOT, range(6), 1)


@pytest.fixture
def catalog() -> Catalog:
    return Catalog([LruPolicy.factory(), LruPolicy.factory()])


@pytest.fixture(params=["cpu", "hugepage"])
def memory(request: pytest.FixtureRequest, catalog: Catalog) -> Iterator[HostMemory]:
    if request.param == "cpu":
        settings = LocalTierSettings(name="ram", type="cpu", capacity=CAPACITY)
        arena = CpuBackend(settings).create_arena()
    else:
        settings = HugePageSettings(name="ram", type="hugepage", capacity=CAPACITY)
        arena = HugePageBackend(settings).create_arena()
    memory = HostMemory(settings, arena, catalog, Sealer())
    yield memory
    memory.close()
    assert memory.arena.leases == 0


def begin(memory: HostMemory, keys: list[ChunkKey], seed: bytes = b"1") -> list[Reservation]:
    """Reserve and fill slices for consecutive chunks."""
    parents = {key: parent for parent, key in zip([ROOT, *KEYS], KEYS, strict=False)}
    headers = [ChunkHeader(key, parents[key], bytes(32), PAYLOAD) for key in keys]
    leases = memory.arena.allocate_all(object_bytes(PAYLOAD), len(keys))
    for lease in leases:
        lease.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD] = noise(seed, PAYLOAD)
    return memory.begin(headers, leases)


def store(memory: HostMemory, keys: list[ChunkKey], seed: bytes = b"1") -> None:
    assert memory.adopt(begin(memory, keys, seed)) == keys


def payload(lease: Lease) -> bytes:
    return bytes(lease.view[HEADER_BYTES : HEADER_BYTES + PAYLOAD])


def test_chunk_is_adopted_without_a_copy(memory: HostMemory) -> None:
    key = KEYS[0]
    assert memory.lease(key) is None
    assert not memory.is_idle(key)
    (given,) = begin(memory, [key])
    assert memory.state(key) is State.PENDING
    assert memory.lease(key) is None
    memory.adopt([given])
    assert memory.state(key) is State.READY
    assert memory.is_idle(key)
    lease = memory.lease(key)
    assert lease.offset == given.lease.offset
    assert not memory.is_idle(key)
    assert ChunkHeader.read(lease.view, key)[0].parent == ROOT
    memory.drop([key])
    assert memory.state(key) is State.ABSENT
    assert payload(lease) == noise(b"1", PAYLOAD), "freed while leased"
    lease.release()
    assert (memory.arena.leases, memory.arena.used) == (0, 0)


def test_chunk_stored_again_is_another_one(memory: HostMemory, catalog: Catalog) -> None:
    store(memory, KEYS[:1])
    (first,) = memory.lease_ready(KEYS[:1])
    assert catalog.generation(KEYS[0]) == first.generation
    catalog.begin_generation(KEYS[:1])
    memory.drop(KEYS[:1])
    assert catalog.generation(KEYS[0]) == -1
    store(memory, KEYS[:1], b"2")
    (second,) = memory.lease_ready(KEYS[:1])
    assert catalog.generation(KEYS[0]) == second.generation != first.generation
    assert not memory.holds_at(KEYS[0], first.lease.view)
    assert memory.holds_at(KEYS[0], second.lease.view)
    assert (payload(first.lease), payload(second.lease)) == (noise(b"1", PAYLOAD), noise(b"2", PAYLOAD))
    first.lease.release()
    second.lease.release()


def test_leases_end_at_the_first_chunk_that_is_not_ready(memory: HostMemory, catalog: Catalog) -> None:
    store(memory, KEYS[:2])
    (pending,) = begin(memory, KEYS[2:3])
    store(memory, KEYS[3:])
    assert memory.absent(KEYS) == []
    rows = [catalog.row(key) for key in KEYS]
    leases = memory.lease_rows(rows)
    assert len(leases) == 2
    ready = memory.lease_ready(KEYS)
    assert [chunk.key for chunk in ready] == [*KEYS[:2], *KEYS[3:]]
    for chunk in ready:
        chunk.lease.release()
    leases.release_all()
    memory.abort(KEYS[2:3])
    pending.lease.release()
    assert memory.absent(KEYS) == [2]
    assert memory.arena.leases == 5


def test_capacity_in_use_includes_pending_chunks(memory: HostMemory) -> None:
    store(memory, KEYS[:2])
    pending = begin(memory, KEYS[2:4])
    assert (memory.count, memory.used_bytes) == (4, 4 * object_bytes(PAYLOAD))
    assert memory.excess_bytes(0) == 0
    assert memory.excess_bytes(CAPACITY) > 0
    memory.abort(KEYS[2:4])
    for reservation in pending:
        reservation.lease.release()
    assert memory.count == 2


def test_prompts_that_share_no_chunk_are_reserved_together(memory: HostMemory, catalog: Catalog) -> None:
    """Parents are known, so that a prompt is evicted from its end."""
    pending = begin(memory, KEYS[:2])
    store(memory, [KEYS[4], KEYS[5], KEYS[2], KEYS[3]])
    assert catalog.victims(0) == [KEYS[3], KEYS[2], KEYS[5], KEYS[4]]
    memory.abort(KEYS[:2])
    for reservation in pending:
        reservation.lease.release()
