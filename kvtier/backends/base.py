"""The one contract of every medium that holds chunks, and the optional powers beside it.

A backend stores opaque bytes under keys. It knows nothing of headers, checksums, deadlines, capacity
or eviction: those are added around it, the same for all (``sealed.py``, ``guarded.py``, ``tier.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from kvtier.arena import Arena
from kvtier.keys import ChunkKey
from kvtier.settings import TierSettings
from kvtier.slices import Lease, Leases


class Outcome(Enum):
    """What became of one key of a batch."""

    OK = "ok"
    MISS = "miss"
    """Not held, or held but not what was asked for."""
    FULL = "full"
    """The medium has no room."""
    FAILED = "failed"
    """The medium did not do it: an error, a time-out, a refusal. Try again or do without."""


PutItem = tuple[ChunkKey, memoryview]
GetItem = tuple[ChunkKey, memoryview]


class Backend(ABC):
    """One medium that holds chunks under keys. Subclass it and write the six methods below.

    All are called from the one event loop and must not block it: a blocking client library belongs in
    a bounded set of worker threads. Batches have no upper size, may be empty, and may run concurrently,
    also on equal keys. Answers come in the order of the question, one for each item. What fails in ``put``
    and ``get`` is an outcome, for each key its own. ``contains`` and ``delete`` have none: they raise,
    whatever it be, where the medium cannot be asked at all, which the breaker around it counts as a failure.
    A cancelled call must not touch the caller's memory after it has ended.
    """

    settings_type: ClassVar[type[TierSettings]] = TierSettings
    """The settings that a tier of this type has.

    A subclass of ``LocalTierSettings`` says that the medium is this host's alone: its capacity is kept, and
    the catalog knows all that is in it. Any other makes it a shared pool, which others fill and empty too: it
    is asked what it holds, and what it has no room for is its own business.
    """

    def __init__(self, settings: TierSettings) -> None:  # noqa: B027 - has a default on purpose
        """Called with a ``settings_type``, already validated. Opens nothing and does not block."""

    @abstractmethod
    async def open(self) -> None:
        """Make the medium ready. Raises :class:`kvtier.errors.TierError` where that cannot be.

        A server that does not answer is no reason: an engine starts without its cache. Connect when first
        asked, and again whenever the connection was lost; raise only for what waiting does not mend.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything. Called once, after the last other call has ended."""

    @abstractmethod
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key is held. Raises where nothing can be said of any of them."""

    @abstractmethod
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store a copy of each view under its key, replacing what was there: all of it or nothing.

        The views stay valid and unchanged until the call has ended. ``OK``, ``FULL`` or ``FAILED``.
        """

    @abstractmethod
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with the bytes of its key. ``OK``, ``MISS`` or ``FAILED``.

        A value of another length than the view is a ``MISS``. Where the outcome is not ``OK``, what
        the view holds is undefined.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key; one that is not held is no error. Raises where none could be removed."""


class StoredObject(NamedTuple):
    """One object that a medium held when it was opened."""

    key: ChunkKey
    length: int
    """Bytes as given to ``put``."""
    last_used: float
    """Seconds since the epoch."""
    head: bytes
    """The first bytes of the object, at least ``HEADER_BYTES`` of them where it is that long."""


@runtime_checkable
class SupportsScan(Protocol):
    """A medium that outlives its process and belongs to it alone: it can tell what it holds."""

    def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Everything held, in batches, in any order. Called once, after ``open``."""
        ...


@runtime_checkable
class SupportsArena(Protocol):
    """A medium that is memory which an engine may copy to and from directly."""

    @property
    def arena(self) -> Arena:
        """The shared region. Valid from ``open`` to ``close``."""
        ...

    def adopt(self, key: ChunkKey, lease: Lease) -> None:
        """Hold under ``key`` what ``lease`` covers, without a copy. The lease is the backend's now."""
        ...

    def lease(self, key: ChunkKey) -> Lease | None:
        """A further lease on what is held under ``key``; the caller releases it."""
        ...

    def idle(self, key: ChunkKey) -> bool:
        """Whether ``key`` is held and nobody has a further lease on it."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """Let go of ``key``; its bytes are freed with their last lease."""
        ...


@runtime_checkable
class SupportsLeases(Protocol):
    """Such memory that leases many chunks in one go, in a tenth of the time that each on its own takes."""

    def lease_all(self, keys: Sequence[ChunkKey]) -> Leases:
        """A further lease on what is held under each key, up to the first that is not held."""
        ...


@runtime_checkable
class SupportsRegistration(Protocol):
    """A medium that wants to know the arena before bytes move (RDMA, NIXL)."""

    async def register(self, arena: Arena) -> None:
        """Called once, after ``open`` and before the first ``put`` or ``get``."""
        ...


@runtime_checkable
class SupportsPrefix(Protocol):
    """A medium that can tell how much of a prompt it holds, cheaper than by :meth:`Backend.contains`."""

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """How many of ``keys`` are held before the first that is not. Raises where nothing can be said."""
        ...


@runtime_checkable
class SupportsCheck(Protocol):
    """A medium that can say in words how it is."""

    async def check(self) -> str:
        """Reach the medium now, and say in a phrase what it is: ``Redis 7.0.15, 1GiB of 4GiB used``.

        For people, after ``open``. Raises :class:`kvtier.errors.TierError`, whose message says what is wrong
        and which setting or command mends it, and holds no secret.
        """
        ...


@runtime_checkable
class SupportsTTL(Protocol):
    """A medium that forgets by itself."""

    @property
    def ttl(self) -> float | None:
        """Seconds after which a chunk is forgotten, or ``None``."""
        ...
