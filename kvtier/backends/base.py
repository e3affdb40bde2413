"""The interface of a storage backend, and its optional capabilities.

A backend stores opaque bytes under keys. It knows nothing of headers, checksums, deadlines, capacity
or eviction: :mod:`kvtier.tiers` adds those to every backend alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from kvtier.memory.arena import Arena
from kvtier.memory.keys import ChunkKey
from kvtier.settings import TierSettings


class Outcome(Enum):
    """The result for one key of a batch."""

    OK = "ok"
    """Stored, or read."""
    VERIFIED = "verified"
    """Read, and the payload has the checksum that is in the object's header: it was hashed as it arrived.

    Only of ``get``, and no duty: a payload that was read without this is hashed by the tier. A wrapper that
    changes bytes after ``get`` must return ``OK``.
    """
    MISS = "miss"
    """Not held, or held with a different length."""
    FULL = "full"
    """The medium has no room."""
    FAILED = "failed"
    """An error, a timeout or a rejection. The caller may retry."""


PutItem = tuple[ChunkKey, memoryview]
"""A key, and the bytes to store under it."""
GetItem = tuple[ChunkKey, memoryview]
"""A key, and the memory to fill with its bytes."""


class Backend(ABC):
    """A medium that stores chunks under keys. Subclass it and implement the six methods below.

    All methods run on the one event loop and must not block it: run a blocking client library in a
    bounded set of worker threads. Batches have no maximum size, may be empty, and may run concurrently,
    also on the same keys. Results are in the order of the arguments, one per item. ``put`` and ``get``
    report failures per key, as an :class:`Outcome`. ``contains`` and ``delete`` have no outcomes: if the
    medium cannot be reached at all they raise any exception, which the circuit breaker counts as a failure.
    A cancelled call must not touch the caller's memory after it has returned.
    """

    settings_type: ClassVar[type[TierSettings]] = TierSettings
    """The settings class of tiers of this type.

    A subclass of ``LocalTierSettings`` marks the medium as private to this host: kvtier enforces its
    capacity, and the catalog lists everything in it. Any other class marks a shared pool, which other hosts
    also fill and empty: lookups query it, and it manages its own capacity.
    """

    def __init__(self, settings: TierSettings) -> None:  # noqa: B027 - has a default on purpose
        """Take validated settings of ``settings_type``. Must not open anything or block."""

    @abstractmethod
    async def open(self) -> None:
        """Prepare the medium for use.

        An unreachable server is not an error, because an engine must start without its cache: connect
        lazily, and reconnect after a loss.

        Raises :class:`kvtier.errors.TierError` if the configuration is wrong, so that retrying cannot help.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. Called once, after every other call has returned."""

    @abstractmethod
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key is held. Raises if the medium cannot be reached."""

    @abstractmethod
    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store a copy of each view under its key, atomically replacing any previous value.

        The views stay valid and unchanged until the call returns. Outcomes: ``OK``, ``FULL`` or ``FAILED``.
        """

    @abstractmethod
    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Fill each view with the bytes of its key. Outcomes: ``OK``, ``MISS`` or ``FAILED``.

        A value whose length differs from the view's is a ``MISS``. Unless the outcome is ``OK``, the
        contents of the view are undefined.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key, ignoring keys that are not held. Raises if the medium cannot be reached.

        A medium that supports scans raises :class:`~kvtier.errors.IncompleteScan` if it still holds some.
        """

    def capabilities(self) -> Capabilities:
        """Return the optional capabilities, by default all protocols below that this object implements.

        Called after ``open``. A wrapper returns those of the backend that it wraps, but for ``sealing`` if
        its own ``put`` does something.
        """
        return Capabilities.of(self)


class StoredObject(NamedTuple):
    """An object that was in a medium when it was opened."""

    key: ChunkKey
    """As given to ``put``."""
    length: int
    """Bytes as given to ``put``."""
    last_used: float
    """Seconds since the epoch."""
    head: bytes
    """The first ``HEADER_BYTES`` of the object or more; all of it if it is shorter."""


