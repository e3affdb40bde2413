"""Scheduler's and workers' ends of the bridge: synchronous, without threads.

Called from vLLM's hooks. Nothing blocks except what takes a ``wait``, :meth:`WorkerBridge.await_staging`,
:func:`status`, :func:`what_if` and :func:`clear_weights`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import msgspec

from kvtier.bridge import protocol
from kvtier.bridge.notices import MAX_CHARACTERS
from kvtier.bridge.protocol import Hello, Welcome
from kvtier.catalog.endings import signature
from kvtier.concurrency.threads import run_in_background
from kvtier.errors import ArenaError, ChannelClosed, ChannelError, ProtocolError
from kvtier.fleet.member.served_models import EngineModel
from kvtier.memory.arena import ArenaMap
from kvtier.memory.keys import KEY_BYTES, ChunkKey, join_keys, split_keys
from kvtier.memory.layout import ChunkLayout
from kvtier.observability.requests import PromptReport, WhyReport
from kvtier.pipeline.query import Query
from kvtier.rpc.calls import Call, ReplyT
from kvtier.rpc.client import GREETING_SECONDS, Client, UnixConnection
from kvtier.rpc.frames import Ping, Pong, Reply, Request

NOTHING_FOUND = protocol.Found(0, [], [], [], 0)


@dataclass
class LookupState:
    """Everything that a lookup has been granted so far, in prefix order."""

    call: Call[protocol.Found]
    """Settled by the first answer; further ones may follow."""
    leases: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    found: protocol.Found = NOTHING_FOUND
    """The last answer. Its fields for the whole lookup are valid until the next one."""
    pending_sources: list[int] = field(default_factory=list)
    """The sources of the chunks in flight. Each of them may still fail."""
    updated_at: float = 0.0
    """Time of the last answer (:func:`time.monotonic`); each batch that arrives causes one."""
    known: int = 0
    """The most chunks that were leased or in flight: of those that are located, some may fail to arrive."""

    @property
    def answered(self) -> bool:
        """Whether there was an answer."""
        return self.call.result is not None

    @property
    def final(self) -> bool:
        """Whether the lookup is complete."""
        return self.answered and not self.found.fetching

    @property
    def located(self) -> bool:
        """Whether it is known which chunks are held. Chunks in flight may still fail."""
        return self.answered and len(self.pending_sources) == self.found.fetching

    @property
    def total(self) -> int:
        """The number of leases, including those of chunks in flight."""
        return len(self.leases) + len(self.pending_sources)


SERVER = "the cache process"
StartServer = Callable[[], None] | None


def open_connection(path: Path, hello: Hello) -> UnixConnection[Welcome]:
    """Connect without waiting for the welcome. Raises :class:`ChannelError`."""
    return UnixConnection(path, hello, Welcome, protocol.VERSION, protocol.decode_from_cache, SERVER)


class Bridge(Client[Welcome]):
    """A connection to the cache process that is replaced when it is lost."""

    def __init__(
        self, hello: Hello, path: Path, start: StartServer = None, logger: Logger | None = None
    ) -> None:
        """``start`` starts a cache process on ``path`` without blocking, for when the connection is lost."""
        super().__init__(path, SERVER, start, logger)
        self._hello = hello
        self.welcome: Welcome | None = None
        """The last greeting."""
        self.epoch = 0
        """Identifies the connected cache process; 0 if none is connected."""

    @property
    def last_epoch(self) -> int:
        """Identifies the cache process that is, or was last, connected."""
        return 0 if self.welcome is None else self.welcome.epoch

    def _make_hello(self) -> Hello:
        return msgspec.structs.replace(self._hello, epoch=self.last_epoch)

    def _open(self) -> UnixConnection[Welcome]:
        return open_connection(self._path, self._make_hello())

    def _connected(self, connection: UnixConnection[Welcome]) -> None:
        assert connection.welcome is not None
        self.welcome = connection.welcome
        self.epoch = connection.welcome.epoch

    def _lost(self) -> None:
        self.epoch = 0


PROBE_SECONDS = 0.25
WHY_SECONDS = 30.0
"""Timeout of :func:`why` and :func:`why_prompt`, which may load a tokenizer or ask pools."""
CLEAR_SECONDS = 600.0
"""Timeout of :func:`clear_weights`: a full disk tier has millions of files to delete."""


class SchedulerBridge(Bridge):
    """Scheduler's end: look up, reserve, release."""

    def __init__(
        self, hello: Hello, path: Path, start: StartServer = None, logger: Logger | None = None
    ) -> None:
        super().__init__(hello, path, start, logger)
        self._lookups: dict[int, LookupState] = {}
        self._reserving: Call[protocol.Reserved] | None = None
        """The last reservation request."""
        self._held: dict[ChunkKey, int] = {}
        self._explanations: list[protocol.Explanation] = []
        self._outcomes: list[protocol.Outcome] = []
        """What :meth:`send_outcomes` sends."""
        self._outcomes_sent_at = 0.0
        self._ended: list[tuple[float, protocol.AnswerEnded]] = []
        """When answers have ended (:func:`time.monotonic`), and which: that is sent as well."""
        self._kv_transfers: dict[int, protocol.KVTransferResult | None] = {}
        """The last result of each running KV transfer."""
        self._seen = 0
        """The last reservation that was granted by :attr:`welcome`'s process."""
        self._abandoned: list[int] = []
        """Reservations of that process that it may not know to be abandoned."""
        self._abandoned_sent = 0
        """How many of them it had been sent before the pending reservation request."""
        self.connections = 0
        """Number of connections so far."""
        self.lacks_room = False
        """See :attr:`Reserved.lacks_room`: that of the last answer."""
        self._greeted = hello
        """What the last greeting was made of."""

    def _make_hello(self) -> protocol.Hello:
        self._greeted = self._hello
        return msgspec.structs.replace(super()._make_hello(), seen=self._seen)

    def _connected(self, connection: UnixConnection[protocol.Welcome]) -> None:
        before = self.welcome
        super()._connected(connection)
        if before is None or before.epoch != self.epoch:
            self._seen = 0
            self._abandoned.clear()
        self.connections += 1
        if self._abandoned:  # The message may have been lost with the connection.
            connection.send(protocol.Abandon(self._abandoned))
        weights = self._hello.weights
        if weights is not None and weights != self._greeted.weights:  # They have changed since the greeting.
            connection.send(protocol.UseWeights(weights))

    def _lost(self) -> None:
        super()._lost()
        self._lookups.clear()
        self._kv_transfers.clear()
        self._held.clear()
        self._outcomes.clear()
        self._ended.clear()
        self._abandoned_sent = 0

    def _receive(self, message: protocol.FromCache) -> None:
        match message:
            case protocol.Found():
                self._take_found(message)
            case protocol.Explained():
                self._explanations += message.lookups
            case protocol.Reserved():
                self._seen = max(self._seen, *message.leases, 0)
                self.lacks_room = message.lacks_room
                del self._abandoned[: self._abandoned_sent]
                self._abandoned_sent = 0
            case Reply():
                pass
            case protocol.Held():
                self._take_held(message)
            case protocol.KVTransferResult():
                if message.ticket in self._kv_transfers:
                    self._kv_transfers[message.ticket] = message
            case protocol.Notice():
                self._logger.warning("cache process: %s", message.text[:MAX_CHARACTERS])
            case _:
                self._logger.debug("unexpected message: %s", type(message).__name__)

    @property
    def staging_source(self) -> int:
        """Value in :attr:`LookupState.sources` for chunks in a staging buffer; -1 if staging is disabled."""
        tiers = () if self.welcome is None else self.welcome.tiers
        return len(tiers) - 1 if tiers and tiers[-1] == protocol.STAGING else -1

    def _take_found(self, found: protocol.Found) -> None:
        lookup = self._lookups.get(found.ticket)
        if lookup is None:
            return  # Cancelled: the cache process releases everything that it has granted.
        lookup.leases += found.leases
        lookup.offsets += found.offsets
        lookup.sources += found.sources
        lookup.found = found
        lookup.pending_sources = [source for source, count in found.pending_sources for _ in range(count)]
        lookup.updated_at = time.monotonic()
        lookup.known = max(lookup.known, lookup.total)

    def _take_held(self, held: protocol.Held) -> None:
        keys = split_keys(held.keys)
        if len(keys) != len(held.tiers):
            raise ProtocolError(f"the tiers of {len(held.tiers)} chunks for {len(keys)} keys")
        self._held.update(zip(keys, held.tiers, strict=True))

    def look_up(
        self,
        query: Query,
        described: protocol.RequestInfo | None = None,
        trace: bytes = b"",
        renews: int = 0,
    ) -> int | None:
        """Send a lookup; return its ticket, or ``None`` without a responsive cache process.

        The final answer may take up to ``query.expect_seconds`` longer. ``described``: the request;
        then :meth:`take_explanations` returns why chunks are missing. ``trace``: what it belongs to, if any.
        ``renews``: the ticket of the first lookup of a request that looks once more; both stay open.
        """
        if not (query.keys or query.block_tags) or not self.accepts_requests:
            return None
        if self._ended:  # It may be the prompt that follows one of these answers.
            self.send_outcomes()
        root, block_tags = (b"", b"") if query.block_tags is None else query.block_tags[:2]
        chunks = join_keys(query.keys), query.tokens, query.expect_chunks, query.expect_seconds
        prompt = *chunks, query.hints, root, block_tags, query.compute_seconds, query.repeated, described
        call = self.call(
            "lookups",
            lambda ticket: protocol.Lookup(ticket, *prompt, canary=query.canary, trace=trace, renews=renews),
            protocol.Found,
            lambda found: found,
        )
        if call is None:
            return None
        self._lookups[call.ticket] = LookupState(call)
        return call.ticket

    def found(self, ticket: int, wait: float = 0.0) -> LookupState | None:
        """Return the state of a lookup; ``None`` if it was cancelled or its connection was lost.

        Blocks up to ``wait`` seconds for the first answer.
        """
        lookup = self._lookups.get(ticket)
        if lookup is not None and not lookup.final:
            if wait > 0 and not lookup.answered:
                self.await_reply(lookup.call, wait)
            else:
                self.poll_if_due()
        return self._lookups.get(ticket)

    def cancel(self, ticket: int) -> None:
        """Cancel a lookup and release its leases."""
        lookup = self._lookups.pop(ticket, None)
        if lookup is not None and (lookup.leases or not lookup.final):
            self.send(protocol.Cancel(ticket))

    @property
    def reserves(self) -> bool:
        """Whether :meth:`reserve` can be called now: the cache process answers, and no request is pending."""
        pending = self._reserving is not None and not self._reserving.settled
        return self.accepts_requests and not self.late and not pending

    def reserve(self, runs: Sequence[protocol.Run]) -> Call[protocol.Reserved] | None:
        """Request room for the chunks of ``runs`` in one message; ``None`` if :attr:`reserves` is false.

        The caller owns the reservations even if the answer is late, and must :meth:`abandon` unused ones. The
        request fails with its connection, or with :class:`ProtocolError` after an answer for others.
        """
        if not self.reserves:
            return None
        if self._ended:  # Chunks that are offered again are judged by it.
            self.send_outcomes()
        # Messages keep their order: once this request is answered, those before it have been handled.
        self._abandoned_sent = len(self._abandoned)
        self._reserving = self.call(
            "reservations",
            lambda ticket: protocol.Reserve(ticket, list(runs)),
            protocol.Reserved,
            lambda reserved: _of_each_chunk(runs, reserved),
        )
        return self._reserving

    def probe(self) -> None:
        """Ping the cache process if it fetches chunks and has sent nothing for :data:`PROBE_SECONDS`."""
        quiet = not self.calls and self._health.idle_seconds >= PROBE_SECONDS
        fetching = quiet and any(lookup.found.fetching for lookup in self._lookups.values())
        if fetching and self.accepts_requests:
            self.call("pings", Ping, Pong, lambda pong: pong)

    def abandon(self, leases: Sequence[int]) -> None:
        """Abandon reservations of the process that is, or was last, connected."""
        if leases:
            self._abandoned += leases
            self.send(protocol.Abandon(list(leases)))

    def transfer_kv(
        self, to: str, root: ChunkKey, keys: Sequence[ChunkKey], tokens: int, trace: bytes = b""
    ) -> int | None:
        """Push a prompt's chunks to a peer as they are stored; return a ticket, or ``None`` on failure.

        Does not block. End it with :meth:`end_kv_transfer`.
        """
        if not keys or not self.accepts_requests:
            return None
        ticket = self.calls.next_ticket()
        self._kv_transfers[ticket] = None
        transfer = protocol.KVTransfer(ticket, to, root, join_keys(keys), tokens, trace)
        return ticket if self.send(transfer) else None

    def transferred(self, ticket: int) -> protocol.KVTransferResult | None:
        """Return the last result of a KV transfer; ``None`` if there is no result yet.

        Raises ``KeyError`` if the transfer has ended or its connection was lost.
        """
        self.poll()
        return self._kv_transfers[ticket]

    def end_kv_transfer(self, ticket: int, *, complete: bool) -> None:
        """End a transfer: no further chunk will be reserved. Unless ``complete``, also stop pushing."""
        if ticket in self._kv_transfers:
            del self._kv_transfers[ticket]
            self.send(protocol.EndKVTransfer(ticket, complete))

    def clear(self, wait: float) -> int | None:
        """Remove every chunk of this engine's model; return their number, or ``None`` without an answer.

        Blocks up to ``wait`` seconds, or not at all if the cache process is unresponsive.
        """
        self.update()
        if not self.accepts_requests:
            return None
        call = self.call("clears", protocol.Clear, protocol.Cleared, lambda cleared: cleared.chunks)
        if call is None:
            return None
        self.wait(lambda: call.settled, wait)
        return call.result

    def watch(self, keys: Sequence[ChunkKey], forget: Sequence[ChunkKey] = ()) -> bool:
        """Watch chunks, and stop watching others; return whether the message was sent.

        :meth:`take_held` returns the reports. A lost connection watches nothing.
        """
        return self.send(protocol.Watch(join_keys(keys), join_keys(forget)))

    def take_held(self) -> dict[ChunkKey, int]:
        """Return the watched chunks that have changed since the last call, and their tiers as a bit mask."""
        held, self._held = self._held, {}
        return held

    def end(self, outcome: protocol.Outcome) -> None:
        """Report what became of a request, with the next :meth:`send_outcomes`."""
        self._outcomes.append(outcome)

    def answer_ended(
        self, prompt: Sequence[ChunkKey], answer: Sequence[ChunkKey], how: str, tokens: Sequence[int]
    ) -> None:
        """Report the end of an answer, with the next :meth:`send_outcomes` and before chunks are offered.

        ``prompt``, ``answer``: see :class:`AnswerEnded`. ``how``, ``tokens``: see :func:`signature`.
        """
        if self.welcome is not None and self.epoch and prompt:
            signed = signature(self.welcome.signature_key, how, tokens)
            ended = protocol.AnswerEnded(join_keys(prompt), signed, 0.0, join_keys(answer))
            self._ended.append((time.monotonic(), ended))

    def send_outcomes(self, after: float = 0.0) -> None:
        """Report what became of requests. After what the engine waits for: it delays later messages.

        Unless that was done less than ``after`` seconds ago.
        """
        now = time.monotonic()
        if (self._outcomes or self._ended) and now >= self._outcomes_sent_at + after:
            self._outcomes_sent_at = now
            ended = [msgspec.structs.replace(end, seconds=now - at) for at, end in self._ended]
            outcomes, self._outcomes, self._ended = self._outcomes, [], []
            self.send(protocol.Outcomes(outcomes, ended))

    def take_explanations(self) -> list[protocol.Explanation]:
        """Return the explanations that have arrived since the last call."""
        explanations, self._explanations = self._explanations, []
        return explanations

    def use_weights(self, weights: protocol.Weights) -> None:
        """Look up and reserve in the namespace of other weights, also after a reconnect. Does not block.

        The caller has cancelled its lookups.
        """
        self._hello = msgspec.structs.replace(self._hello, weights=weights)
        self.send(protocol.UseWeights(weights))


