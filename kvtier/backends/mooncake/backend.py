"""Mooncake backend: a memory pool contributed by the hosts of a cluster and managed by Mooncake's master."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import ClassVar, TypeVar

import anyio

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, SupportsCheck, SupportsRegistration
from kvtier.backends.mooncake.client import UNREACHED, Code, MooncakeClient
from kvtier.backends.mooncake.settings import MooncakeSettings
from kvtier.concurrency.locks import LockManager, LockRequest
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.errors import TierError
from kvtier.logs import RateLimitedLog
from kvtier.memory.arena import Arena, address_of
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings

logger = logging.getLogger("kvtier")

LOOKUP_THREADS = 2
"""Separate from the transfer threads, so that lookups do not wait for transfers."""
PROBE_BYTES = 64

ResultT = TypeVar("ResultT")


class MooncakeBackend(Backend, SupportsRegistration, SupportsCheck):
    """Chunks in the segments of a Mooncake pool, transferred to and from the caller's memory without a copy.

    The blocking library runs in ``concurrency`` threads for transfers and two more for everything else. It
    times out within the tier's deadline, except for the first contact with a segment whose host hangs, which
    takes a minute; meanwhile calls that get no free thread within the deadline are ``FAILED``.

    ``put`` and ``delete`` bypass the leases by which Mooncake protects values that are being read. Locks
    prevent this within the process; a reader on another host may get a mix of two values, which its
    checksum detects (:class:`~kvtier.tiers.seal.Seal`).
    """

    settings_type: ClassVar[type[TierSettings]] = MooncakeSettings

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._client = MooncakeClient(settings)
        self._locks = LockManager()
        self._transfers = Threads(settings.concurrency, settings.deadline)
        self._lookups = Threads(LOOKUP_THREADS, settings.deadline)
        self._warn = RateLimitedLog(logger)

    async def open(self) -> None:
        """Load the library. Joins the pool lazily. Raises :class:`TierError` if the library is missing."""
        try:
            await self._lookups.run(self._client.load)
        except TierError as error:
            raise TierError(f"tier {self._settings.name!r}: {error}") from error

    async def close(self) -> None:
        """Leave the pool. The chunks in this host's segment are lost."""
        with anyio.CancelScope(shield=True):
            await self._lookups.run(self._client.close)

    async def register(self, arena: Arena) -> None:
        """Register the arena for RDMA. TCP needs no registration."""
        address = address_of(arena.view(0, arena.capacity))
        await self._lookups.run(lambda: self._client.register(address, arena.capacity))

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key is held. A key that is still being written is not.

        Raises ``ConnectionError`` if the pool answers for none of them.
        """
        names = self._names(keys)
        codes = await self._call(lambda: self._client.contains(names), len(keys), self._lookups)
        _expect_answers([code >= 0 for code in codes])
        return [code == 1 for code in codes]

    async def lengths(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return how long each value is. Raises as :meth:`contains`."""
        names = self._names(keys)
        codes = await self._call(lambda: self._client.lengths(names), len(keys), self._lookups)
        _expect_answers([code not in UNREACHED for code in codes])
        return [max(code, 0) for code in codes]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store each view. ``FULL`` if no segment has room. For a duplicate key, the last view wins."""
        # The library requires unique names.
        views = dict(items)
        names = self._names(list(views))
        codes = await self._call(
            lambda: self._client.put(names, list(views.values())),
            len(views),
            self._transfers,
            self._locked(views, exclusive=True),
        )
        outcomes = dict(zip(views, map(_put_outcome, codes), strict=True))
        return [outcomes[key] for key, _ in items]

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view."""
        keys = [key for key, _ in items]
        names = self._names(keys)
        lengths = [len(view) for _, view in items]
        codes = await self._call(
            lambda: self._client.get(names, [view for _, view in items]),
            len(items),
            self._transfers,
            self._locked(keys, exclusive=False),
        )
        return [_get_outcome(code, length) for code, length in zip(codes, lengths, strict=True)]

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key, even if leased. Raises ``ConnectionError`` if the pool answers for none."""
        names = self._names(keys)
        codes = await self._call(
            lambda: self._client.remove(names),
            len(keys),
            self._lookups,
            self._locked(keys, exclusive=True),
        )
        _expect_answers([code not in UNREACHED for code in codes])

    async def check(self) -> str:
        """Join the pool, then store and remove a few bytes under a unique name."""
        name = f"{self._settings.prefix}check:{secrets.token_hex(8)}"
        try:
            return await self._lookups.run(lambda: self._probe(name))
        except OSError as error:
            raise TierError(_describe_error(error), "check `master`") from error

    def _probe(self, name: str) -> str:
        settings, client = self._settings, self._client
        own_name = client.join()
        (code,) = client.put([name], [memoryview(bytearray(PROBE_BYTES))])
        if code == Code.NO_ROOM:
            raise TierError(
                f"the master at {settings.master} has no free memory",
                "start a `mooncake_client` on some host, or contribute memory of this host with "
                "`segment_size`",
            )
        if code:
            raise TierError(
                f"the master at {settings.master} answers, but the transfer to the segment that it chose "
                f"fails (code {code})",
                "check that each client's `local_hostname` is reachable from here, and check `protocol`, "
                "`device` and `metadata_server`",
            )
        client.remove([name])
        return f"Mooncake at {settings.master} over {settings.protocol}, joined as {own_name}"

    def _names(self, keys: Sequence[ChunkKey]) -> list[str]:
        return [self._settings.prefix + key.hex() for key in keys]

    def _locked(self, keys: Iterable[ChunkKey], *, exclusive: bool) -> AbstractAsyncContextManager[None]:
        """Share keys with other readers, or have them alone. Raises ``TimeoutError`` after the deadline."""
        request = LockRequest(frozenset(keys), frozenset(), exclusive=exclusive)
        return self._locks.held(request, self._settings.deadline)

    async def _call(
        self,
        function: Callable[[], list[int]],
        count: int,
        threads: Threads,
        locked: AbstractAsyncContextManager[None] | None = None,
    ) -> list[int]:
        """Call the library in a thread. Returns its codes, or ``TRANSFER_FAILED`` for all if it raises."""
        if not count:
            return []
        try:
            async with locked or nullcontext():
                return await threads.run(function)
        except (OSError, RuntimeError) as error:
            self._warn("tier %r: %s", self._settings.name, _describe_error(error))
            return [Code.TRANSFER_FAILED] * count


class Threads:
    """A bounded number of worker threads. For use from the event loop."""

    def __init__(self, count: int, timeout: float) -> None:
        self._free = anyio.Semaphore(count)
        self._timeout = timeout
        self._executor = WorkerThreads(count)

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Call ``function`` in a thread. Raises ``TimeoutError`` if none is free within the timeout.

        Returns only after the function has returned, even if cancelled.
        """
        with anyio.fail_after(self._timeout):
            await self._free.acquire()
        try:
            return await in_thread(function, self._executor)
        finally:
            self._free.release()


def _expect_answers(answered: Sequence[bool]) -> None:
    if answered and not any(answered):
        raise ConnectionError("the pool does not answer")


def _put_outcome(code: int) -> Outcome:
    # Taken over: another host is replacing the value with its own copy of the chunk.
    if code in (0, Code.TAKEN_OVER):
        return Outcome.OK
    return Outcome.FULL if code == Code.NO_ROOM else Outcome.FAILED


def _get_outcome(code: int, length: int) -> Outcome:
    if code == length:
        return Outcome.OK
    missing = code >= 0 or code in (Code.NOT_HELD, Code.BEING_WRITTEN)
    return Outcome.MISS if missing else Outcome.FAILED


def _describe_error(error: Exception) -> str:
    return str(error) or "the pool did not answer in time"
