"""What two instances say to each other over a connection that has been authenticated.

Frames are those of :mod:`kvtier.sockets.frames`, decoded into the types below and nothing else. Chunk bytes
never travel here: a transport (:mod:`kvtier.transports`) carries them, by the grants that are given here.

The order of things::

    client                                server
      Hello(control) ─────────────────────►
      ◄──────────────────────────── Welcome      or Refused, which says why
      LookUp(keys) ───────────────────────►
      ◄──────────── Granted(grant, offsets)      at once; the leading ``ready`` chunks may be read
      Await(grant, chunks) ───────────────►      only where some of them are still on their way up
      ◄───────────────────────── Readable        when they are, or cannot be
                 the transport reads
      Release(grant, chunks) ─────────────►
      ◄────────────────── Released(stood)        whether the grant stood until now
      Announce(number, keys) ─────────────►      a prompt whose chunks are about to be pushed
      ◄──────────────────────── Announced
      Stage(namespace) ───────────────────►      only where both hand over between memories of devices
      ◄─────────────── Staged(endpoints)
      Reserve(keys, lengths) ─────────────►      room in the server's first tier, or staging, please
      ◄─────────── Reserved(grant, offsets)      at once; these spans may be written
                 the transport writes
      Commit(grant, chunks, checksums) ───►      they are written
      ◄────────────────── Committed(whole)       which of them are what the checksums say, and served now
      Withdraw(number) ───────────────────►      nothing more of that prompt will come
      ◄──────────────────────── Withdrawn
      Ping ───────────────────────────────►      when nothing else was said for a while
      ◄───────────────────────────── Pong

A connection whose :class:`Hello` says ``data`` gets a :class:`Welcome` and belongs to the transport from then
on.

Rules that keep bytes right:

- A grant is a random number of 63 bits, given once. It ends with ``Release`` of its last chunk, when
  ``Welcome.lease`` seconds have passed, or with the connection that it was given on. What a transfer is using
  at that moment stays leased until the transfer has ended.
- Only what this host's own tiers hold is granted: nobody is sent on to a pool or to a third host.
- Room for chunks that are pushed is granted for ``Reserved.seconds``. It goes back with ``Release``, when
  that time has passed, or with the connection; where the transport cannot refuse a late write, its memory is
  used for nothing else before the pusher has given it back or was cut off. A chunk is served once its bytes
  match the checksum of its ``Commit``, by which the right to write there has ended. The server writes its
  header. A staging buffer is written by NIXL, which says when it is done, and has neither.
- Requests carry a ticket, which their answer repeats. Answers may come in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvtier.sockets.frames import Message, decoder

VERSION = 3
MOST_IN_ONE = 32_768
"""Chunks of one :class:`Announce`: 1 MiB of keys."""
MOST_RESERVED = 128
"""Chunks of one :class:`Reserve`."""
CHECKSUM_BYTES = 16
NO_GRANT = 0

Purpose = Literal["control", "data"]


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First frame of every connection. ``instance`` names the process that connects, for people."""

    version: int
    instance: str
    purpose: Purpose


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Hello`."""

    version: int
    instance: str
    transport: str
    """The name of the transport that the server uses."""
    endpoint: bytes
    """What that transport's ``connect`` needs."""
    lease: float
    """Seconds for which a grant is given."""


class Refused(Message, frozen=True, array_like=True, tag=3):
    """The server will not go on with this connection; the message says why."""

    reason: str


class LookUp(Message, frozen=True, array_like=True, tag=4):
    """Grant me those of ``keys`` that you hold; with ``prefix`` only up to the first that you do not."""

    ticket: int
    keys: bytes
    """32 bytes each, joined."""
    prefix: bool


class Granted(Message, frozen=True, array_like=True, tag=5):
    """Which of the keys are granted, by their positions in the question, and where they lie in the arena."""

    ticket: int
    grant: int
    """:data:`NO_GRANT` where there is none."""
    positions: list[int]
    offsets: list[int]
    lengths: list[int]
    ready: int
    """How many of these, from the first, may be read now; the others after an :class:`Await`."""


class Await(Message, frozen=True, array_like=True, tag=6):
    """Tell me when these chunks of a grant, by their numbers in :class:`Granted`, may be read."""

    ticket: int
    grant: int
    chunks: list[int]


class Readable(Message, frozen=True, array_like=True, tag=7):
    """Whether each may be read now; where not, it never will."""

    ticket: int
    readable: list[bool]


class Release(Message, frozen=True, array_like=True, tag=8):
    """I need these chunks of a grant no longer."""

    ticket: int
    grant: int
    chunks: list[int]


class Released(Message, frozen=True, array_like=True, tag=9):
    """Whether all of them were granted until now. If not, what was read of them does not count."""

    ticket: int
    stood: bool


class Contains(Message, frozen=True, array_like=True, tag=10):
    """Which of these keys do you hold? Grants nothing."""

    ticket: int
    keys: bytes


class Contained(Message, frozen=True, array_like=True, tag=11):
    """Answer to :class:`Contains`, in its order."""

    ticket: int
    held: list[bool]


class Ping(Message, frozen=True, array_like=True, tag=12):
    """Are you there?"""

    ticket: int


class Pong(Message, frozen=True, array_like=True, tag=13):
    """Answer to :class:`Ping`."""

    ticket: int


class Announce(Message, frozen=True, array_like=True, tag=14):
    """Chunks of one prompt, in prefix order, that I am about to push, as far as you do not hold them."""

    ticket: int
    number: int
    """Of the announcement, chosen by who announces: another one than those that stand."""
    keys: bytes


class Announced(Message, frozen=True, array_like=True, tag=15):
    """Whether look-ups wait for these from now on. Where there are too many already, they do not."""

    ticket: int
    noted: bool


class Withdraw(Message, frozen=True, array_like=True, tag=16):
    """Of what was announced, nothing more will come. Unknown numbers are passed over."""

    ticket: int
    number: int


class Withdrawn(Message, frozen=True, array_like=True, tag=17):
    """Answer to :class:`Withdraw`."""

    ticket: int


class Reserve(Message, frozen=True, array_like=True, tag=18):
    """Grant me room for these chunks of one model, so that I can write their payloads."""

    ticket: int
    namespace: bytes
    keys: bytes
    parents: bytes
    """32 bytes each, joined, in the order of the keys."""
    payload_lengths: list[int]
    staging: int = 0
    """The number of the staging buffer, as in :class:`Staged`, where it is wanted there.

    Offsets are within the memory of each rank then, whose slice of the payload goes there.
    """


class Reserved(Message, frozen=True, array_like=True, tag=19):
    """Which of the chunks may be written, by their positions in the question, and where the payloads go.

    Those that are named nowhere found no room.
    """

    ticket: int
    grant: int
    """:data:`NO_GRANT` where there is none."""
    positions: list[int]
    offsets: list[int]
    seconds: float
    """For how long."""
    held: list[int]
    """The positions of those that are here already."""
    coming: list[int]
    """The positions of those that are on their way here from elsewhere."""
    refusal: str
    """Why nothing at all of this model is taken; empty where it is."""


class Commit(Message, frozen=True, array_like=True, tag=20):
    """These chunks of a grant, by their numbers in :class:`Reserved`, are written, once and for all."""

    ticket: int
    grant: int
    chunks: list[int]
    checksums: bytes
    """XXH3-128 of each payload, :data:`CHECKSUM_BYTES` each, joined. None for a staging buffer."""


class Committed(Message, frozen=True, array_like=True, tag=21):
    """Which of them are whole and served from now on. Of the others nothing is left."""

    ticket: int
    whole: list[bool]


class Stage(Message, frozen=True, array_like=True, tag=22):
    """Is there a staging buffer beside the engine that serves this model?"""

    ticket: int
    namespace: bytes


class Staged(Message, frozen=True, array_like=True, tag=23):
    """Where it is, for NIXL: an endpoint for each rank. Another number stands for other memory."""

    ticket: int
    number: int
    endpoints: list[bytes]
    refusal: str
    """Why there is none; empty where there is one."""


FromClient = (
    Hello | LookUp | Await | Release | Contains | Ping | Announce | Withdraw | Reserve | Commit | Stage
)
FromServer = (
    Welcome
    | Refused
    | Granted
    | Readable
    | Released
    | Contained
    | Pong
    | Announced
    | Withdrawn
    | Reserved
    | Committed
    | Staged
)

decode_from_client: Callable[[bytes], FromClient] = decoder(FromClient, "a message of a peer that asks")
decode_from_server: Callable[[bytes], FromServer] = decoder(FromServer, "a message of a peer that serves")
