"""A wrapper has exactly the optional capabilities of the backend that it wraps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import pytest

from kvtier.backends.base import (
    Backend,
    GetItem,
    Outcome,
    PutItem,
    SupportsArena,
    SupportsLeases,
    SupportsRegistration,
    SupportsScan,
    SupportsTTL,
)
from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.testing.faults import FaultyBackend, SlowBackend
from kvtier.tiers.breaker import GuardedBackend
from kvtier.tiers.sealed import SealedBackend
from kvtier.tiers.wrapper import WrapperBackend
from tests.backends.chunks import OK, blanks, chunks, disk, memory, opened

pytestmark = pytest.mark.anyio

WRAPPERS: list[Callable[[Backend], WrapperBackend]] = [
    WrapperBackend,
    SealedBackend,
    GuardedBackend,
    FaultyBackend,
    SlowBackend,
]


class Remote(Backend, SupportsTTL):
    """A backend with rare capabilities: one inherited, one implemented without its protocol class."""

    def __init__(self) -> None:
        self.registered: list[Arena] = []

    @property
    def ttl(self) -> float | None:
        return 60.0

    async def register(self, arena: Arena) -> None:
        self.registered.append(arena)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [False for _ in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        return [Outcome.FULL for _ in items]

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        return [Outcome.MISS for _ in items]

    async def delete(self, keys: Sequence[ChunkKey]) -> None: ...


def capabilities(backend: Backend) -> set[type]:
    every: list[type] = [SupportsScan, SupportsArena, SupportsLeases, SupportsRegistration, SupportsTTL]
    return {capability for capability in every if isinstance(backend, capability)}


@pytest.mark.parametrize("outer", WRAPPERS, ids=lambda kind: kind.__name__)
async def test_capabilities_before_and_after_open(
    outer: Callable[[Backend], WrapperBackend], tmp_path
) -> None:
    for make, expected in [
        (memory, {SupportsArena, SupportsLeases}),
        (lambda: disk(tmp_path), {SupportsScan, SupportsRegistration}),
        (Remote, {SupportsRegistration, SupportsTTL}),
    ]:
        inner = make()
        wrapper = outer(outer(inner))
        assert capabilities(inner) == capabilities(wrapper) == expected
        async with opened(wrapper):
            assert capabilities(wrapper) == expected
        assert isinstance(wrapper.inner, WrapperBackend)
        assert wrapper.inner.inner is inner


async def test_capabilities_are_those_of_the_backend() -> None:
    backend = memory()
    remote = Remote()
    wrapped = GuardedBackend(remote)
    async with opened(GuardedBackend(SealedBackend(backend))) as guarded:
        assert isinstance(guarded, SupportsArena)
        assert guarded.arena is backend.arena
        lease = guarded.arena.allocate(4096)
        guarded.adopt(b"k" * 32, lease)
        assert guarded.idle(b"k" * 32)
        assert backend.lease(b"k" * 32).offset == lease.offset
        assert isinstance(guarded, SupportsLeases)
        assert guarded.lease_all([b"k" * 32, b"l" * 32]).offsets == [lease.offset]
        assert isinstance(wrapped, SupportsRegistration)
        assert isinstance(wrapped, SupportsTTL)
        await wrapped.register(guarded.arena)
        assert remote.registered == [guarded.arena]
        assert wrapped.ttl == 60.0


def test_one_class_for_each_combination() -> None:
    assert type(GuardedBackend(memory())) is type(GuardedBackend(memory()))
    assert type(GuardedBackend(Remote())) is not type(GuardedBackend(memory()))
    assert type(GuardedBackend(memory())).__name__ == "GuardedBackend"


@pytest.mark.parametrize("order", list(permutations([SealedBackend, GuardedBackend, SlowBackend])))
async def test_wrappers_nest_in_any_order(order, tmp_path) -> None:
    backend = disk(tmp_path)
    for wrapper in order:
        backend = wrapper(backend)
    async with opened(backend):
        assert list(await backend.put(chunks([1, 2]))) == [OK, OK]
        assert list(await backend.contains([key for key, _ in chunks([1, 3])])) == [True, False]
        items = blanks([1, 2])
        assert list(await backend.get(items)) == [OK, OK]
        assert [bytes(view[256:]) for _, view in items] == [bytes(view[256:]) for _, view in chunks([1, 2])]
        assert sum([len(batch) async for batch in backend.scan()]) == 2
        await backend.delete([key for key, _ in items])
        assert not any(await backend.contains([key for key, _ in items]))


def test_scan_inner_of_a_backend_without_scan_fails() -> None:
    with pytest.raises(TypeError, match="Remote does not support"):
        WrapperBackend(Remote()).scan_inner()
