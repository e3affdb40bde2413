"""What engine and cache process say to each other over the Unix socket.

Frames are those of :mod:`kvtier.sockets.frames`, decoded into the types below and nothing else. Chunk bytes
never travel here: they lie in the arena, whose file descriptor comes with :class:`Welcome` (SCM_RIGHTS).

The order of things::

    engine                                cache process
      Hello ──────────────────────────────►
      ◄───────────────────────────── Welcome + arena fd
    scheduler
      LookUp(keys) ───────────────────────►
      ◄──────── Found(leases, fetching=n)       at once
      ◄──────── Found(more leases, fetching=0)  when what was fetched has arrived, or the deadline has passed
      Reserve(runs) ──────────────────────►     at most once a step, for all requests that it computes
      ◄──────────────────── Reserved(leases)
      Release(leases) ────────────────────►     after the workers have loaded
      HandOver(to, keys) ─────────────────►     before the first of them is reserved
      ◄─────────────────── HandedOver(tokens)   when the other side has made room, or has not; for information
      EndHandOver(complete) ──────────────►     when the last of them is reserved, or none will be any longer
    worker
      Confirm(leases) ────────────────────►     after copying out of the arena, before anyone relies on it
      ◄────────────────────── Confirmed(held)
      Commit(leases) ─────────────────────►     after copying into the arena; READY when every rank has
      AskStaging(gpu) ────────────────────►     once, where hand-overs go past the host's memory
      ◄───────────────── OfferStaging(handle)   when there is a buffer, and again when that was lost
      OpenedStaging(number) ──────────────►     it may be used when every rank has opened it

Rules that keep bytes right:

- A lease number is never used twice in the life of a cache process, whose ``epoch`` is random.
- Leases belong to the engine. They end with ``Release``, ``Abandon`` or ``Cancel``, with a new
  scheduler ``Hello`` of the same engine that does not list them, or when its last connection is gone.
- The cache process never ends an engine's leases on its own initiative: an engine that is merely slow
  may still be copying.
- A load counts only when ``Confirmed`` came back true after the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from kvtier.agent.served import EngineModel
from kvtier.layout import ChunkLayout
from kvtier.sockets.frames import Message, decoder

VERSION = 5

MAX_RESERVED_CHUNKS = 32_768
"""Limit of the chunks in one :class:`Reserve`; a scheduler asks for the rest in its next step."""

STAGING = "staging"
"""The name and the type of what is told as one more tier, after the others: the engine's staging buffer."""

Role = Literal["scheduler", "worker", "observer"]


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First frame of every connection.

    ``engine`` is the same for the scheduler and the workers of one engine on this host. ``holding``
    are the leases that a reconnecting scheduler still relies on. An ``observer`` may only ask for
    :class:`Status` and owns nothing; its layout is empty.
    """

    version: int
    engine: str
    role: Role
    rank: int
    layout: ChunkLayout
    namespace: bytes
    changes: bool = False
    """Whether this connection wants :class:`Changed`."""
    holding: list[int] = msgspec.field(default_factory=list)
    model: EngineModel | None = None
    """What the engine calls its model, and where its tokenizer is: for the controller. From schedulers."""


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Hello`; the arena's file descriptor is attached."""

    version: int
    epoch: int
    arena_bytes: int
    tiers: list[str]
    media: list[str]
    """The type of each tier: ``cpu``, ``disk``, …"""
    peer: str | None
    """Where this instance listens for peers, ``HOST:PORT``; the host may be one that stands for all."""


class Refused(Message, frozen=True, array_like=True, tag=3):
    """The cache process will not go on with this connection; the message says why."""

    reason: str


class LookUp(Message, frozen=True, array_like=True, tag=4):
    """Which leading chunks of a prompt are held? ``tokens`` are covered by ``keys`` altogether.

    Of the first ``expect_chunks``, those that a peer is pushing here count as fetched for so many seconds.
    """

    ticket: int
    keys: bytes
    tokens: int
    expect_chunks: int = 0
    expect_seconds: float = 0.0


class Found(Message, frozen=True, array_like=True, tag=5):
    """Further leading chunks: a lease, an arena offset and a source tier each, in prefix order.

    ``fetching`` more are on their way, or being asked for; when it is 0 this ticket gets no further answer.
    Without leases, and with ``fetching``, it reports that some of them have arrived.
    """

    ticket: int
    leases: list[int]
    offsets: list[int]
    sources: list[int]
    fetching: int
    staging: int = 0
    """Of chunks whose source is the one after the last tier: the number of the buffer that has them.

    Their offsets are within each rank's memory, and there is no header.
    """


class Cancel(Message, frozen=True, array_like=True, tag=6):
    """Forget a look-up: stop waiting, release every lease it was given."""

    ticket: int


