"""The optional capabilities of a backend, and of a wrapper, which has those of the backend that it wraps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from kvtier.backends.base import Backend, Capabilities, SupportsTTL
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES
from kvtier.testing.faults import FaultyBackend, SlowBackend, WrapperBackend
from kvtier.tiers.breaker import CircuitBreaker
from tests.rigs.chunks import OK, DictBackend, blanks, chunks, disk, memory, opened
from tests.rigs.composed_backends import SealedBackend, tier_over

pytestmark = pytest.mark.anyio

WRAPPERS: list[Callable[[Backend], WrapperBackend]] = [WrapperBackend, FaultyBackend, SlowBackend]


class Remote(DictBackend, SupportsTTL):
    """A backend with rare capabilities: one inherited, one implemented without its protocol class."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[Arena] = []

    @property
    def ttl(self) -> float | None:
        return 60.0

    async def register(self, arena: Arena) -> None:
        self.registered.append(arena)


def names(capabilities: Capabilities) -> set[str]:
    return {name for name, found in capabilities._asdict().items() if found is not None}


@pytest.mark.parametrize("outer", WRAPPERS, ids=lambda kind: kind.__name__)
async def test_wrapper_has_the_capabilities_of_the_backend(
    outer: Callable[[Backend], WrapperBackend], tmp_path
) -> None:
    for make, expected in [
        (memory, {"arena"}),
        (lambda: disk(tmp_path), {"scan", "registration", "check"}),
        (Remote, {"registration", "ttl"}),
    ]:
        inner = make()
        wrapper = outer(outer(inner))
        assert names(inner.capabilities()) == names(wrapper.capabilities()) == expected
        async with opened(wrapper):
            assert names(wrapper.capabilities()) == expected
        assert isinstance(wrapper.inner, WrapperBackend)
        assert wrapper.inner.inner is inner
        assert type(wrapper) is outer, "the class was made at run time"


async def test_capabilities_are_used_on_the_backend_itself() -> None:
    backend, remote = memory(), Remote()
    async with opened(WrapperBackend(backend)) as wrapper:
        found = wrapper.capabilities().arena
        assert found is backend
        assert found.arena is backend.arena
        capabilities = WrapperBackend(remote).capabilities()
        await capabilities.registration.register(found.arena)
        assert remote.registered == [found.arena]
        assert capabilities.ttl.ttl == 60.0


@pytest.mark.parametrize("order", list(permutations([SealedBackend, FaultyBackend, SlowBackend])))
async def test_wrappers_nest_in_any_order(order, tmp_path) -> None:
    backend = disk(tmp_path)
    for wrapper in order:
        backend = wrapper(backend)
    async with opened(backend):
        assert list(await backend.put(chunks([1, 2]))) == [OK, OK]
        assert list(await backend.contains([key for key, _ in chunks([1, 3])])) == [True, False]
        items = blanks([1, 2])
        assert list(await backend.get(items)) == [OK, OK]
        assert [bytes(view[HEADER_BYTES:]) for _, view in items] == [
            bytes(view[HEADER_BYTES:]) for _, view in chunks([1, 2])
        ]
        assert sum([len(batch) async for batch in backend.capabilities().scan.scan()]) == 2
        await backend.delete([key for key, _ in items])
        assert not any(await backend.contains([key for key, _ in items]))


async def test_tier_of_a_backend_without_scan_finds_nothing() -> None:
    tier = tier_over(Remote(), CircuitBreaker("doll"))
    assert [batch async for batch in tier.scan()] == []
    assert tier.available
