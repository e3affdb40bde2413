"""Control protocol between two instances, over an authenticated connection.

Messages are frames (:mod:`kvtier.rpc.frames`), decoded strictly into the types below. Chunk bytes are not
sent here: a transport (:mod:`kvtier.transports`) copies them, authorized by the grants of this protocol.

Message sequence::

    client                                server
      Hello(control) ─────────────────────►
      ◄──────────────────────────── Welcome      or Refused, with the reason
      Lookup(keys) ───────────────────────►
      ◄──────────── Granted(grant, offsets)      immediately; the leading ``ready`` chunks may be read
      Await(grant, chunks, codec) ────────►      only if some are still being promoted, or are to be encoded
      ◄───────────────────────── Readable        when they are, or never will be
                 the transport reads
      Release(grant, chunks) ─────────────►
      ◄────────────────── Released(valid)        whether the grant was valid until now
      Announce(number, keys) ─────────────►      a prompt whose chunks will be pushed
      ◄──────────────────────── Announced
      Stage(namespace) ───────────────────►      only for KV transfers between staging buffers
      ◄─────────────── Staged(endpoints)
      Reserve(keys, lengths) ─────────────►      reserve room in the first tier or staging buffer, for
      ◄─────────── Reserved(grant, offsets)      chunks of any prompts; these spans may be written
                 the transport writes
      Commit(grant, chunks, checksums) ───►      they are written
      ◄────────────────── Committed(valid)       which match their checksums and are served now
      Withdraw(number) ───────────────────►      no more chunks of that prompt will be pushed
      Ping ───────────────────────────────►      keep-alive on an idle connection
      ◄───────────────────────────── Pong

After :class:`Welcome`, a connection with the purpose ``data`` belongs to the transport, and one with the
purpose ``engine`` to the bridge. A side that violates
the protocol gets ``Refused`` with the reason, and is disconnected.

Correctness rules:

- A grant is a random 63-bit number, used once. It ends with ``Release`` of its last chunk, after
  ``Welcome.lease`` seconds, or with its connection. Slices that a transfer uses at that moment stay leased
  until the transfer ends.
- Only chunks in this host's own tiers are granted, never those of a shared pool or a third host.
- Room for pushed chunks is granted for ``Reserved.seconds``. It ends with ``Release``, after that time, or
  with the connection. If the transport cannot reject a late write, the memory is not reused before the pusher
  has released it or was cut off. A chunk is served once its payload matches the checksum of its ``Commit``,
  which also ends the right to write. The server writes its header. Chunks in a staging buffer have neither
  checksum nor header: NIXL writes them and reports completion.
- A response repeats the ticket of its request. Responses may arrive out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from kvtier.memory.header import IDENTITY
from kvtier.rpc.frames import Message, Ping, Pong, Refused, Reply, Request, decoder

VERSION = 7
MAX_IN_ONE = 32_768
"""Maximum chunks of one :class:`Announce`: 1 MiB of keys."""
MAX_RESERVED = 128
"""Maximum chunks of one :class:`Reserve`."""
CHECKSUM_BYTES = 16
NO_GRANT = 0

Purpose = Literal["control", "data", "engine"]


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First frame of every connection. ``instance``: display name of the connecting process.

    ``purpose``: messages between peers (``control``), data of a transport, or those of an engine's scheduler
    (:mod:`kvtier.bridge.protocol`) that has workers on the server's host.
    """

    version: int
    instance: str
    purpose: Purpose


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """Response to :class:`Hello`."""

    version: int
    instance: str
    transport: str
    """Name of the server's transport."""
    endpoint: bytes
    """Argument of that transport's ``connect``."""
    lease: float
    """Lifetime of a grant in seconds."""
    codec: int = IDENTITY
    """The code of the codec in which chunks may be requested."""


class Lookup(Request, frozen=True, array_like=True, tag=10):
    """Request a grant of the held ``keys``; with ``prefix``, only up to the first miss."""

    keys: bytes
    """32 bytes each, concatenated."""
    prefix: bool
    trace: bytes = b""
    """What it is for, as in ``observability/traces``; empty if that is not traced."""


class Granted(Reply, frozen=True, array_like=True, tag=11):
    """Response to :class:`Lookup`: positions of the granted keys in the request, and their arena slices."""

    grant: int
    """:data:`NO_GRANT` if nothing is granted."""
    positions: list[int]
    offsets: list[int]
    lengths: list[int]
    ready: int
    """How many leading ones may be read now; the others after an :class:`Await`."""


