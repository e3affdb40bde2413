"""Deletions that end late or fail: an object that is stored again meanwhile stays."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from kvtier.backends.base import Outcome, PutItem
from kvtier.memory.keys import ChunkKey
from kvtier.testing.backend import make_key
from tests.rigs.chunks import FULL, OK, DictBackend, chunks
from tests.rigs.clock import Clock
from tests.rigs.composed_backends import TierBackend

pytestmark = pytest.mark.anyio


class Medium(DictBackend):
    """Deletes as soon as it may, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.may_delete = anyio.Event()
        self.refuses = self.full = False

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        if self.refuses:
            raise PermissionError("nothing may be deleted here")
        await self.may_delete.wait()
        await super().delete(keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        return [FULL] * len(items) if self.full else await super().put(items)


async def test_object_that_is_being_deleted_is_stored_after_that() -> None:
    medium = Medium()
    tier = TierBackend(medium)
    await tier.open()
    await tier.put(chunks([1, 2]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tier.delete, [make_key(1)])
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(tier.put, chunks([1]))
        assert await tier.put(chunks([2, 3])) == [OK, OK], "others do not wait"
        await anyio.wait_all_tasks_blocked()
        medium.may_delete.set()
    assert medium.held.keys() == {make_key(1), make_key(2), make_key(3)}


@pytest.mark.parametrize("stored", [True, False])
async def test_object_that_could_not_be_deleted_stays_if_it_is_stored_again(*, stored: bool) -> None:
    """Otherwise it is deleted, however late."""
    medium, clock = Medium(), Clock()
    medium.may_delete.set()
    tier = TierBackend(medium, retry_seconds=30.0, clock=clock)
    await tier.open()
    await tier.put(chunks([1]))
    medium.refuses = True
    await tier.delete([make_key(1)])
    await tier.contains([make_key(2)])  # Tries once more, and then not for some time.
    medium.full = not stored
    assert list(await tier.put(chunks([1]))) == [OK if stored else FULL]
    medium.refuses, clock.now = False, clock.now + 60.0
    await tier.contains([make_key(2)])
    assert (make_key(1) in medium.held) == stored
