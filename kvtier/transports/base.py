"""The one contract of everything that moves bytes between the arenas of two hosts.

Who holds a chunk *grants* it: a number that cannot be guessed stands for some slices of its arena for a
while. Whoever was told the number may read those slices, or write them where they were granted for that, and
nothing else: a span names its grant, and where it does not lie within the slices of that grant it is a
``MISS``. No side ever acts on an address that the other has sent.

A transport knows nothing of chunks, keys, look-ups, secrets and listening sockets. Peers
(:mod:`kvtier.peers`) find each other, prove who they are, exchange grants and endpoints, and hand a transport
connections that are authenticated already.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from kvtier.arena import Arena
from kvtier.backends.base import Outcome
from kvtier.slices import Lease
from kvtier.sockets.connection import Connection, Deadline
from kvtier.units import Duration


class TransportSettings(BaseModel):
    """What every transport has. A transport that has more subclasses it as its ``settings_type``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = Field(description="Which transport moves the bytes.", examples=["tcp"])
    deadline: Duration = Field(
        default=5.0,
        gt=0,
        description="How long one batch of reads or writes may take before it counts as failed.",
        examples=["5s"],
    )


class Access(Enum):
    """What a grant allows."""

    READ = "read"
    WRITE = "write"


class RemoteSpan(NamedTuple):
    """Bytes in another host's arena, which that host has granted."""

    grant: int
    offset: int
    """From the start of that arena."""
    length: int


class Grants(Protocol):
    """What this host has granted to others. Asked in the event loop; synchronous."""

    def hold(self, span: RemoteSpan, access: Access) -> Lease | None:
        """A further lease on the slice within which ``span`` lies, for as long as a transfer lasts.

        The caller releases it. ``None`` where the grant is unknown, over, for another access, or where the
        span does not lie within one of its slices. The lease begins at the slice's start, not at the span's.
        """
        ...


ReadItem = tuple[RemoteSpan, memoryview]
WriteItem = tuple[memoryview, RemoteSpan]
Dial = Callable[[Deadline], Connection]
"""Opens a further authenticated connection to the peer. Blocks, in a worker thread; raises ``OSError``."""


class Link(ABC):
    """A way to one peer's arena. Every method is called from the event loop and must not block it.

    Batches have no upper size, may be empty, and may run concurrently. A span and its view are equally long.
    Outcomes come in the order of the items: ``OK``; ``MISS`` where the peer does not (any longer) grant the
    span; ``FAILED`` for all else, the transport's deadline included. Nothing is raised for what a peer or a
    network does. A call that is cancelled, or out of time, touches the caller's memory no longer once it has
    ended, and ends soon. A connection that is cut is opened again, and a transfer goes on where it stopped,
    within the deadline.
    """

    @abstractmethod
    async def read(self, items: Sequence[ReadItem]) -> Sequence[Outcome]:
        """Fill each view with the bytes of its span."""

    @abstractmethod
    async def write(self, items: Sequence[WriteItem]) -> Sequence[Outcome]:
        """Put each view's bytes where its span is. After ``OK`` the peer's memory holds them."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything. Called once, after the last other call has ended."""


class Transport(ABC):
    """One way to move bytes, for all peers of this host. Subclass it and write the methods below."""

    settings_type: ClassVar[type[TransportSettings]] = TransportSettings
    one_sided: ClassVar[bool] = False
    """Whether a read or write goes on without the other host's taking part (RDMA, NIXL).

    Such a transfer cannot be refused. So a read counts only once the other host has confirmed, after it, that
    the grant stood all along; and memory granted for writing is used for nothing else until its grantee has
    given it back or is cut off.
    """

    def __init__(self, settings: TransportSettings) -> None:  # noqa: B027 - has a default on purpose
        """Called with a ``settings_type``, already validated. Opens nothing and does not block."""

    @abstractmethod
    async def open(self, arena: Arena, grants: Grants) -> None:
        """Make ``arena`` ready to be read and written by others, registered once where that is needed.

        Raises :class:`kvtier.errors.PeerError` where this host cannot do it: a library or device is missing.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything, after the last link is closed. Called once."""

    async def cut_off(self) -> None:  # noqa: B027 - has a default on purpose
        """End every write of others into this arena that is under way, and every way to begin one.

        For :attr:`one_sided` transports, when a peer is gone that may still write. Those that are still there
        lose their transfers, too, and go on with another way. Raises nothing; may be called at any time
        between :meth:`open` and the end of :meth:`close`. Here it does nothing.
        """

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """What a peer's :meth:`connect` needs to know of this host. Sent over an authenticated connection."""

    @abstractmethod
    async def connect(self, endpoint: bytes, dial: Dial) -> Link:
        """A link to the host whose :attr:`endpoint` this is. Raises :class:`kvtier.errors.PeerError`.

        ``endpoint`` comes from a peer that has proved who it is and is checked all the same.
        """


@runtime_checkable
class SupportsConnections(Protocol):
    """A transport whose bytes go over connections that the peers open and authenticate for it."""

    async def serve(self, connected: socket.socket) -> None:
        """Serve one authenticated connection of a peer until it closes, breaks or sends what it must not.

        The socket, which may be an ``ssl.SSLSocket``, belongs to the caller, who closes it afterwards.
        """
        ...
