"""Messages between an engine and its cache process over the Unix socket.

Frames are those of :mod:`kvtier.rpc.frames`, decoded into the types below and nothing else. Chunk bytes are
never sent over this socket: they are in the arena, whose file descriptor comes with :class:`Welcome`
(SCM_RIGHTS).

Sequence::

    engine                                cache process
      Hello ──────────────────────────────►
      ◄───────────────────────────── Welcome + arena fd
    scheduler
      Lookup(keys) ───────────────────────►
      ◄──────── Found(leases, fetching=n)       immediately
      ◄──────── Found(more leases, fetching=m)  whenever fetched chunks have arrived
      ◄──────── Found(more leases, fetching=0)  when all of them have arrived, or at the deadline
      Reserve(runs) ──────────────────────►     at most once per step, for all scheduled requests
      ◄──────────────────── Reserved(leases)
      ◄──────────────── Explained(lookups)      after the final answers
      Cancel(ticket) ─────────────────────►     after the workers have loaded, or if nothing is loaded
      Outcomes(requests) ─────────────────►     of requests that begin to compute or whose answer has ended:
                                                twice a second, before chunks that it concerns are offered,
                                                and when an engine gets idle
      UseWeights(namespace) ──────────────►     when the weights have changed, or may have changed
      KVTransfer(to, keys) ───────────────►     before the first of its chunks is reserved
      ◄──────────── KVTransferResult(tokens)    when the peer has made room, or on failure; informational
      EndKVTransfer(complete) ────────────►     after the last of its chunks is reserved, or on cancellation
      Watch(keys) ────────────────────────►     if vLLM publishes KV events
      ◄───────────────────────── Held(tiers)    now, and after changes; several times a second at most
    worker
      Confirm(leases) ────────────────────►     after copying out of the arena, before the data is used
      ◄────────────────────── Confirmed(held)
      Commit(leases) ─────────────────────►     after copying into the arena; READY once all ranks commit
      Leave() ────────────────────────────►     before a worker that fills nothing disconnects
      RequestStaging(gpu) ────────────────►     once, if KV transfers bypass host memory
      ◄───────────────── OfferStaging(handle)   when a buffer is allocated, and after every reallocation
      OpenedStaging(number) ──────────────►     the buffer is in use once every rank has opened it
    both
      Spans(spans) ───────────────────────►     if Welcome.sampling is set: what has ended of traced requests

Consistency rules:

- Lease numbers are unique within the lifetime of a cache process, which its random ``epoch`` identifies.
- Leases belong to the engine. They end with ``Abandon`` or ``Cancel``, with a new scheduler
  ``Hello`` of the same engine that does not list them, or with the engine's last connection.
- When the scheduler's connection or that of a rank ends, the chunks that it was filling are void: others may
  store them. Their memory is free once every rank has stopped writing to it: with its ``Commit`` or
  ``Abandon``, with ``Leave``, with a new ``Hello`` that does not list it, or when its process has exited. A
  worker never fills a reservation below ``Welcome.first_lease`` that its ``Hello`` does not list.
- A new connection of a scheduler or rank replaces its earlier one, of which nothing more is handled.
- The cache process never frees memory that a slow engine may still be writing to.
- A load is valid only if ``Confirmed(held=True)`` arrives after the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvtier.catalog.endings import MAX_SIGNATURE
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.misses import Miss, MissReason, misses_behind
from kvtier.fleet.member.served_models import EngineModel
from kvtier.memory.keys import KEY_BYTES
from kvtier.memory.layout import ChunkLayout
from kvtier.observability.requests import PromptReport, WhyReport
from kvtier.observability.traces.spans import Sampling, Span
from kvtier.observability.whatif.report import Report
from kvtier.pipeline.verify import Recomputation
from kvtier.rpc.frames import Message, Ping, Pong, Refused, Reply, Request, decoder

VERSION = 18

MAX_RESERVED_CHUNKS = 32_768
"""Maximum number of chunks in one :class:`Reserve`; a scheduler reserves the rest in its next step."""
MAX_WATCHED_CHUNKS = 262_144
"""Maximum number of chunks that a scheduler watches."""

MAX_WHY_REQUESTS = 10_000
"""Maximum number of requests in one :class:`WhyAnswer`, which takes 1 KiB for each."""

STAGING = "staging"
"""Name and type of the engine's staging buffer, which :class:`Welcome` lists as a tier after the others."""

