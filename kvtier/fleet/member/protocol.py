"""Messages between an instance and its controller, over one WebSocket that the instance opens.

A binary WebSocket message is one frame of :mod:`kvtier.rpc.frames` without its length prefix, of at most
``MAX_FRAME_BYTES``; it is decoded into the types below and nothing else. Chunk bytes are never sent here:
instances fetch them from each other (:mod:`kvtier.peers`). The instance authenticates with the controller's
token in the ``Authorization`` header of the WebSocket handshake, before any message.

Sequence::

    instance                              controller
      Hello ──────────────────────────────►
      ◄──────────────────────────── Welcome      or Refused, with the reason
      Serves(models) ─────────────────────►      again whenever an engine adds a model
      Changed(stored, removed) ───────────►      first a snapshot in parts, then changes
      UpToDate ───────────────────────────►      the snapshot is complete
      Lost ───────────────────────────────►      discard all state: a new snapshot follows
      Heartbeat ──────────────────────────►      every ``Welcome.heartbeat`` seconds
      WhatIf(report) ─────────────────────►      every 30 s, if it has changed
      WhoHolds(keys) ─────────────────────►
      ◄───────────────────────────── HeldBy
      WhoServes(addresses) ───────────────►
      ◄─────────────────────────── ServedAt
      ◄─────────────────────────── a command
      Progress ───────────────────────────►      any number of times
      Done or Failed ─────────────────────►      once for every command

Rules:

- An instance holds what it has reported on this connection. When the connection ends it holds nothing, and
  pending commands of both sides have failed.
- The changes of a command are reported before its Done, so that later queries return the new state.
- The controller detects a dead instance by missed heartbeats, the instance a dead controller by unanswered
  pings. The controller pings an instance when another one with the same id connects.
- ``removed`` may contain chunks that were never reported as stored.
- No command both copies and deletes. A move deletes from the source what the target has confirmed.
- A tier is identified by its index in ``Hello.tiers``. A key has 32 bytes; keys are sent concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec

from kvtier.memory.layout import ChunkLayout
from kvtier.observability.requests import PromptReport, WhyReport
from kvtier.observability.whatif.report import Amount, Count
from kvtier.observability.whatif.report import Report as WhatIfReport
from kvtier.rpc.frames import Interim, Message, Ping, Pong, Refused, Reply, Request, decoder

VERSION = 4
MAX_KEYS = 32_768
"""Maximum number of keys per message, which is 1 MiB; longer lists are split."""
MAX_PEERS = 32
"""Peers in one :class:`Counters`."""
MAX_ADDRESSES = 32
"""Maximum number of addresses in a :class:`WhoServes`."""
CONNECT_PATH = "/connect"
"""HTTP path of the controller's WebSocket endpoint."""

TokenID = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
JoinedKeys: TypeAlias = bytes
"""Alias for use in messages whose field ``bytes`` hides the type."""


class TierDescription(msgspec.Struct, frozen=True, array_like=True):
    """One tier of an instance: its name in the settings, its type, and its capacity in bytes."""

    name: str
    type: str
    capacity: Count | None
    """``None`` for a shared pool, which manages its own capacity."""
    shared: bool


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First message of an instance."""

    version: int
    instance: str
    """``controller.instance_id``, which must be unique."""
    incarnation: int
    """Random and constant for the life of the process: distinguishes a reconnect from another instance."""
    kvtier: str
    """Version of kvtier."""
    host: str
    process: Count
    peer: str | None
    """Address for other instances, ``HOST:PORT``; ``None`` if it does not serve peers."""
    transport: str | None
    tiers: list[TierDescription]


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Hello`."""

    version: int
    heartbeat: float
    """Heartbeat interval in seconds."""
    idle_timeout: float
    """Seconds without a message after which either side considers the other dead."""


class Model(msgspec.Struct, frozen=True, array_like=True):
    """A model that engines of this instance serve, in one layout."""

    names: list[str]
    """Names that clients use for it. The engine's own name is the first."""
    namespace: bytes
    layout: ChunkLayout
    tokenizer: bool
    """Whether this instance can tokenize prompts for it."""
    facts: dict[str, str] = msgspec.field(default_factory=dict)
    """What distinguishes its KV from that of others, while an engine serves it."""