def _of_each_chunk(runs: Sequence[protocol.Run], reserved: protocol.Reserved) -> protocol.Reserved:
    chunks = sum(len(run.keys) for run in runs) // KEY_BYTES
    if not chunks == len(reserved.leases) == len(reserved.offsets):
        raise ProtocolError(f"{len(reserved.leases)} reservations in answer to {chunks} chunks")
    return reserved


class WorkerBridge(Bridge):
    """Worker's end: the arena, a staging buffer, confirm and commit."""

    def __init__(
        self, hello: Hello, path: Path, start: StartServer = None, logger: Logger | None = None
    ) -> None:
        super().__init__(hello, path, start, logger)
        self._client = secrets.randbits(63)
        self._filling: set[int] = set()
        """The reservations of :attr:`welcome`'s process that this rank may be writing to."""
        self.arena: ArenaMap | None = None
        """Arena of the connected, or last connected, cache process."""
        self.staging: protocol.OfferStaging | None = None
        """The last offer of a staging buffer by the connected cache process."""
        self._gpu: str | None = None

    def request_staging(self, gpu: str) -> None:
        """Request a staging buffer on a GPU, as in ``CUDA_VISIBLE_DEVICES``; empty for host memory.

        The request is repeated after every reconnect. The answer is stored in :attr:`staging`.
        """
        self._gpu = gpu
        self.send(protocol.RequestStaging(gpu))

    def await_staging(self, seconds: float) -> protocol.OfferStaging | None:
        """Block up to ``seconds`` until the offer arrives; ``None`` on timeout. Not for hooks."""
        self.wait(lambda: self.staging is not None, seconds)
        return self.staging

    def _make_hello(self) -> protocol.Hello:
        hello, filling = super()._make_hello(), sorted(self._filling)
        return msgspec.structs.replace(hello, holding=filling, client=self._client)

    def _connected(self, connection: UnixConnection[protocol.Welcome]) -> None:
        before = self.welcome
        super()._connected(connection)
        if before is None or before.epoch != self.epoch:
            self._filling.clear()
        if self._gpu is not None:
            connection.send(protocol.RequestStaging(self._gpu))
        # Map the new arena first: unmapping the old one holds the lock that mapping waits for.
        old, self.arena = self.arena, _map_arena(connection)
        if old is not None:
            _close_in_background(old)

    def _lost(self) -> None:
        super()._lost()
        self.staging = None

    def _receive(self, message: protocol.FromCache) -> None:
        match message:
            case Reply():
                pass
            case protocol.OfferStaging():
                self.staging = message
            case _:
                self._logger.debug("unexpected message: %s", type(message).__name__)

    def fill(self, leases: Sequence[int]) -> list[bool]:
        """Return which reservations of the connected process may be filled, until they are committed.

        Not those that it granted before this connection: others may have their memory now.
        """
        first = 0 if self.welcome is None else self.welcome.first_lease
        allowed = [lease >= first for lease in leases]
        self._filling.update(lease for lease, may in zip(leases, allowed, strict=True) if may)
        return allowed

    def commit(self, leases: Sequence[int]) -> bool:
        """Report that these reservations have been filled; return whether the message was sent."""
        self._filling.difference_update(leases)
        return not leases or self.send(protocol.Commit(list(leases)))

    def abandon(self, leases: Sequence[int], epoch: int = 0) -> None:
        """Abandon reservations that this rank does not write to, or no more.

        ``epoch``: the process that granted them; 0 for the connected one. One that is connected later learns
        it from the greeting.
        """
        if self.welcome is not None and epoch in (0, self.welcome.epoch):
            self._filling.difference_update(leases)
        if leases and epoch in (0, self.epoch):
            self.send(protocol.Abandon(list(leases)))

    def confirm(self, leases: Sequence[int]) -> Call[bool] | None:
        """Check whether these leases are still held. ``None`` if no cache process is connected."""
        return self.call(
            "confirmations",
            lambda ticket: protocol.Confirm(ticket, list(leases)),
            protocol.Confirmed,
            lambda confirmed: confirmed.held,
        )

    def close(self) -> None:
        """Disconnect, and unmap the arena."""
        if not self._filling:
            self.send(protocol.Leave())
        super().close()
        if self.arena is not None:
            self.arena.close()


