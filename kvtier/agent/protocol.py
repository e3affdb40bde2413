"""What an instance and its controller say to each other, over one WebSocket that the instance opens.

A binary WebSocket message is one frame of :mod:`kvtier.sockets.frames`, without the length that a stream
needs, and no longer than ``MAX_FRAME_BYTES``; it is decoded into the types below and nothing else. Chunk
bytes never travel here: instances fetch them from each other (:mod:`kvtier.peers`). The controller's token
is proved by the ``Authorization`` header of the WebSocket's handshake, before any of this.

The order of things::

    instance                              controller
      Hello ──────────────────────────────►
      ◄──────────────────────────── Welcome      or Refused, which says why
      Serves(models) ─────────────────────►      again whenever an engine brings another model
      Changed(stored, removed) ───────────►      first all that it holds, in parts, then what changes
      InStep ─────────────────────────────►      all that it holds has been told
      Lost ───────────────────────────────►      forget what I hold: it is told from the start again
      Heartbeat ──────────────────────────►      every ``Welcome.heartbeat`` seconds
      WhoHolds(keys) ─────────────────────►
      ◄───────────────────────────── HeldBy
      ◄────────── a command with a ticket
      Progress(ticket) ───────────────────►      as often as it pleases
      Done(ticket) or Failed(ticket) ─────►      once for every command

Rules:

- What an instance holds is what it said on this connection. When the connection ends it holds nothing, and
  commands under way on either side have failed.
- What a command has changed is told before its Done: who asks then who holds it is told the new state.
- The controller hears of an instance by its heartbeats, the instance of it by the pongs to its WebSocket
  pings. ``removed`` may name chunks that were never told as stored.
- A command that names no chunks is answered like any other: with one the controller asks for a sign of life
  when another instance of the same id has come.
- No command both copies and deletes. Whoever moves deletes from the source what the target has confirmed.
- A tier is its number in ``Hello.tiers``. A key is 32 bytes; keys travel joined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvtier.layout import ChunkLayout
from kvtier.sockets.frames import Message, decoder

VERSION = 1
MOST_KEYS = 32_768
"""In one message: 1 MiB of them. What names more comes in parts."""
CONNECT_PATH = "/connect"
"""Where the controller takes WebSockets."""

JoinedKeys: TypeAlias = bytes
"""Under a name of its own: within a message with a field ``bytes`` the type is hidden."""


class TierDescription(msgspec.Struct, frozen=True, array_like=True):
    """One tier of an instance: its name in the settings, its type, and its capacity in bytes."""

    name: str
    type: str
    capacity: int | None
    """``None`` for a shared pool, which knows that itself."""
    shared: bool


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First message of an instance."""

    version: int
    instance: str
    """``controller.instance_id``: no two instances share one."""
    incarnation: int
    """Random, for the life of the process: tells one that comes back from another of the same name."""
    kvtier: str
    """Its version of kvtier."""
    host: str
    process: int
    peer: str | None
    """Where other instances reach it, ``HOST:PORT``, or ``None`` where it serves none."""
    transport: str | None
    tiers: list[TierDescription]


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Hello`."""

    version: int
    heartbeat: float
    """Seconds between two heartbeats."""
    silence: float
    """Seconds of silence after which either side takes the other for dead."""


class Refused(Message, frozen=True, array_like=True, tag=3):
    """The controller will not go on with this connection; the message says why."""

    reason: str


class Model(msgspec.Struct, frozen=True, array_like=True):
    """A model that engines of this instance serve, in one layout."""

    names: list[str]
    """What clients call it, the engine's own name for it first."""
    namespace: bytes
    layout: ChunkLayout
    tokenizer: bool
    """Whether this instance can turn a prompt into token ids."""


class Serves(Message, frozen=True, array_like=True, tag=4):
    """All models that engines of this instance serve or have served since it began."""

    models: list[Model]


class Changed(Message, frozen=True, array_like=True, tag=5):
    """Chunks that a tier holds now, and chunks that it does not hold any more; ``removed`` comes first."""

    tier: int
    stored: bytes
    removed: bytes


class InStep(Message, frozen=True, array_like=True, tag=6):
    """What was told since :class:`Hello` or :class:`Lost` is all that is held; from now on come changes."""


class Lost(Message, frozen=True, array_like=True, tag=7):
    """Changes were lost on the way, as there were too many: what was told before counts no more."""


class TierState(msgspec.Struct, frozen=True, array_like=True):
    """How one tier is, in the order of ``Hello.tiers``."""

    used: int
    """Bytes."""
    chunks: int
    available: bool
    """Whether its circuit breaker is closed."""
    found: int
    """Chunks that look-ups have found in it since the instance began."""


class Heartbeat(Message, frozen=True, array_like=True, tag=8):
    """How the instance is. All counts are since it began."""

    tiers: list[TierState]
    looked_up: int
    """Chunks that engines have asked for."""
    engines: list[str]
    leases: int
    pending_bytes: int
    """That a lower tier has still to write."""


class WhoHolds(Message, frozen=True, array_like=True, tag=9):
    """Which instances hold leading chunks of this prompt, in tiers of their own?"""

    ticket: int
    keys: bytes


class HeldBy(Message, frozen=True, array_like=True, tag=10):
    """Answer to :class:`WhoHolds`: where to reach them and how many leading chunks each holds, most first."""

    ticket: int
    peers: list[str]
    chunks: list[int]


# Commands. Each is answered by Done or Failed with its ticket, whatever happens.


class Fetch(Message, frozen=True, array_like=True, tag=16):
    """Bring chunks into ``tier``: from this instance's other tiers where they are, from ``peer`` otherwise.

    ``peer`` alone is asked for what is not here, or nobody where it is ``None``. All chunks belong to one
    prompt of one namespace, in prefix order, and each is ``lengths`` bytes long. What comes after a chunk
    that is neither here nor there, or that finds no room, is not fetched.
    """

    ticket: int
    tier: int
    peer: str | None
    namespace: bytes
    keys: bytes
    lengths: list[int]
    seconds: float | None
    """After which it is told what has arrived by then. ``None``: as long as it takes."""


class Delete(Message, frozen=True, array_like=True, tag=17):
    """Remove chunks from one tier. Their bytes are freed with the last lease on them.

    Its answer names those that were there. What was not is as it should be, too, and no reason for words.
    """

    ticket: int
    tier: int
    keys: bytes


class DeleteAll(Message, frozen=True, array_like=True, tag=18):
    """Remove every chunk from one tier, or from all where it is ``None``."""

    ticket: int
    tier: int | None


class Pin(Message, frozen=True, array_like=True, tag=19):
    """Keep chunks from being evicted, for some seconds or for good."""

    ticket: int
    keys: bytes
    seconds: float | None


class Unpin(Message, frozen=True, array_like=True, tag=20):
    """The inverse of :class:`Pin`."""

    ticket: int
    keys: bytes


class Tokenize(Message, frozen=True, array_like=True, tag=21):
    """Turn a prompt into token ids, as the engine that serves the model would."""

    ticket: int
    namespace: bytes
    prompt: str


class Cancel(Message, frozen=True, array_like=True, tag=22):
    """Stop carrying out a command: nobody waits for it. It is answered all the same."""

    ticket: int


class Progress(Message, frozen=True, array_like=True, tag=32):
    """So far so many chunks of a command are done."""

    ticket: int
    chunks: int
    bytes: int


class Done(Message, frozen=True, array_like=True, tag=33):
    """A command has been carried out, as far as it could be."""

    ticket: int
    keys: JoinedKeys
    """Those of its chunks that are now as they should be: held by the tier, removed, pinned, unpinned.

    Empty after :class:`DeleteAll` and :class:`Tokenize`.
    """
    chunks: int
    """How many these are; after :class:`DeleteAll`, how many were removed."""
    bytes: int
    """Their bytes; for :class:`Fetch` those that had to be transferred."""
    reason: str | None = None
    """Where some chunks are not as they should be: why, in words."""
    tokens: list[int] = msgspec.field(default_factory=list)
    """After :class:`Tokenize`."""


class Failed(Message, frozen=True, array_like=True, tag=34):
    """A command could not be carried out at all."""

    ticket: int
    reason: str


Command = Fetch | Delete | DeleteAll | Pin | Unpin | Tokenize | Cancel
Answer = Progress | Done | Failed
FromInstance = Hello | Serves | Changed | InStep | Lost | Heartbeat | WhoHolds | Progress | Done | Failed
FromController = Welcome | Refused | HeldBy | Fetch | Delete | DeleteAll | Pin | Unpin | Tokenize | Cancel

decode_from_instance: Callable[[bytes], FromInstance] = decoder(FromInstance, "a message of an instance")
decode_from_controller: Callable[[bytes], FromController] = decoder(
    FromController, "a message of a controller"
)