class Serves(Message, frozen=True, array_like=True, tag=10):
    """All models that engines of this instance serve, or have served since it started."""

    models: list[Model]


class Changed(Message, frozen=True, array_like=True, tag=11):
    """Chunks that a tier now holds, and chunks that it has removed. Apply ``removed`` first."""

    tier: int
    stored: bytes
    removed: bytes


class UpToDate(Message, frozen=True, array_like=True, tag=12):
    """End of the snapshot that began with :class:`Hello` or :class:`Lost`. Changes follow."""


class Lost(Message, frozen=True, array_like=True, tag=13):
    """Too many changes were pending and have been dropped: earlier reports are invalid."""


class TierState(msgspec.Struct, frozen=True, array_like=True):
    """State of one tier, in the order of ``Hello.tiers``."""

    used: Count
    """In bytes."""
    chunks: Count
    available: bool
    """Whether its circuit breaker is closed."""
    found: Count
    """Number of chunks that lookups have hit in it since the instance started."""
    hit_tokens: Count = 0
    """Of these chunks, without lookups that a request repeated."""


class TokenCount(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a model, named by its namespace in hexadecimal, or of a configured tenant."""

    name: str
    looked_up: Count
    hit: Count
    saved_seconds: Amount = 0.0
    """How long the engines would have computed what was hit."""


class RouteCount(msgspec.Struct, frozen=True, array_like=True):
    """Transfers from one tier to another."""

    source: str
    target: str
    bytes: Count
    failed: Count
    """Chunks whose transfer failed."""


class PeerCount(msgspec.Struct, frozen=True, array_like=True):
    """A peer from which the instance fetches."""

    address: str
    instance: str
    """Empty until it has connected."""
    state: str
    read_bytes: Count
    bytes_per_second: Amount | None
    """Measured by the latest reads."""


class Counters(msgspec.Struct, frozen=True, array_like=True):
    """What is counted for display only. Counts are since the instance started."""

    outages: list[Count]
    """By tier, as in ``Hello.tiers``."""
    corrupt: list[Count]
    """Corrupt chunks found, by tier."""
    routes: list[RouteCount]
    models: list[TokenCount]
    tenants: list[TokenCount]
    """Without configured tenants, there are none."""
    peers: list[PeerCount]
    """Those with the most bytes, MAX_PEERS at most."""
    misses: dict[str, Count] = {}
    """Tokens that were not hit, by reason."""


class Heartbeat(Message, frozen=True, array_like=True, tag=14):
    """State of the instance. All counts are since it started."""

    tiers: list[TierState]
    looked_up: Count
    """Number of chunks that engines have looked up."""
    engines: list[str]
    leases: Count
    pending_bytes: Count
    """Bytes that are still to be written to lower tiers."""
    looked_up_tokens: Count = 0
    """Tokens of the lookups in which ``hit_tokens`` were hit."""
    counters: Counters | None = None


class WhatIf(Message, frozen=True, array_like=True, tag=27):
    """What other capacities and policies would bring to this instance, as it estimates now."""

    report: WhatIfReport


class WhoHolds(Request, frozen=True, array_like=True, tag=15):
    """Request for the instances that hold leading chunks of this prompt in tiers of their own."""

    keys: bytes


class HeldBy(Reply, frozen=True, array_like=True, tag=16):
    """Answer to :class:`WhoHolds`: peer addresses, and how many leading chunks each holds, most first."""

    peers: list[str]
    chunks: list[int]


class WhoServes(Request, frozen=True, array_like=True, tag=28):
    """Request for those of these addresses at which an instance serves peers."""

    addresses: Annotated[list[str], msgspec.Meta(max_length=MAX_ADDRESSES)]


class ServedAt(Reply, frozen=True, array_like=True, tag=29):
    """Answer to :class:`WhoServes`: the addresses, as asked for."""

    peers: list[str]


# Commands. Each is always answered by Done or Failed. ``trace``: what it is for, as in observability/traces.
# ``term``: that of the lease of the controller, if it leads others. An instance refuses a lower one than it
# has seen: the leader of a later term may have begun to repeat what an earlier one does, or to reverse it.


class Fetch(Request, frozen=True, array_like=True, tag=17):
    """Fetch chunks into ``tier``, from this instance's other tiers if possible, otherwise from ``peer``.

    No other peer is queried; with ``None``, no peer at all. All chunks belong to one prompt of one namespace,
    in prefix order; ``lengths`` are their sizes in bytes. The fetch ends at the first chunk that is not found
    or finds no room.
    """

    tier: int
    peer: str | None
    namespace: bytes
    keys: bytes
    lengths: list[int]
    seconds: float | None
    """Deadline, at which Done reports the chunks that have arrived. ``None``: no deadline."""
    trace: bytes = b""
    term: int = 0


class Delete(Request, frozen=True, array_like=True, tag=18):
    """Remove chunks from one tier. Their memory is freed with the last lease on them.

    The answer lists the removed chunks. Chunks that the tier does not hold are not an error.
    """

    tier: int
    keys: bytes
    trace: bytes = b""
    term: int = 0


class DeleteAll(Request, frozen=True, array_like=True, tag=19):
    """Remove every chunk from ``tier``, or from all tiers with ``None``."""

    tier: int | None
    trace: bytes = b""
    term: int = 0


class Pin(Request, frozen=True, array_like=True, tag=20):
    """Protect chunks from eviction for ``seconds``, or indefinitely with ``None``."""

    keys: bytes
    seconds: float | None
    trace: bytes = b""
    term: int = 0


class Unpin(Request, frozen=True, array_like=True, tag=21):
    """The inverse of :class:`Pin`."""

    keys: bytes
    trace: bytes = b""
    term: int = 0


class Tokenize(Request, frozen=True, array_like=True, tag=22):
    """Tokenize a prompt as the engine that serves the model does."""

    namespace: bytes
    prompt: str
    trace: bytes = b""
    chat: bool = False
    """Whether the prompt is a JSON list of chat messages, to which the model's template is applied."""


class Explain(Request, frozen=True, array_like=True, tag=30):
    """Report what became of the ``last`` requests whose id contains ``request``.

    Only for instances whose heartbeat has counters, like all that is new since :class:`Counters`.
    """

    request: str
    last: int
    trace: bytes = b""


class ExplainPrompt(Request, frozen=True, array_like=True, tag=31):
    """Report what is held of a prompt, for each namespace of a model, and why the rest is not."""

    model: str
    tokens: bytes
    """Little-endian, 32 bits each."""
    salt: str
    trace: bytes = b""


class Cancel(Message, frozen=True, array_like=True, tag=23):
    """Cancel a command. It is still answered."""

    ticket: int
    """That of the command."""


class Progress(Interim, frozen=True, array_like=True, tag=24):
    """Number of chunks, and their bytes, that a command has completed so far."""

    chunks: Count
    bytes: Count


class Outcome(Reply, frozen=True, array_like=True):
    """Base of the answers that end a command."""


class Done(Outcome, frozen=True, array_like=True, tag=25):
    """Completion of a command, possibly partial."""

    keys: JoinedKeys
    """The chunks for which it succeeded: held by the tier, removed, pinned, or unpinned.

    Empty after :class:`DeleteAll` and :class:`Tokenize`.
    """
    chunks: Count
    """Their number; after :class:`DeleteAll`, the number of removed chunks."""
    bytes: Count
    """Their size; for :class:`Fetch`, the number of transferred bytes."""
    reason: str | None = None
    """Why it did not succeed for all chunks."""
    tokens: list[TokenID] = msgspec.field(default_factory=list)
    """The result of :class:`Tokenize`."""
    report: WhyReport | None = None
    """The result of :class:`Explain`."""
    prompts: list[PromptReport] = msgspec.field(default_factory=list)
    """The result of :class:`ExplainPrompt`."""


class Failed(Outcome, frozen=True, array_like=True, tag=26):
    """Failure of a whole command."""

    reason: str


Changing = Fetch | Delete | DeleteAll | Pin | Unpin
Command = Changing | Tokenize | Explain | ExplainPrompt
Report = Serves | Changed | UpToDate | Lost | Heartbeat | WhatIf
FromInstance = Hello | Report | WhoHolds | WhoServes | Progress | Done | Failed | Refused | Ping | Pong
FromController = Welcome | HeldBy | ServedAt | Command | Cancel | Refused | Ping | Pong

decode_from_instance: Callable[[bytes], FromInstance] = decoder(FromInstance, "a message from an instance")
decode_from_controller: Callable[[bytes], FromController] = decoder(
    FromController, "a message from a controller"
)