def _map_arena(connection: UnixConnection[protocol.Welcome]) -> ArenaMap:
    """Map the arena that came with the welcome. Raises :class:`ChannelError`."""
    assert connection.welcome is not None
    try:
        return ArenaMap(connection.take_fd(), connection.welcome.arena_bytes)
    except ArenaError as error:
        raise ChannelError(str(error)) from error


def _close_in_background(arena: ArenaMap) -> None:
    """Unmap an arena in a thread: the last mapping frees its memory, which may take 1 s per GiB."""
    try:
        run_in_background(arena.close)
    except RuntimeError:  # Cannot create a thread.
        arena.close()


def status(path: Path, seconds: float = GREETING_SECONDS) -> dict[str, Any]:
    """Return the status of a cache process. Blocks up to ``seconds``. Raises :class:`ChannelError`."""
    report: dict[str, Any] = json.loads(_ask(path, protocol.Status(1), protocol.StatusReport, seconds).report)
    return report


def what_if(path: Path, seconds: float = GREETING_SECONDS) -> protocol.WhatIfAnswer:
    """Return what other settings would bring. Blocks up to ``seconds``. Raises :class:`ChannelError`."""
    return _ask(path, protocol.WhatIf(1), protocol.WhatIfAnswer, seconds)


def why(path: Path, request: str = "", last: int = 20, seconds: float = WHY_SECONDS) -> WhyReport:
    """Return what became of the ``last`` requests whose id contains ``request``, and where prompts part.

    Blocks up to ``seconds``. Raises :class:`ChannelError`.
    """
    return _ask(path, protocol.Why(1, request, last), protocol.WhyAnswer, seconds).report


