"""The interface of a transport, which moves bytes between the arenas of two hosts.

The holder of a chunk *grants* access to it: an unguessable number stands for some slices of its arena for a
limited time. A peer that knows the number may read those slices, or write them if the grant allows writing,
and nothing else: a span names its grant, and a span outside the grant's slices is a ``MISS``. Neither side
ever acts on an address that the other has sent.

A transport knows nothing of chunks, keys, lookups, secrets and listening sockets. Peers
(:mod:`kvtier.peers`) discover and authenticate each other, exchange grants and endpoints, and give a
transport connections that are already authenticated.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import Field

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Connection, Deadline
from kvtier.memory.arena import Arena
from kvtier.memory.slices import Lease
from kvtier.settings.values import SettingsModel
from kvtier.units import Duration


class TransportSettings(SettingsModel):
    """Settings common to all transports. A transport with more of them subclasses it as ``settings_type``."""

    type: str = Field(description="Which transport moves the bytes.", examples=["tcp"])
    deadline: Duration = Field(
        default=5.0,
        gt=0,
        description="How long one batch of reads or writes may take before it counts as failed.",
        examples=["5s"],
    )


class Access(Enum):
    """The kind of access that a grant allows."""

    READ = "read"
    """Read the granted slices."""
    WRITE = "write"
    """Write to them."""


class RemoteSpan(NamedTuple):
    """A range of another host's arena, covered by a grant of that host."""

    grant: int
    """The number that stands for it."""
    offset: int
    """From the start of that arena, in bytes."""
    length: int
    """In bytes."""


class Grants(Protocol):
    """The grants of this host to its peers. Called from the event loop; does not block."""

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        """Return a further lease on the slice that contains ``span``, to hold during a transfer.

        The caller releases it. ``None`` if the grant is unknown, expired or for another access, or if the
        span is not within one of its slices. The lease begins at the slice's start, not at the span's.
        """
        ...

    def arrived(self, span: RemoteSpan, checksum: bytes) -> None:
        """Take the XXH3-128 of what was written to ``span``, hashed while it arrived. No duty.

        Called before the lease of that write is released.
        """
        ...


class PeerRefused(ConnectionRefusedError):
    """The peer is up, but accepts no connection from here: a few attempts are enough."""


ReadItem = tuple[RemoteSpan, memoryview]
"""A span to read, and the memory to fill with its bytes."""
WriteItem = tuple[memoryview, RemoteSpan]
"""Bytes, and the span to write them to."""
Dial = Callable[[Deadline], Connection]
"""Opens another authenticated connection to the peer. Blocks, in a worker thread.

Raises ``OSError``, which is :class:`PeerRefused` if the peer is up, but does not accept the connection.
"""


class Link(ABC):
    """Access to one peer's arena. Every method is called from the event loop and must not block it.

    Batches have no size limit, may be empty, and may run concurrently. A span and its view have equal
    lengths. Outcomes are in the order of the items: ``OK``; ``MISS`` if the span is not granted, or not any
    more; ``FAILED`` for all other errors, including the transport's deadline. Peer and network errors raise
    nothing. A call that is cancelled or times out returns soon, and does not touch the caller's memory after
    it has returned. After a connection loss the link reconnects and resumes the transfer within the deadline.
    """

    @abstractmethod
    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """Read the bytes of each span into its view."""

    @abstractmethod
    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """Write each view's bytes to its span. After ``OK`` they are in the peer's memory."""

    async def read_hashed(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """Like :meth:`read`. ``VERIFIED`` as of a :class:`~kvtier.backends.base.Backend`, if it hashes."""
        return await self.read(items)

    async def write_hashed(
        self, items: Sequence[WriteItem]
    ) -> tuple[Sequence[Outcome], Sequence[bytes | None]]:
        """Like :meth:`write`. Return also the XXH3-128 of each view, if it was hashed while it was sent."""
        return await self.write(items), [None] * len(items)

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. Called once, after all other calls have returned."""


class Transport(ABC):
    """Base class of transports, which move bytes between this host and all its peers."""

    settings_type: ClassVar[type[TransportSettings]] = TransportSettings
    one_sided: ClassVar[bool] = False
    """Whether reads and writes bypass the remote host's CPU (RDMA, NIXL).

    The remote host cannot refuse such a transfer. So a read counts only after the remote host has confirmed
    that the grant was valid throughout, and memory granted for writing is not reused until the grantee has
    returned it or is cut off.
    """

    def __init__(self, settings: TransportSettings) -> None:  # noqa: B027 - has a default on purpose
        """Store ``settings``, a validated ``settings_type``. Must not open anything or block."""

    @abstractmethod
    async def open(self, arena: Arena, grants: Grants) -> None:
        """Prepare ``arena`` for reads and writes by peers, and register it if the transport needs that.

        Raises: kvtier.errors.PeerError: this host lacks a library or device.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. Called once, after the last link is closed."""

    async def cut_off(self) -> None:  # noqa: B027 - has a default on purpose
        """Stop all remote writes into this arena, and revoke the access that allows new ones.

        For :attr:`one_sided` transports, after a peer was lost that may still write. Other peers lose their
        transfers as well, and reconnect. Raises nothing; may be called at any time between :meth:`open` and
        the end of :meth:`close`. The default does nothing.
        """

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """The data that a peer's :meth:`connect` needs. Sent over an authenticated connection."""

    @abstractmethod
    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        """Return a link to the host with this :attr:`endpoint`.

        ``endpoint`` comes from an authenticated peer, and must be validated nevertheless.

        Raises: kvtier.errors.PeerError
        """


@runtime_checkable
class SupportsConnections(Protocol):
    """A transport that uses connections which the peers open and authenticate."""

    async def serve(self, connected: socket.socket) -> None:
        """Serve one authenticated connection of a peer until it closes, breaks or violates the protocol.

        The socket may be an ``ssl.SSLSocket``. The caller owns it, and closes it afterwards.
        """
        ...
