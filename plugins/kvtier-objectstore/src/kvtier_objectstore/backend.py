"""A shared pool in an object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from anyio import to_thread

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck
from kvtier.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.threads import WorkerThreads, spread
from kvtier_objectstore.faults import Refused, StoreError
from kvtier_objectstore.settings import ObjectStoreSettings

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
LateT = TypeVar("LateT")

REQUEST_SHARE = 0.25
"""Of the tier's deadline, what one request may take."""

LAST_START = 0.75
"""Of the tier's deadline, when the last request of a batch may begin, so that all have ended with it."""


class ObjectStoreBackend(Backend, SupportsCheck):
    """One object a chunk, in S3, Google Cloud Storage, Azure or a folder.

    Requests run in at most ``requests`` worker threads, and connect when they are made: a store that is down
    fails each batch within the tier's deadline, and one that is back is found again by the next.
    """

    settings_type: ClassVar[type[TierSettings]] = ObjectStoreSettings

    def __init__(self, settings: ObjectStoreSettings) -> None:
        self._settings = settings
        self._hop = WorkerThreads(settings.requests)

    async def open(self) -> None:
        """Load obstore. Raises :class:`TierError` where it does not take the settings."""
        from kvtier_objectstore.store import ChunkStore

        self._store = await to_thread.run_sync(
            ChunkStore, self._settings, self._settings.deadline * REQUEST_SHARE
        )

    async def close(self) -> None:
        """Let go of the connections."""
        del self._store

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether there is an object of each key, by a request for each. Raises :class:`StoreError`."""
        answers = await self._each(self._store.holds, keys, self._latest(), late=_too_late())
        self._tell(answers)
        return [answer is True for answer in answers]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Upload a copy of each value, long ones in parts."""
        latest = self._latest()
        return await self._each(
            lambda item: self._store.write(item, latest), items, latest, late=Outcome.FAILED
        )

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Download each value into its view, the parts of long ones side by side."""
        latest = self._latest()
        began = await self._each(self._store.begin, items, latest, late=(Outcome.FAILED, None))
        outcomes = [outcome for outcome, _ in began]
        rest = [
            (index, part)
            for index, (outcome, version) in enumerate(began)
            if outcome is Outcome.OK
            for part in self._store.rest(items[index], version)
        ]
        read = await self._each(self._store.read, [part for _, part in rest], latest, late=Outcome.FAILED)
        for (index, _), outcome in zip(rest, read, strict=True):
            if outcomes[index] is Outcome.OK:
                outcomes[index] = outcome
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each object. Raises :class:`StoreError`, but not where these credentials may not delete.

        What is raised is tried again before anything else is asked for, and would be for ever.
        """
        answers = await self._each(self._store.remove, keys, self._latest(), late=_too_late())
        try:
            self._tell(answers)
        except Refused as error:
            self._store.warn(error)

    async def check(self) -> str:
        """See :meth:`SupportsCheck.check`. Writes an object of a few bytes and deletes it."""
        (answer,) = await spread(lambda check: check(), [self._store.check], parts=1, hop=self._hop)
        return answer

    def _tell(self, answers: Sequence[object]) -> None:
        """Raise where all went wrong, and warn where some did."""
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
        """Apply ``work`` to each item; ``late`` where its turn comes only after ``latest``."""

        def in_time(item: ItemT) -> ResultT | LateT:
            return work(item) if time.monotonic() <= latest else late

        return await spread(in_time, items, parts=self._settings.requests, hop=self._hop)


def _too_late() -> StoreError:
    return StoreError("the store was too slow for some of a batch: see deadline")
