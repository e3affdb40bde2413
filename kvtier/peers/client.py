"""One peer, be it of the settings or borrowed: found, connected, lost, and found again."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from kvtier.errors import ChannelClosed, ChannelError, PeerError, ProtocolError
from kvtier.keys import ChunkKey
from kvtier.peers.authentication import Credentials
from kvtier.peers.dialling import Called, Caller, printable
from kvtier.peers.pace import Pace
from kvtier.peers.pauses import Breaker, GrowingPause, Outage
from kvtier.peers.source import Patience, Source
from kvtier.settings_peer import split_address
from kvtier.threads import WorkerThreads
from kvtier.transports.base import Transport

logger = logging.getLogger("kvtier")

PROBE_SECONDS = 1.0
"""A paused peer is asked again when it has answered a ping in this time."""
STEADY_SECONDS = 5.0
"""A connection that lasted longer was a good one: the next one is opened soon."""
LOOK_UPS = "leaves look-ups unanswered"
READS = "fails to send what it promised"

AnswerT = TypeVar("AnswerT")


class PeerClient:
    """Keeps a connection to one peer, and knows whether to ask it.

    Nobody ever waits for a connection, but for the very first attempt and no longer than he wants to.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        transport: Transport,
        transport_name: str,
        instance: str,
        deadline: float,
        threads: WorkerThreads,
        *,
        borrowed: bool = False,
    ) -> None:
        """``borrowed``: it is not one of ``peer.others``, and whoever needs it says what is wrong with it."""
        host, port = split_address(address)
        self.address = address
        self.pace = Pace()
        self.used_at = 0.0
        """When somebody last had something of it, on the clock of :func:`time.monotonic`."""
        self._source: Source | None = None
        self._caller = Caller(host, port, credentials, instance, threads)
        self._transport = transport
        self._transport_name = transport_name
        self._instance = instance
        self._patience = Patience(deadline)
        self._breaker = Breaker()
        self._borrowed = borrowed
        self._outage = Outage(logger, address, quiet=borrowed)
        self._attempts = GrowingPause()
        self._tried = anyio.Event()
        self._answered = False
        """Whether the connection, the last one or this, was of any use."""
        self._unanswered_at = 0.0
        """When what it left unanswered was asked: until it is heard of again, nobody else waits for it."""
        self._last_error = ""
        self._seen_instance = ""

    @property
    def source(self) -> Source | None:
        """What can be asked and read now; ``None`` while the peer is lost, silent or paused."""
        source = self._source
        if source is None or source.over or source.silent or self._breaker.reason is not None:
            return None
        return source

    @property
    def instance(self) -> str:
        """Who it said that it is, when it was last connected."""
        return self._seen_instance

    @property
    def connecting(self) -> bool:
        """Whether the very first attempt is under way."""
        return not self._tried.is_set()

    @property
    def lost(self) -> bool:
        """Whether it is not connected, after an attempt at least."""
        return self._tried.is_set() and (self._source is None or self._source.over)

    async def ready(self, seconds: float) -> Source:
        """Wait for the first attempt to connect, so long at most. Raises :class:`PeerError`, in words."""
        with anyio.move_on_after(seconds):
            await self._tried.wait()
        source = self.source
        if source is not None:
            return source
        why = f"it has not answered within {seconds:g} s" if self.connecting else self.trouble
        raise PeerError(f"peer {self.address}: {why}")

    @property
    def trouble(self) -> str:
        """Why it cannot be asked, for people; empty where it can."""
        return "" if self.source is not None else self._last_error or self._state()

    # Asking. None: it did not answer, or not in time.

    async def look_up(
        self, keys: Sequence[ChunkKey], *, prefix: bool, until: float, insist: bool = False
    ) -> list[int] | None:
        """Be promised those of ``keys`` that it holds; their positions. ``until`` is in the loop's time.

        With ``insist`` also where it has left a question unanswered and is silent since: for who has time.
        """
        return await self._ask(lambda source: source.look_up(keys, prefix=prefix), until, insist=insist)

    async def contains(self, keys: Sequence[ChunkKey], *, until: float) -> list[bool] | None:
        """Which of ``keys`` it holds."""
        return await self._ask(lambda source: source.contains(keys), until)

    async def _ask(
        self, question: Callable[[Source], Awaitable[AnswerT]], until: float, *, insist: bool = False
    ) -> AnswerT | None:
        answer: AnswerT | None = None
        source = self.source
        with anyio.CancelScope(deadline=until) as scope:
            if source is None and not self._tried.is_set():
                await self._tried.wait()
                source = self.source
            if source is None or (not insist and source.conversation.heard_at < self._unanswered_at):
                return None
            asked_at = time.monotonic()
            try:
                answer = await question(source)
            except ChannelError as error:
                self._last_error = str(error)
        if answer is not None:
            self._breaker.worked(LOOK_UPS)
            if answer:
                self.used_at = time.monotonic()
        elif scope.cancelled_caught and source is not None:
            self._unanswered_at = asked_at
            self._note_failure(LOOK_UPS)
        return answer

    def note_reads(self, *, failed: bool) -> None:
        """What became of a batch that was read from it."""
        self.used_at = time.monotonic()
        if failed:
            self._note_failure(READS)
        else:
            self._breaker.worked(READS)

    def note_error(self, error: Exception) -> None:
        """Why something failed, for people."""
        self._last_error = printable(str(error))

    def _note_failure(self, kind: str) -> None:
        if self._breaker.failed(kind):
            self._outage.begins("paused", f"it {kind}")

    # Being connected.

    async def keep(self) -> None:
        """Stay connected, and connect again whenever that is lost, until cancelled."""
        while True:
            await self.stay()
            await anyio.sleep(self._attempts.next())

    async def stay(self) -> bool:
        """Connect, and stay connected until that is lost; whether that was a connection of any use."""
        self._answered = False
        try:
            await self._stay_connected()
        except (OSError, ChannelError) as error:
            self._note_loss(error)
        except Exception as error:  # A bug, or a transport's: it must not take the other peers along.
            logger.exception("peer %s: the connection ends", self.address)
            self._last_error = repr(error)
        self._tried.set()
        return self._answered

    async def _stay_connected(self) -> None:
        """Connect, and serve whoever asks until the connection ends. Raises ``OSError``, ``ChannelError``."""
        called = await self._caller.call()
        try:
            self._check(called)
        except PeerError:
            called.connected.close()
            raise
        source = Source(
            self._caller, called, self._transport, self.pace, self._patience, on_silence=self._note_silence
        )
        self._source = source
        began = time.monotonic()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, source)
                cause = await source.run()
                tasks.cancel_scope.cancel()
        finally:
            self._source = None
        if time.monotonic() - began > STEADY_SECONDS:
            self._attempts.reset()
        raise cause

    def _check(self, called: Called) -> None:
        welcome = called.welcome
        self._seen_instance = printable(welcome.instance)
        if welcome.instance == self._instance:
            remedy = "" if self._borrowed else ": leave it out of peer.others"
            raise PeerError(f"it is this very instance{remedy}")
        if welcome.transport != self._transport_name:
            raise PeerError(
                f"peer.transport is {printable(welcome.transport)!r} there and {self._transport_name!r} "
                "here: write the same on both sides"
            )
        if not 0 < welcome.lease < float("inf"):
            raise PeerError(f"it promises chunks for {welcome.lease} s: see peer.lease there")

    async def _watch(self, source: Source) -> None:
        """Say that it is well, once it has answered; ask it again when it is paused."""
        try:
            while not await source.probe(PROBE_SECONDS):
                pass
            self._answered = True
            self._tried.set()
            self._breaker.close()
            logger.debug("peer %s: connected to %s", self.address, self._seen_instance)
            self._outage.ends()
            await source.prepare()
            while True:
                await anyio.sleep(self._patience.ping / 5)
                if self._breaker.probe_is_due and not source.silent:
                    await self._probe(source)
        except ChannelError:
            return  # Its end is told by whoever runs it.

    async def _probe(self, source: Source) -> None:
        if await source.probe(PROBE_SECONDS):
            self._breaker.close()
            self._outage.ends()
        else:
            self._breaker.open(self._breaker.reason or LOOK_UPS)

    def _note_silence(self, silent: bool) -> None:
        if silent:
            self._last_error = "does not answer"
            self._outage.begins("lost", "it does not answer")
        elif self._breaker.reason is None:
            self._outage.ends()

    def _note_loss(self, error: Exception) -> None:
        reason = str(error) or "no answer in time"
        if isinstance(error, OSError):
            reason = f"it cannot be reached: {error.strerror or reason}"
        elif isinstance(error, ChannelClosed):
            reason = f"the connection was lost: {reason}"
        self._last_error = printable(reason)
        refused = isinstance(error, PeerError | ProtocolError)
        self._outage.begins("refused" if refused else "lost", self._last_error)

    # Telling.

    def status(self) -> dict[str, object]:
        """For people and tests."""
        source = self._source
        return {
            "address": self.address,
            "instance": self._seen_instance,
            "state": self._state(),
            "linked": source is not None and source.linked,
            "last_error": self._last_error,
            "promises": 0 if source is None else len(source.promises),
            "under_way_bytes": self.pace.under_way,
            "read_bytes": self.pace.bytes_read,
            "seconds_a_mib": None if (seconds := self.pace.seconds_a_byte) is None else seconds * (1 << 20),
            "round_trip_seconds": self.pace.round_trip,
        }

    def _state(self) -> str:
        source = self._source
        if source is None or source.over:
            return "not connected" if self._tried.is_set() else "connecting"
        if source.silent:
            return "does not answer"
        return "connected" if self._breaker.reason is None else f"paused: {self._breaker.reason}"
