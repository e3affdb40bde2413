"""Backends of type ``s3``, and values for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread

from kvtier.backends.base import Backend, Outcome, PutItem
from kvtier.backends.s3 import S3Backend, S3Settings
from kvtier.testing.backend import blank, make_key, noise, same

OK, MISS, FULL, FAILED = Outcome.OK, Outcome.MISS, Outcome.FULL, Outcome.FAILED

MIB = 1 << 20
LONG = 12 * MIB + 1
"""Transferred in three parts, the last one short."""


def make(**settings: Any) -> S3Backend:
    # 5 MiB is S3's minimum.
    given = {"name": "pool", "type": "s3", "deadline": 20, "part_size": "5MiB", **settings}
    return S3Backend(S3Settings(**given))


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[S3Backend]:
    backend = make(**settings)
    await backend.open()
    yield backend
    await backend.close()


async def values(count: int, size: int, seed: int = 0) -> list[PutItem]:
    """Return keys 0, 1, 2, … with values of ``size`` bytes."""

    def make_all() -> list[PutItem]:
        return [(make_key(number), _value(number, size, seed)) for number in range(count)]

    return await to_thread.run_sync(make_all)


async def found(backend: Backend, items: Sequence[PutItem]) -> list[Outcome]:
    """Get the items, check the values found, and return the outcomes."""
    views = await to_thread.run_sync(lambda: [blank(len(view)) for _, view in items])
    keys = [key for key, _ in items]
    outcomes = await backend.get(list(zip(keys, views, strict=True)))
    for outcome, view, (_, value) in zip(outcomes, views, items, strict=True):
        assert outcome is not OK or same(view, value), "the key has another value"
    return list(outcomes)


def _value(number: int, size: int, seed: int) -> memoryview:
    return memoryview(noise(b"%d %d" % (number, seed), size))
