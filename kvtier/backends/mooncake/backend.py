"""A pool of memory that the hosts of a cluster give, kept together by Mooncake's master."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import ClassVar

import anyio

from kvtier.arena import Arena, address_of
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck, SupportsRegistration
from kvtier.backends.logs import RareWarning
from kvtier.backends.mooncake.client import MooncakeClient
from kvtier.backends.mooncake.library import UNREACHED, Code
from kvtier.backends.mooncake.settings import MooncakeSettings
from kvtier.backends.mooncake.waits import KeyLocks, Threads
from kvtier.errors import TierError
from kvtier.keys import ChunkKey
from kvtier.settings import TierSettings

logger = logging.getLogger("kvtier")

LOOK_UP_THREADS = 2
"""Looking for keys does not wait for transfers."""

TRIAL_BYTES = 64


class MooncakeBackend(Backend, SupportsRegistration, SupportsCheck):
    """Chunks in the segments of a Mooncake pool, moved from and to the caller's memory without a copy.

    The blocking library runs in ``concurrency`` threads for transfers and two more for the rest. It gives
    up by itself within the tier's deadline, but for a first contact with a segment whose host stands still,
    which takes a minute; calls that find no free thread within the deadline are ``FAILED`` meanwhile.

    ``put`` and ``delete`` go past the leases by which Mooncake protects what is being read. Within this
    process nobody reads what is just being changed; a reader on another host may get a mix, which its
    checksum tells it (:class:`~kvtier.backends.sealed.SealedBackend`).
    """

    settings_type: ClassVar[type[TierSettings]] = MooncakeSettings

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._client = MooncakeClient(settings)
        self._locks = KeyLocks(settings.deadline)
        self._transfers = Threads(settings.concurrency, settings.deadline)
        self._look_ups = Threads(LOOK_UP_THREADS, settings.deadline)
        self._warn = RareWarning(logger)

    async def open(self) -> None:
        """Load the library; the pool is joined when first asked. Raises :class:`TierError` without it."""
        try:
            await self._look_ups.run(self._client.load)
        except TierError as error:
            raise TierError(f"tier {self._settings.name!r}: {error}") from error

    async def close(self) -> None:
        """Leave the pool; the memory given to it goes with all that it holds."""
        with anyio.CancelScope(shield=True):
            await self._look_ups.run(self._client.close)

    async def register(self, arena: Arena) -> None:
        """Have RDMA move chunks from and to the arena itself. TCP does so with any memory."""
        address = address_of(arena.view(0, arena.capacity))
        await self._look_ups.run(lambda: self._client.register(address, arena.capacity))

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key is held; one that is just being written is not.

        Raises ``ConnectionError`` where the pool says nothing of any.
        """
        names = self._names(keys)
        codes = await self._ask(lambda: self._client.contains(names), len(keys), self._look_ups)
        _expect_answers([code >= 0 for code in codes])
        return [code == 1 for code in codes]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store each view. ``FULL`` where no segment has room. Of a key given twice, the last view counts."""
        views = dict(items)
        names = self._names(list(views))
        codes = await self._ask(
            lambda: self._client.put(names, list(views.values())),
            len(views),
            self._transfers,
            self._locks.held(views, exclusive=True),
        )
        outcomes = dict(zip(views, map(_put_outcome, codes), strict=True))
        return [outcomes[key] for key, _ in items]

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view."""
        keys = [key for key, _ in items]
        names = self._names(keys)
        lengths = [len(view) for _, view in items]
        codes = await self._ask(
            lambda: self._client.get(names, [view for _, view in items]),
            len(items),
            self._transfers,
            self._locks.held(keys, exclusive=False),
        )
        return [_get_outcome(code, length) for code, length in zip(codes, lengths, strict=True)]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key, also from under a lease. Raises ``ConnectionError`` where that reached nobody."""
        names = self._names(keys)
        codes = await self._ask(
            lambda: self._client.remove(names),
            len(keys),
            self._look_ups,
            self._locks.held(keys, exclusive=True),
        )
        _expect_answers([code not in UNREACHED for code in codes])

    async def check(self) -> str:
        """Join the pool, and store and remove a few bytes under a name of their own."""
        name = f"{self._settings.prefix}check:{secrets.token_hex(8)}"
        try:
            return await self._look_ups.run(lambda: self._try_out(name))
        except OSError as error:
            raise TierError(f"{_in_words(error)}: see `master`") from error

    def _try_out(self, name: str) -> str:
        settings, client = self._settings, self._client
        own_name = client.join()
        (code,) = client.put([name], [memoryview(bytearray(TRIAL_BYTES))])
        if code == Code.NO_ROOM:
            raise TierError(
                f"the master at {settings.master} has no memory to give: start a `mooncake_client` on some "
                "host, or give memory of this one with `segment_size`"
            )
        if code:
            raise TierError(
                f"the master at {settings.master} answers, but a chunk does not reach the segment that it "
                f"chose (code {code}): see whether each client's `local_hostname` is reached from here, and "
                "`protocol`, `device` and `metadata_server`"
            )
        client.remove([name])
        return f"Mooncake at {settings.master} over {settings.protocol}, joined as {own_name}"

    def _names(self, keys: Sequence[ChunkKey]) -> list[str]:
        return [self._settings.prefix + key.hex() for key in keys]

    async def _ask(
        self,
        question: Callable[[], list[int]],
        count: int,
        threads: Threads,
        locked: AbstractAsyncContextManager[None] | None = None,
    ) -> list[int]:
        """The library's codes, or as many of a failure where there are none."""
        if not count:
            return []
        try:
            async with locked or nullcontext():
                return await threads.run(question)
        except (OSError, RuntimeError) as error:
            self._warn("tier %r: %s", self._settings.name, _in_words(error))
            return [Code.TRANSFER_FAILED] * count


def _expect_answers(answered: Sequence[bool]) -> None:
    if answered and not any(answered):
        raise ConnectionError("the pool does not answer")


def _put_outcome(code: int) -> Outcome:
    # Taken over: stored, and at once replaced by another host's copy of the chunk.
    if code in (0, Code.TAKEN_OVER):
        return Outcome.OK
    return Outcome.FULL if code == Code.NO_ROOM else Outcome.FAILED


def _get_outcome(code: int, length: int) -> Outcome:
    if code == length:
        return Outcome.OK
    missing = code >= 0 or code in (Code.NOT_HELD, Code.BEING_WRITTEN)
    return Outcome.MISS if missing else Outcome.FAILED


def _in_words(error: Exception) -> str:
    return str(error) or "the pool did not answer in time"