class Release(Message, frozen=True, array_like=True, tag=7):
    """The engine no longer needs these leases."""

    leases: list[int]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks of one prompt. ``parent`` is the key before the first.

    All are full chunks but the last, which has ``last_tokens`` tokens.
    """

    parent: bytes
    keys: bytes
    last_tokens: int
    hand_over: int = 0
    """The ticket of a :class:`HandOver`: reserve in the staging buffer, what is transferred from there."""


class Reserve(Message, frozen=True, array_like=True, tag=8):
    """Reserve room for the chunks of many requests, :data:`MAX_RESERVED_CHUNKS` at most.

    Without runs it reserves nothing: an answer is an answer.
    """

    ticket: int
    runs: list[Run]


class Reserved(Message, frozen=True, array_like=True, tag=9):
    """A lease and an offset for each key of each run, in order.

    Lease 0 where there is no room, or the chunk is held or reserved already.
    """

    ticket: int
    leases: list[int]
    offsets: list[int]
    staging: int = 0
    """The buffer that the offsets of runs with ``hand_over`` are in, on each rank."""


class Commit(Message, frozen=True, array_like=True, tag=10):
    """This rank has filled its slices of these reservations."""

    leases: list[int]


class Abandon(Message, frozen=True, array_like=True, tag=11):
    """These reservations will not be filled."""

    leases: list[int]


class Confirm(Message, frozen=True, array_like=True, tag=12):
    """Were these leases held all along?"""

    ticket: int
    leases: list[int]


class Confirmed(Message, frozen=True, array_like=True, tag=13):
    """Whether all of the leases asked about still stand."""

    ticket: int
    held: bool


class Clear(Message, frozen=True, array_like=True, tag=14):
    """Remove every chunk of this engine's namespace from every local tier."""

    ticket: int


class Cleared(Message, frozen=True, array_like=True, tag=15):
    """How many chunks were removed."""

    ticket: int
    chunks: int


class HandOver(Message, frozen=True, array_like=True, tag=19):
    """Push these consecutive chunks of one prompt to the peer at ``to``, each as soon as it is READY here.

    All are full chunks but the last; ``tokens`` are covered by ``keys`` altogether, and ``root`` is the key
    before the first. What was held before is pushed, too. It ends with :class:`EndHandOver`, or with this
    connection.
    """

    ticket: int
    to: str
    root: bytes
    keys: bytes
    tokens: int


class HandedOver(Message, frozen=True, array_like=True, tag=20):
    """How many leading tokens the other side holds, or has made room for, and why they are not all."""

    ticket: int
    tokens: int
    reason: str


class EndHandOver(Message, frozen=True, array_like=True, tag=21):
    """No further chunk of this prompt is going to be reserved.

    Where it is ``complete``, those that are reserved are still pushed once they are READY; otherwise, and for
    all others, nothing more is, and the room on the other side goes back.
    """

    ticket: int
    complete: bool


class AskStaging(Message, frozen=True, array_like=True, tag=22):
    """A worker wants a staging buffer, beside its KV."""

    gpu: str
    """As in ``CUDA_VISIBLE_DEVICES``; empty where the engine's KV is in memory of the host."""


class OfferStaging(Message, frozen=True, array_like=True, tag=23):
    """The buffer of this worker, in the place of any before it, or why there is none."""

    number: int
    """0 where there is none."""
    handle: bytes
    """CUDA's handle for memory of a GPU, the path of a file for memory of the host."""
    length: int
    reason: str


class OpenedStaging(Message, frozen=True, array_like=True, tag=24):
    """This worker has opened the buffer that it was offered last."""

    number: int


class Status(Message, frozen=True, array_like=True, tag=16):
    """What is held, leased and on its way?"""

    ticket: int


class StatusReport(Message, frozen=True, array_like=True, tag=17):
    """Answer to :class:`Status`: JSON for people and tests."""

    ticket: int
    report: bytes


class Changed(Message, frozen=True, array_like=True, tag=18):
    """Chunks of this connection's namespace that became READY in a tier, or left it."""

    tier: int
    stored: bytes
    removed: bytes


class Notice(Message, frozen=True, array_like=True, tag=25):
    """A warning of the cache process, for the engine's log. To schedulers, a few a second at most."""

    text: str


FromEngine = (
    Hello
    | LookUp
    | Cancel
    | Release
    | Reserve
    | Commit
    | Abandon
    | Confirm
    | Clear
    | Status
    | HandOver
    | EndHandOver
    | AskStaging
    | OpenedStaging
)
FromCache = (
    Welcome
    | Refused
    | Found
    | Reserved
    | Confirmed
    | Cleared
    | StatusReport
    | Changed
    | HandedOver
    | OfferStaging
    | Notice
)

decode_from_engine: Callable[[bytes], FromEngine] = decoder(FromEngine, "a message of an engine")
decode_from_cache: Callable[[bytes], FromCache] = decoder(FromCache, "a message of a cache process")
