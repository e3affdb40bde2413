"""A shared pool in an object store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import ClassVar, TypeVar

from anyio import to_thread

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck, SupportsPrefix
from kvtier.backends.s3.errors import StoreError, explain
from kvtier.backends.s3.settings import S3Settings
from kvtier.concurrency.threads import Call, WorkerThreads, spread, wait_all
from kvtier.errors import TierError
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.units import MIB

REQUEST_SHARE = 0.25
"""Timeout of one request, as a share of the tier's deadline."""
LAST_START = 0.75
"""Share of a batch's deadline after which it starts no further request, so that all end in time."""
DEADLINE_BYTES = 16 * MIB
"""The deadline is that of a batch of up to this size."""
TRIMMED_SHARE = 1 / 16
"""Share of the capacity to write before the chunks are listed, and to keep free then."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class S3Backend(Backend, SupportsPrefix, SupportsCheck):
    """A pool with one object per chunk, in S3, Google Cloud Storage or Azure.

    Requests run in at most ``requests`` worker threads and connect on demand: while the store is down, each
    batch fails within the tier's deadline; when it is back, the next batch succeeds. With a ``capacity``, one
    more thread lists the chunks from time to time, and deletes the oldest.
    """

    settings_type: ClassVar[type[TierSettings]] = S3Settings

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._place = settings.url + (f" at {settings.endpoint}" if settings.endpoint else "")
        self._warn = RateLimitedLog(logging.getLogger("kvtier"))
        self._transfers = WorkerThreads(settings.requests)
        self._lookups = WorkerThreads(settings.requests)
        self._trims = WorkerThreads(1)
        self._trim: Call | None = None
        self._unlisted_bytes = settings.capacity or 0
        """So that the first write lists what is there."""

    async def open(self) -> None:
        """Import obstore. Raises :class:`TierError` if it is missing, or rejects the settings."""
        try:
            from kvtier.backends.s3.store import ChunkStore
        except ImportError as error:
            raise TierError(
                f"tier {self._settings.name!r}: obstore is missing", "pip install 'kvtier[s3]'"
            ) from error
        seconds = self._settings.deadline * REQUEST_SHARE
        self._store = await to_thread.run_sync(ChunkStore, self._settings, seconds)

    async def close(self) -> None:
        """Close the connections."""
        self._store.closing = True
        await wait_all([self._trim] if self._trim is not None else [])
        del self._store

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key has an object, with one request per key. Raises :class:`StoreError`."""
        return [length > 0 for length in await self.lengths(keys)]

    async def lengths(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return how long each object is, with one request per key. Raises :class:`StoreError`."""
        answers = await self._ask(self._store.length, keys)
        return [answer if isinstance(answer, int) else 0 for answer in answers]

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading keys that are held. Raises :class:`StoreError`.

        Asks for ``requests`` keys at a time, up to the first that is missing: each request has a price.
        """
        held, step = 0, self._settings.requests
        for start in range(0, len(keys), step):
            held += sum(takewhile(bool, await self.contains(keys[start : start + step])))
            if held < min(start + step, len(keys)):
                break
        return held

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Upload a copy of each view; large ones in parts."""
        latest = self._latest(items)
        answers = await self._each(partial(self._store.write, latest=latest), items, latest, self._transfers)
        outcomes = [Outcome.OK if answer is None else self._failed(answer) for answer in answers]
        written = zip(items, outcomes, strict=True)
        self._note_written(sum(len(view) for (_, view), outcome in written if outcome is Outcome.OK))
        return outcomes

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Download each object into its view; the parts of large ones at once.

        An object that is replaced meanwhile is a ``MISS``.
        """
        parts = [part for place, item in enumerate(items) for part in self._store.parts_of(place, item)]
        versions = await self._each(self._store.read, parts, self._latest(items), self._transfers)
        outcomes = [Outcome.OK] * len(items)
        first: dict[int, str] = {}
        for part, version in zip(parts, versions, strict=True):
            if outcomes[part.item] is not Outcome.OK:
                continue
            if isinstance(version, StoreError):
                outcomes[part.item] = self._failed(version)
            elif version is None or version != first.setdefault(part.item, version):
                outcomes[part.item] = Outcome.MISS
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each object. Raises :class:`StoreError`, except if the credentials lack the permission.

        kvtier retries a failed ``delete`` before any other call, which would never end in that case.
        """
        await self._ask(self._store.remove, keys, unless_refused=True)

    async def check(self) -> str:
        """See :meth:`SupportsCheck.check`. Lists some objects, writes one and deletes it."""
        (answer,) = await self._ask(lambda check: check(), [self._store.check])
        return f"{self._place}: {answer}"

    def _note_written(self, count: int) -> None:
        """Trim the store in the background if this host has written enough since it last did."""
        capacity = self._settings.capacity
        self._unlisted_bytes += count
        if capacity is None or self._unlisted_bytes < capacity * TRIMMED_SHARE:
            return
        if self._trim is None or self._trim.done():
            self._unlisted_bytes = 0
            self._trim = self._trims(partial(self._trim_now, int(capacity * (1 - TRIMMED_SHARE))))

    def _trim_now(self, capacity: int) -> None:
        try:
            self._store.trim(capacity)
        except Exception as error:
            self._failed(explain(self._place, error))

    async def _ask(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], *, unless_refused: bool = False
    ) -> list[ResultT | StoreError]:
        """Make a request for each item, beside those for chunks. Raise if all fail, and warn if some do."""
        answers = await self._each(work, items, self._latest(), self._lookups)
        errors = [answer for answer in answers if isinstance(answer, StoreError)]
        if errors and len(errors) == len(answers) and not (unless_refused and errors[0].refused):
            raise errors[0]
        for error in errors[:1]:
            self._failed(error)
        return answers

    def _failed(self, error: StoreError) -> Outcome:
        """Log the error, rate-limited, and return the outcome."""
        self._warn("tier %r: %s", self._settings.name, error)
        return Outcome.FULL if error.full else Outcome.FAILED

    def _latest(self, items: Sequence[PutItem] = ()) -> float:
        size = sum(len(view) for _, view in items)
        return time.monotonic() + self._settings.deadline * max(1.0, size / DEADLINE_BYTES) * LAST_START

    async def _each(
        self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], latest: float, threads: WorkerThreads
    ) -> list[ResultT | StoreError]:
        """Apply ``work`` to each item, and return the results or errors. Starts none after ``latest``."""

        def in_time(item: ItemT) -> ResultT | StoreError:
            if time.monotonic() > latest:
                return StoreError(f"{self._place} is too slow for a whole batch", "raise deadline")
            try:
                return work(item)
            except Exception as error:
                return explain(self._place, error)

        return await spread(in_time, items, parts=self._settings.requests, executor=threads)