class Await(Request, frozen=True, array_like=True, tag=12):
    """Wait until these chunks of a grant, by their indexes in :class:`Granted`, may be read."""

    grant: int
    chunks: list[int]
    codec: int = IDENTITY
    """The codec of :class:`Welcome`, to have them encoded."""


class Readable(Reply, frozen=True, array_like=True, tag=13):
    """Response to :class:`Await`: whether each may be read now; if not, it never will."""

    readable: list[bool]
    encoded: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """If any was encoded: the offset and the length of each as it is now; 0 and 0 for those as they were."""


class Release(Request, frozen=True, array_like=True, tag=14):
    """Release these chunks of a grant."""

    grant: int
    chunks: list[int]


class Released(Reply, frozen=True, array_like=True, tag=15):
    """Response to :class:`Release`: whether all were granted until now. If not, discard what was read."""

    valid: bool


class Contains(Request, frozen=True, array_like=True, tag=16):
    """Query which of these keys are held. Grants nothing."""

    keys: bytes


class Contained(Reply, frozen=True, array_like=True, tag=17):
    """Response to :class:`Contains`, in its order."""

    held: list[bool]


class Announce(Request, frozen=True, array_like=True, tag=18):
    """Announce chunks of one prompt, in prefix order, that will be pushed unless the server holds them."""

    number: int
    """Id of the announcement, chosen by the client, and unique among its open ones."""
    keys: bytes


class Announced(Reply, frozen=True, array_like=True, tag=19):
    """Response to :class:`Announce`: whether lookups wait for these; not if too many are announced."""

    accepted: bool


class Withdraw(Message, frozen=True, array_like=True, tag=20):
    """End an announcement. Unknown numbers are ignored. There is no response."""

    number: int


class Reserve(Request, frozen=True, array_like=True, tag=22):
    """Reserve room for the payloads of these chunks of one namespace."""

    namespace: bytes
    keys: bytes
    parents: bytes
    """32 bytes each, concatenated, in the order of the keys."""
    payload_lengths: list[int]
    staging: int = 0
    """Number of the staging buffer to reserve in, as in :class:`Staged`; 0 for the first tier.

    Offsets are then within each rank's buffer, for that rank's slice of the payload.
    """
    block_hashes: list[bytes] = msgspec.field(default_factory=list)
    """Those of each chunk, if any has some: see :func:`kvtier.memory.keys.block_hashes`."""
    tokens: list[int] = msgspec.field(default_factory=list)
    """The number of tokens of each chunk, if any is known."""
    ahead: bool = False
    """Whether the chunks are still being computed, and may never come: nothing is evicted for them."""


class Reserved(Reply, frozen=True, array_like=True, tag=23):
    """Response to :class:`Reserve`: positions of the chunks that may be written, and payload offsets.

    There is no room for chunks that are listed nowhere.
    """

    grant: int
    """:data:`NO_GRANT` if nothing is granted."""
    positions: list[int]
    offsets: list[int]
    seconds: float
    """Lifetime of the reservation."""
    held: list[int]
    """Positions of chunks that the server has."""
    pending: list[int]
    """Positions of chunks that are in flight to the server from elsewhere."""
    refusal: str
    """Why the server rejects this namespace altogether; empty if it does not."""


class Commit(Request, frozen=True, array_like=True, tag=24):
    """Commit written chunks of a grant, by their indexes in :class:`Reserved`. Ends the right to write."""

    grant: int
    chunks: list[int]
    checksums: bytes
    """XXH3-128 of each payload, :data:`CHECKSUM_BYTES` each, concatenated. Empty for a staging buffer."""
    trace: bytes = b""
    """As in :class:`Lookup`."""


class Committed(Reply, frozen=True, array_like=True, tag=25):
    """Response to :class:`Commit`: which are valid and served from now on. The others are dropped."""

    valid: list[bool]


class Stage(Request, frozen=True, array_like=True, tag=26):
    """Query the staging buffers of the engine that serves this namespace."""

    namespace: bytes


class Staged(Reply, frozen=True, array_like=True, tag=27):
    """Response to :class:`Stage`: NIXL endpoints, one per rank. The number changes with the memory."""

    number: int
    endpoints: list[bytes]
    refusal: str
    """Why there is no staging buffer; empty if there is one."""


ClientRequest = Lookup | Await | Release | Contains | Announce | Withdraw | Reserve | Commit | Stage
FromClient = Hello | ClientRequest | Refused | Ping
ServerReply = Granted | Readable | Released | Contained | Announced | Reserved | Committed | Staged
FromServer = Welcome | ServerReply | Refused | Pong

decode_from_client: Callable[[bytes], FromClient] = decoder(FromClient, "a client message")
decode_from_server: Callable[[bytes], FromServer] = decoder(FromServer, "a server message")