@runtime_checkable
class SupportsScan(Protocol):
    """A persistent medium, private to its process, that can list its contents."""

    def scan(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield all objects, in batches, in any order. Called after ``open``.

        Raises :class:`~kvtier.errors.IncompleteScan` at the end if some could not be listed. It is then
        called again from time to time, and may yield only those. ``put`` raises
        :class:`~kvtier.errors.MediumReplaced` once if the medium has lost everything, and is
        scanned then, too.
        """
        ...


@runtime_checkable
class SupportsArena(Protocol):
    """A medium that is memory of this host. A tier of this type can be the first one."""

    def create_arena(self) -> Arena:
        """Create the shared memory of the first tier, with the tier's capacity. The caller closes it.

        Called instead of ``open``: engines copy to and from the first tier directly, so it uses neither
        ``put`` nor ``get``. Raises :class:`kvtier.errors.TierError` if the system cannot provide the memory.
        """
        ...


@runtime_checkable
class SupportsRegistration(Protocol):
    """A medium that registers the arena before any transfer (RDMA, NIXL)."""

    async def register(self, arena: Arena) -> None:
        """Register ``arena``. Called once, after ``open`` and before the first ``put`` or ``get``."""
        ...


@runtime_checkable
class SupportsPrefix(Protocol):
    """A medium with a longest-prefix query that is cheaper than :meth:`Backend.contains`."""

    async def held_prefix(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading ``keys`` that are held. Raises if the medium cannot be reached."""
        ...


@runtime_checkable
class SupportsCheck(Protocol):
    """A medium with a health check."""

    async def check(self) -> str:
        """Contact the medium and return a short status for operators: ``Redis 7.0.15, 1GiB of 4GiB used``.

        Called after ``open``. Raises :class:`kvtier.errors.TierError`, whose message names the problem and
        the setting or command that fixes it, and contains no secret.
        """
        ...


@runtime_checkable
class SupportsSealing(Protocol):
    """A medium that reads each byte itself to store it, and computes the checksum in the same pass."""

    async def put_sealed(
        self, items: Sequence[PutItem], checksums: dict[ChunkKey, bytes]
    ) -> Sequence[Outcome]:
        """Like :meth:`Backend.put`, of valid chunk objects, which are stored with checksums.

        Their headers in memory are only read: what was computed is added to ``checksums``.
        """
        ...


@runtime_checkable
class SupportsLengths(Protocol):
    """A shared pool that knows how long its objects are: its tier may have a codec."""

    async def lengths(self, keys: Sequence[ChunkKey]) -> Sequence[int]:
        """Return the length of each object as it was given to ``put``; 0 for a key that is not held.

        Raises if the medium cannot be reached.
        """
        ...


@runtime_checkable
class SupportsTTL(Protocol):
    """A medium that expires chunks by itself."""

    @property
    def ttl(self) -> float | None:
        """Seconds until a chunk expires, or ``None``."""
        ...


class Capabilities(NamedTuple):
    """The optional capabilities of one backend; ``None`` for each that it does not have."""

    scan: SupportsScan | None = None
    arena: SupportsArena | None = None
    registration: SupportsRegistration | None = None
    prefix: SupportsPrefix | None = None
    check: SupportsCheck | None = None
    ttl: SupportsTTL | None = None
    sealing: SupportsSealing | None = None
    lengths: SupportsLengths | None = None

    @classmethod
    def of(cls, backend: Backend) -> Capabilities:
        """Return the protocols that ``backend`` implements."""
        return cls(
            scan=backend if isinstance(backend, SupportsScan) else None,
            arena=backend if isinstance(backend, SupportsArena) else None,
            registration=backend if isinstance(backend, SupportsRegistration) else None,
            prefix=backend if isinstance(backend, SupportsPrefix) else None,
            check=backend if isinstance(backend, SupportsCheck) else None,
            ttl=backend if isinstance(backend, SupportsTTL) else None,
            sealing=backend if isinstance(backend, SupportsSealing) else None,
            lengths=backend if isinstance(backend, SupportsLengths) else None,
        )