Role = Literal["scheduler", "worker", "observer"]


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """The weights that an engine has now: the namespace of its chunks, and the id for display."""

    namespace: bytes
    id: str


class Hello(Message, frozen=True, array_like=True, tag=1):
    """First frame of every connection.

    ``engine`` is the same for the scheduler and the workers of one part of an engine. ``holding`` lists the
    reservations that a reconnecting worker still fills, or the leases that a reconnecting scheduler still
    uses: none, as this one forgets its lookups with the connection. An ``observer`` may only send
    :class:`Status`, :class:`WhatIf` and :class:`ClearWeights`, and owns nothing; its layout is empty.
    """

    version: int
    engine: str
    role: Role
    rank: int
    layout: ChunkLayout
    namespace: bytes
    holding: list[int] = msgspec.field(default_factory=list)
    model: EngineModel | None = None
    """Model name and tokenizer location, for the controller. Sent by schedulers only."""
    to: str = ""
    """Address of another host's cache process (``peer.listen``), for a scheduler with workers there. The
    cache process of this host passes all messages on."""
    weights: Weights | None = None
    """Sent by schedulers. Workers only know :attr:`namespace`, that of the weights at startup."""
    epoch: int = 0
    """The cache process that a client was connected to before, to which ``holding`` and ``seen`` refer."""
    seen: int = 0
    """The last reservation that a reconnecting scheduler was granted. It knows of none after it."""
    client: int = 0
    """Random, the same in each ``Hello`` of a worker, which writes to nothing that it does not list."""


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Hello`; the arena's file descriptor is attached."""

    version: int
    epoch: int
    arena_bytes: int
    tiers: list[str]
    media: list[str]
    """The type of each tier: ``cpu``, ``disk``, …"""
    peer: str | None
    """Address on which this instance listens for peers, ``HOST:PORT``; the host may be a wildcard."""
    pools: bool = False
    """Whether there are shared pools. A lookup asks them what they hold before it fetches anything."""
    first_lease: int = 0
    """Reservations below this number are void for a worker, except those that its ``Hello`` lists."""
    canary_tiers: list[str] = msgspec.field(default_factory=list)
    """The tiers that a canary checks: those that chunks are written to."""
    sampling: Sampling | None = None
    """Which requests are to be traced; ``None`` if none are."""
    show_text: bool = False
    """``why.show_text``: whether lookups have the tokens of their prompts."""
    signature_key: bytes = bytes(32)
    """32 bytes, of this cache process and the model: the key of :attr:`AnswerEnded.signature`."""


class RequestInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a prompt consists of besides tokens."""

    adapter: str = ""
    """What identifies the content of its adapter."""
    images: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """The first token and the number of tokens of its images and other inputs."""
    beginning: bytes = b""
    """Hashes of its first tokens: see :func:`~kvtier.memory.keys.beginning_of`."""
    prompt: bytes = b""
    """Its tokens, little-endian, 32 bits each, if :attr:`Welcome.show_text` is set."""


class Lookup(Request, frozen=True, array_like=True, tag=10):
    """Request for the held leading chunks of a prompt. ``keys`` cover ``tokens`` tokens in total.

    Chunks among the first ``expect_chunks`` that a peer is pushing here count as being fetched for
    ``expect_seconds``.
    """

    keys: bytes
    tokens: int
    expect_chunks: int = 0
    expect_seconds: float = 0.0
    hints: ChunkHints | None = None
    """Replaces the hints of the chunks that are found."""
    root: bytes = b""
    """The key before the first chunk. With it, a chunk may be found that is used in part: the next one of
    the prompt is not held, but one that begins like it."""
    marks: bytes = b""
    """One byte of each block hash of the prompt."""
    compute_seconds: float = 0.0
    """How long the engine is expected to compute the prompt; 0 if that is unknown."""
    repeated: bool = False
    """Whether the engine has looked up this request before: it still waits, or was preempted."""
    described: RequestInfo | None = None
    """With it, an :class:`Explanation` follows the answer. The engine sends an :class:`Outcome`."""
    canary: str = ""
    """For a canary: the tier that its chunks are read from, if that holds them. See :class:`Query`."""
    trace: bytes = b""
    """The trace of the request, as in ``observability/traces``; empty if it is not traced."""
    renews: int = 0
    """The ticket of the request's first lookup, if this one is to find more. What both find counts once, and
    what is still missing is explained under that ticket."""


class Explanation(msgspec.Struct, frozen=True, array_like=True):
    """Why the tokens of a lookup from one token on, ``begins``, were not a hit, in prefix order."""

    ticket: int
    begins: int
    misses: list[Miss]


class Explained(Message, frozen=True, array_like=True, tag=38):
    """Why tokens of lookups were not a hit."""

    lookups: list[Explanation]


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request: for each of its ``tokens`` where it came from, or why it was computed."""

    ticket: int
    """Of its lookup; 0 if there was none."""
    request: str
    """Its id."""
    tokens: int
    engine_tokens: int
    """Tokens that the engine's own cache held."""
    hits: dict[str, int] = msgspec.field(default_factory=dict)
    """Tokens that were loaded, by tier."""
    reason: MissReason | None = None
    """Why none was loaded from here, if the cache process cannot know."""

    @property
    def used_tokens(self) -> int:
        """Tokens that were not computed."""
        return min(self.engine_tokens + sum(self.hits.values()), self.tokens)

    def misses(self, explanation: Explanation | None) -> list[Miss]:
        """Return why tokens were computed. ``explanation``: ``None`` if it was lost."""
        if self.reason is not None or explanation is None:
            missed = self.tokens - self.used_tokens
            return [Miss(self.reason or MissReason.NOT_LOOKED_UP, missed)] if missed else []
        return misses_behind(explanation.misses, explanation.begins, self.used_tokens, self.tokens)


class AnswerEnded(msgspec.Struct, frozen=True, array_like=True):
    """The end of an answer."""

    prompt: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=2 * KEY_BYTES)]
    """Keys of the last two chunks of its prompt as it was looked up, or of its only one."""
    signature: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_SIGNATURE)]
    """How it has ended: see :func:`~kvtier.catalog.endings.signature`. Tokens do not leave the engine."""
    seconds: Annotated[float, Meta(ge=0, lt=1 << 48)]
    """How long ago."""
    answer: Annotated[bytes, Meta(max_length=2 * KEY_BYTES)] = b""
    """Keys of the last two chunks behind those that its request has stored, or would have stored."""


class Outcomes(Message, frozen=True, array_like=True, tag=39):
    """What became of requests."""

    requests: list[Outcome]
    ended: list[AnswerEnded] = msgspec.field(default_factory=list)


class Found(Reply, frozen=True, array_like=True, tag=11):
    """Further leading chunks: a lease, an arena offset and a source tier each, in prefix order.

    ``fetching``: number of chunks still in flight or being located; with 0 this is the final answer.
    Each other one reports progress: chunks have arrived, or were located.
    """

    leases: list[int]
    offsets: list[int]
    sources: list[int]
    fetching: int
    staging: int = 0
    """Number of the staging buffer that holds the chunks whose source is one past the last tier.

    Their offsets are relative to each rank's buffer, and they have no header.
    """
    held: int = 0
    """For a layout with states: how many leading chunks are held, also beyond the last state."""
    last_tokens: int = 0
    """If the last chunk is not one of the prompt, but begins like it: how many tokens its blocks hold."""
    block_hashes: bytes = b""
    """The block hashes of that chunk, to compare with those of the prompt. Empty before the final answer."""
    parent: bytes = b""
    """The key before that chunk, to compare with the prompt's. Empty before the final answer."""
    likely_blocks: int = 0
    """How many of them are expected to be equal, and never more are, before the final answer."""
    pending_sources: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """The sources of the chunks in flight, in prefix order: each tier, and the number of its chunks.

    Their number is at most ``fetching``; the others are being located. Each of them may still fail.
    """
    needed: int = 0
    """For a layout with states: how many leases there must be in the end. With fewer, all are useless.

    The last one is that of the state at the end of the other chunks.
    """


class Cancel(Message, frozen=True, array_like=True, tag=12):
    """End a lookup, and release every lease granted for it."""

    ticket: int


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive chunks of one prompt. ``parent`` is the key before the first.

    All chunks are full except the last, which has ``last_tokens`` tokens; 0 if it is a state.
    """

    parent: bytes
    keys: bytes
    last_tokens: int
    kv_transfer: int = 0
    """Ticket of a :class:`KVTransfer`: reserve in the staging buffer what is pushed from there."""
    hints: ChunkHints | None = None
    block_hashes: bytes = b""
    """Those of all whole blocks, one after the other."""
    extends: bytes = b""
    """For a state: the last chunk of the hit that it extends. It supersedes states before that."""
    awaited: bool = False
    """Whether a decode instance waits for the chunks, which are stored whatever they are worth."""
    recomputes: Recomputation | None = None
    """Chunks that memory holds get room as well, and are compared with what is written there."""
    canary: bool = False
    """Whether the chunks are those of a canary: stored whatever they are worth, and removed soon."""
    offered_again: bool = False
    """Whether they are offered again: see :attr:`Reserved.offer_again`. The first tier may decline them."""


class Reserve(Request, frozen=True, array_like=True, tag=14):
    """Reserve room for the chunks of many requests, :data:`MAX_RESERVED_CHUNKS` at most."""

    runs: list[Run]


class Reserved(Reply, frozen=True, array_like=True, tag=15):
    """A lease and an offset for each key of each run, in order.

    Lease 0 if there is no room, or if the chunk is already held or reserved.
    """

    leases: list[int]
    offsets: list[int]
    staging: int = 0
    """Number of the buffer that the offsets of runs with ``kv_transfer`` refer to, on each rank."""
    offer_again: bool = False
    """Whether to offer the chunks of a prompt again when its answer has ended: some may have left before."""
    lacks_room: bool = False
    """Whether chunks were evicted or declined: from then on, prompts are stored to their last whole block."""

    @property
    def granted(self) -> list[int]:
        """The leases of the chunks that have room."""
        return [lease for lease in self.leases if lease]


class Commit(Message, frozen=True, array_like=True, tag=16):
    """This rank has filled its slices of these reservations."""

    leases: list[int]


class Abandon(Message, frozen=True, array_like=True, tag=17):
    """These reservations will not be filled."""

    leases: list[int]


class Leave(Message, frozen=True, array_like=True, tag=37):
    """This rank disconnects, and will not write to any reservation granted so far."""


class Confirm(Request, frozen=True, array_like=True, tag=18):
    """Check whether these leases have been held without interruption."""

    leases: list[int]


class Confirmed(Reply, frozen=True, array_like=True, tag=19):
    """Answer to :class:`Confirm`: whether all of its leases are still held."""

    held: bool


class Clear(Request, frozen=True, array_like=True, tag=20):
    """Remove every chunk of this engine's namespace from every local tier."""


class Cleared(Reply, frozen=True, array_like=True, tag=21):
    """Answer to :class:`Clear` and :class:`ClearWeights`: what was removed, as in ``pipeline/clear.py``."""

    chunks: int
    bytes: int = 0


class UseWeights(Message, frozen=True, array_like=True, tag=32):
    """From here on, this engine's lookups and reservations are those of other weights.

    The engine has cancelled its lookups. Its leases and reservations remain those of the earlier weights.
    """

    weights: Weights


class ClearWeights(Request, frozen=True, array_like=True, tag=33):
    """Remove the chunks of some weights, of all models, from ``tiers`` or all tiers. Sent by observers."""

    weights_id: str
    tiers: list[str] | None = None


class KVTransfer(Message, frozen=True, array_like=True, tag=25):
    """Push these consecutive chunks of one prompt to the peer at ``to``, each as soon as it is READY here.

    Chunks that are already held are pushed as well. All chunks are full except the last. ``keys`` cover
    ``tokens`` tokens in total; ``root`` is the key before the first. The transfer ends with
    :class:`EndKVTransfer` or with this connection.
    """

    ticket: int
    to: str
    root: bytes
    keys: bytes
    tokens: int
    trace: bytes = b""
    """As in :class:`Lookup`."""


class KVTransferResult(Message, frozen=True, array_like=True, tag=26):
    """Number of leading tokens that the peer holds or has made room for, and why it is not all of them."""

    ticket: int
    tokens: int
    reason: str


class EndKVTransfer(Message, frozen=True, array_like=True, tag=27):
    """End of a transfer: no further chunk of this prompt will be reserved.

    With ``complete``, reserved chunks are still pushed once they are READY. All other chunks are not pushed,
    and the peer releases the room for them.
    """

    ticket: int
    complete: bool


class RequestStaging(Message, frozen=True, array_like=True, tag=28):
    """Request of a worker for a staging buffer on the device of its KV cache."""

    gpu: str
    """As in ``CUDA_VISIBLE_DEVICES``; empty if the engine's KV cache is in host memory."""


class OfferStaging(Message, frozen=True, array_like=True, tag=29):
    """The staging buffer of this worker, which replaces any earlier one, or the reason for its absence."""

    number: int
    """0 if no buffer is available."""
    handle: bytes
    """CUDA IPC handle for GPU memory, or a file path for host memory."""
    length: int
    reason: str


class OpenedStaging(Message, frozen=True, array_like=True, tag=30):
    """Confirmation that this worker has opened the last offered buffer."""

    number: int


class Spans(Message, frozen=True, array_like=True, tag=40):
    """Spans of traced requests, and how many were dropped since the last such message."""

    spans: list[Span]
    dropped: int = 0


class Status(Request, frozen=True, array_like=True, tag=22):
    """Request for a :class:`StatusReport`."""


class StatusReport(Reply, frozen=True, array_like=True, tag=23):
    """Answer to :class:`Status`: JSON, for diagnostics and tests."""

    report: bytes


class WhatIf(Request, frozen=True, array_like=True, tag=35):
    """Request for a :class:`WhatIfAnswer`."""


class WhatIfAnswer(Reply, frozen=True, array_like=True, tag=36):
    """Answer to :class:`WhatIf`: what other settings would bring, as far as it is known."""

    enabled: bool
    """The setting ``whatif.enabled``."""
    report: Report | None
    """``None`` if it is not enabled, or nothing has been observed yet."""


class Why(Request, frozen=True, array_like=True, tag=55):
    """Request for a :class:`WhyAnswer`. Sent by observers."""

    request: str
    """Part of the id of requests; empty for all."""
    last: int
    """How many of them at most."""


class WhyAnswer(Reply, frozen=True, array_like=True, tag=56):
    """Answer to :class:`Why`."""

    report: WhyReport


class WhyPrompt(Request, frozen=True, array_like=True, tag=57):
    """Request for a :class:`WhyPromptAnswer`. Sent by observers."""

    tokens: list[int]
    model: str = ""
    """A name of the model; empty for all that engines of this host have served."""
    salt: str = ""
    """The ``cache_salt`` of the request."""


class WhyPromptAnswer(Reply, frozen=True, array_like=True, tag=58):
    """Answer to :class:`WhyPrompt`: what is held of the prompt now, for each model."""

    prompts: list[PromptReport]


class ListModels(Request, frozen=True, array_like=True, tag=59):
    """Request for a :class:`ModelList`. Sent by observers."""


class ModelList(Reply, frozen=True, array_like=True, tag=60):
    """Answer to :class:`ListModels`: the models that engines of this host serve."""

    models: list[EngineModel]


class Watch(Message, frozen=True, array_like=True, tag=34):
    """Report which tiers hold these chunks, now and after each change, and stop reporting those to forget.

    A connection watches :data:`MAX_WATCHED_CHUNKS` at most.
    """

    keys: bytes
    forget: bytes = b""


class Held(Message, frozen=True, array_like=True, tag=24):
    """The tiers in which watched chunks are READY, as a bit mask each, where that has changed.

    A chunk that is in no tier is not reported at first.
    """

    keys: bytes
    tiers: list[int]


class Notice(Message, frozen=True, array_like=True, tag=31):
    """A warning of the cache process, for the engine's log. Sent to schedulers, a few per second at most."""

    text: str


FromScheduler = Lookup | Cancel | Outcomes | Reserve | Clear | UseWeights | KVTransfer | EndKVTransfer | Watch
FromWorker = Confirm | Commit | Leave | RequestStaging | OpenedStaging
FromObserver = Status | WhatIf | Why | WhyPrompt | ListModels | ClearWeights
FromEngine = Hello | FromScheduler | FromWorker | FromObserver | Abandon | Spans | Ping
ToScheduler = Found | Explained | Reserved | Cleared | Held | KVTransferResult | Notice
ToObserver = StatusReport | WhatIfAnswer | WhyAnswer | WhyPromptAnswer | ModelList
FromCache = Welcome | ToScheduler | ToObserver | Confirmed | OfferStaging | Refused | Pong

decode_from_engine: Callable[[bytes], FromEngine] = decoder(FromEngine, "a message from an engine")
decode_from_cache: Callable[[bytes], FromCache] = decoder(FromCache, "a message from a cache process")
