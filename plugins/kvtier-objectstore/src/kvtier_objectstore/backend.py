"""A shared pool in an object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from anyio import to_thread

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier_objectstore.faults import Refused, StoreError
from kvtier_objectstore.settings import ObjectStoreSettings

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
LateT = TypeVar("LateT")

REQUEST_SHARE = 0.25
"""Timeout of one request, as a share of the tier's deadline."""

LAST_START = 0.75
"""Share of the tier's deadline after which a batch starts no further request, so that all end in time."""


class ObjectStoreBackend(Backend, SupportsCheck):
    """A pool with one object per chunk, in S3, Google Cloud Storage, Azure or a folder.

    Requests run in at most ``requests`` worker threads and connect on demand: while the store is down, each
    batch fails within the tier's deadline; when it is back, the next batch succeeds.
    """

    settings_type: ClassVar[type[TierSettings]] = ObjectStoreSettings

    def __init__(self, settings: ObjectStoreSettings) -> None:
        self._settings = settings
        self._executor = WorkerThreads(settings.requests)

    async def open(self) -> None:
        """Import obstore. Raises :class:`TierError` if it rejects the settings."""
        from kvtier_objectstore.store import ChunkStore

        self._store = await to_thread.run_sync(
            ChunkStore, self._settings, self._settings.deadline * REQUEST_SHARE
        )

    async def close(self) -> None:
        """Close the connections."""
        del self._store

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key has an object, with one request per key. Raises :class:`StoreError`."""
        answers = await self._each(self._store.exists, keys, self._latest(), late=_too_late())
        self._raise_or_warn(answers)
        return [answer is True for answer in answers]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Upload a copy of each value; large ones in parts."""
        latest = self._latest()
        return await self._each(
            lambda item: self._store.write(item, latest), items, latest, late=Outcome.FAILED
        )

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Download each value into its view; the parts of large ones in parallel."""
        latest = self._latest()
        firsts = await self._each(self._store.read_first, items, latest, late=(Outcome.FAILED, None))
        outcomes = [outcome for outcome, _ in firsts]
        rest = [
            (index, part)
            for index, (outcome, version) in enumerate(firsts)
            if outcome is Outcome.OK
            for part in self._store.rest(items[index], version)
        ]
        read = await self._each(self._store.read, [part for _, part in rest], latest, late=Outcome.FAILED)
        for (index, _), outcome in zip(rest, read, strict=True):
            if outcomes[index] is Outcome.OK:
                outcomes[index] = outcome
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each object. Raises :class:`StoreError`, except if the credentials lack the permission.

        kvtier retries a failed ``delete`` before any other call, which would never end in that case.
        """
        answers = await self._each(self._store.remove, keys, self._latest(), late=_too_late())
        try:
            self._raise_or_warn(answers)
        except Refused as error:
            self._store.warn(error)

    async def check(self) -> str:
        """See :meth:`SupportsCheck.check`. Writes a small object and deletes it."""
        (answer,) = await spread(lambda check: check(), [self._store.check], parts=1, executor=self._executor)
        return answer

    def _raise_or_warn(self, answers: Sequence[object]) -> None:
        """Raise if all requests failed, and warn if some did."""
        errors = [answer for answer in answers if isinstance(answer, StoreError)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        for error in errors[:1]:
            self._store.warn(error)

    def _latest(self) -> float:
        return time.monotonic() + self._settings.deadline * LAST_START

    async def _each(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], latest: float, *, late: LateT
    ) -> list[ResultT | LateT]:
        """Apply ``work`` to each item. The result is ``late`` for items not started until ``latest``."""

        def in_time(item: ItemT) -> ResultT | LateT:
            return work(item) if time.monotonic() <= latest else late

        return await spread(in_time, items, parts=self._settings.requests, executor=self._executor)


def _too_late() -> StoreError:
    return StoreError("the store was too slow for a whole batch: raise deadline")