def why_prompt(
    path: Path, tokens: Sequence[int], model: str = "", salt: str = "", seconds: float = WHY_SECONDS
) -> list[PromptReport]:
    """Return what is held of a prompt, by model. Blocks up to ``seconds``. Raises :class:`ChannelError`."""
    question = protocol.WhyPrompt(1, list(tokens), model, salt)
    return _ask(path, question, protocol.WhyPromptAnswer, seconds).prompts


def models(path: Path, seconds: float = GREETING_SECONDS) -> list[EngineModel]:
    """Return the models of the connected engines. Blocks up to ``seconds``. Raises :class:`ChannelError`."""
    return _ask(path, protocol.ListModels(1), protocol.ModelList, seconds).models


def clear_weights(
    path: Path, weights_id: str, tiers: Sequence[str] | None = None, seconds: float = CLEAR_SECONDS
) -> protocol.Cleared:
    """Remove the chunks of some weights from ``tiers`` or all tiers; return what was removed.

    Blocks up to ``seconds``. Raises :class:`ChannelError`, also for an unknown tier.
    """
    names = None if tiers is None else list(tiers)
    return _ask(path, protocol.ClearWeights(1, weights_id, names), protocol.Cleared, seconds)


def _ask(path: Path, request: Request, answer: type[ReplyT], seconds: float) -> ReplyT:
    """Return the answer to a request of an observer. Blocks up to ``seconds``. Raises: ChannelError."""
    hello = protocol.Hello(protocol.VERSION, "observer", "observer", 0, ChunkLayout(1, ()), b"")
    with closing(open_connection(path, hello)) as connection:
        deadline = time.monotonic() + seconds
        connection.send(request)
        messages = connection.await_welcome(seconds)
        while True:
            for message in messages:
                if isinstance(message, answer):
                    return message
            if (left := deadline - time.monotonic()) <= 0:
                raise ChannelClosed(f"the cache process on {path} does not answer")
            messages = connection.receive(left)
