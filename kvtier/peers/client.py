"""Client side of one peer, configured or temporary: connect, monitor, and reconnect."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from logging import Logger
from typing import TypeVar

import anyio

from kvtier.concurrency.breaker import Backoff, Breaker
from kvtier.concurrency.threads import WorkerThreads
from kvtier.errors import ChannelClosed, ChannelError, PeerError, ProtocolError, Rejected
from kvtier.logs import printable
from kvtier.memory.header import IDENTITY
from kvtier.memory.keys import ChunkKey
from kvtier.peers.dialing import ControlConnection, PeerDialer
from kvtier.peers.source import Source, timeouts_of
from kvtier.peers.throughput import PeerThroughput
from kvtier.rpc.authentication import Credentials
from kvtier.settings.peer import split_address
from kvtier.tiers.codec_choice import CodecChoice
from kvtier.tiers.encoded_seal import MIN_GAIN
from kvtier.transports.base import Transport
from kvtier.units import MIB

logger = logging.getLogger("kvtier")

PROBE_SECONDS = 1.0
"""Timeout of the ping that closes the circuit breaker."""
FAILURES_IN_A_ROW = 3
"""Consecutive failures of one kind of request that open the circuit breaker."""
STABLE_SECONDS = 5.0
"""A connection that lasted longer resets the reconnect back-off."""
LOOKUPS = "does not answer lookups"
READS = "fails to serve reads"

AnswerT = TypeVar("AnswerT")


class PeerClient:
    """Keeps one peer connected, and decides whether to query it.

    Requests never wait for a reconnect. They wait for the first connection attempt only, with a timeout.
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
        temporary: bool = False,
        measured: bool = False,
    ) -> None:
        """``temporary``: not one of ``peer.others``; outages are logged at debug level only.

        ``measured``: chunks are requested encoded only while that pays.
        """
        host, port = split_address(address)
        self.address = address
        self.instance = ""
        """The instance name that the peer reported last."""
        self.throughput = PeerThroughput()
        self.choice = CodecChoice(lambda: False, MIN_GAIN, reads=self.throughput) if measured else None
        """Decides whether to request chunks encoded; ``None`` without ``codec: auto``."""
        self.last_used = 0.0
        """When the peer last served a request, on the clock of :func:`time.monotonic`."""
        self._source: Source | None = None
        self._dialer = PeerDialer(host, port, credentials, instance, threads)
        self._transport = transport
        self._transport_name = transport_name
        self._own_instance = instance
        self._timeouts = timeouts_of(deadline)
        self._breaker = Breaker(FAILURES_IN_A_ROW, Backoff())
        self._temporary = temporary
        self._outage = Outage(logger, address, quiet=temporary)
        self._backoff = Backoff()
        self._tried = anyio.Event()
        self._answered = False
        """Whether the peer answered on the current or last connection."""
        self._unanswered_at = 0.0
        """When the last request that timed out was sent. Until the peer sends again, requests skip it."""
        self._last_error = ""

    @property
    def source(self) -> Source | None:
        """The connection; ``None`` while the peer is disconnected, unresponsive or paused."""
        source = self._source
        if source is None or source.over or source.unresponsive or self._breaker.reason is not None:
            return None
        return source

    @property
    def connecting(self) -> bool:
        """Whether the first connection attempt is still running."""
        return not self._tried.is_set()

    @property
    def lost(self) -> bool:
        """Whether it is disconnected, after at least one attempt."""
        return self._tried.is_set() and (self._source is None or self._source.over)

    async def wait_connected(self, seconds: float) -> Source:
        """Wait up to ``seconds`` for the first connection attempt. Raises :class:`PeerError`."""
        with anyio.move_on_after(seconds):
            await self._tried.wait()
        source = self.source
        if source is not None:
            return source
        reason = f"no answer within {seconds:g} s" if self.connecting else self.last_error
        raise PeerError(f"peer {self.address}: {reason}")

    @property
    def last_error(self) -> str:
        """Why the peer is unavailable, as text; empty if it is available."""
        return "" if self.source is not None else self._last_error or self._state()

    # Requests. They return None if the peer did not answer in time.

    async def look_up(
        self, keys: Sequence[ChunkKey], *, prefix: bool, until: float, force: bool = False
    ) -> list[int] | None:
        """Lease those of ``keys`` that the peer holds, and return their positions.

        ``until`` is in the event loop's time. ``force``: ask even if an earlier request timed out and the
        peer has sent nothing since, for callers that can wait.
        """
        return await self._ask(lambda source: source.look_up(keys, prefix=prefix), until, force=force)

    async def contains(self, keys: Sequence[ChunkKey], *, until: float) -> list[bool] | None:
        """Return whether the peer holds each key."""
        return await self._ask(lambda source: source.contains(keys), until)

    async def _ask(
        self, request: Callable[[Source], Awaitable[AnswerT]], until: float, *, force: bool = False
    ) -> AnswerT | None:
        answer: AnswerT | None = None
        source = self.source
        with anyio.CancelScope(deadline=until) as scope:
            if source is None and not self._tried.is_set():
                await self._tried.wait()
                source = self.source
            if source is None or (not force and source.endpoint.last_message_at < self._unanswered_at):
                return None
            sent_at = time.monotonic()
            try:
                answer = await request(source)
            except ChannelError as error:
                self.record_error(error)
        if answer is not None:
            self._breaker.record_success(LOOKUPS)
            if answer:
                self.last_used = time.monotonic()
        elif scope.cancelled_caught and source is not None:
            self._unanswered_at = sent_at
            self._record_failure(LOOKUPS)
        return answer

    def codec(self, source: Source) -> int:
        """Return the code of the codec in which to request chunks from it now."""
        pays = self.choice is None or self.choice.needs_trial or self.choice.encodes
        return source.welcome.codec if pays else IDENTITY

    def record_reads(self, *, failed: bool) -> None:
        """Record the outcome of a batch of reads."""
        self.last_used = time.monotonic()
        if failed:
            self._record_failure(READS)
        else:
            self._breaker.record_success(READS)

    def record_error(self, error: Exception) -> None:
        """Store an error as :attr:`last_error`."""
        self._last_error = printable(str(error))

    def _record_failure(self, kind: str) -> None:
        if self._breaker.record_failure(kind):
            self._outage.begin("paused", kind)

    # Connection.

    async def run(self) -> None:
        """Connect, and reconnect after each loss, until cancelled."""
        while True:
            await self.run_once()
            await anyio.sleep(self._backoff.next())

    async def run_once(self) -> bool:
        """Connect once and run until the connection is lost. Return whether the peer ever answered."""
        self._answered = False
        try:
            await self._run_connection()
        except (OSError, ChannelError) as error:
            self._report_loss(error)
        except Exception as error:  # A bug here or in a transport must not affect the other peers.
            logger.exception("peer %s: connection failed", self.address)
            self._last_error = repr(error)
        self._tried.set()
        return self._answered

    async def _run_connection(self) -> None:
        """Connect, and run the connection until it ends. Raises ``OSError`` and ``ChannelError``."""
        control = await self._dialer.dial()
        try:
            self._check(control)
        except PeerError:
            control.sock.close()
            raise
        source = Source(
            self._dialer,
            control,
            self._transport,
            self.throughput,
            self._timeouts,
            on_unresponsive=self._report_unresponsive,
        )
        self._source = source
        started = time.monotonic()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, source)
                cause = await source.run()
                tasks.cancel_scope.cancel()
        finally:
            self._source = None
        # Not on connecting: a peer that accepts and then fails at once would be dialled without pauses.
        if time.monotonic() - started > STABLE_SECONDS:
            self._backoff.reset()
        raise cause

    def _check(self, control: ControlConnection) -> None:
        welcome = control.welcome
        self.instance = printable(welcome.instance)
        if welcome.instance == self._own_instance:
            remedy = "" if self._temporary else ": remove it from peer.others"
            raise PeerError(f"the address is that of this instance itself{remedy}")
        if welcome.transport != self._transport_name:
            raise PeerError(
                f"peer.transport is {printable(welcome.transport)!r} there and {self._transport_name!r} "
                "here: set the same on both sides"
            )
        # Also refuses NaN, which is neither greater nor less.
        if not 0 < welcome.lease < float("inf"):
            raise PeerError(f"the lease time of {welcome.lease} s is invalid: see peer.lease there")

    async def _watch(self, source: Source) -> None:
        """Mark the peer available once it answers, and probe it while it is paused."""
        try:
            while not await source.keep_alive.probe(PROBE_SECONDS):
                pass
            self._answered = True
            self._tried.set()
            self._breaker.close()
            logger.debug("peer %s: connected to %s", self.address, self.instance)
            self._outage.end()
            await source.prepare()
            while True:
                await anyio.sleep(self._timeouts.ping / 5)
                if self._breaker.probe_is_due and not source.unresponsive:
                    await self._probe(source)
        except ChannelError:
            return  # _run_connection reports the end.

    async def _probe(self, source: Source) -> None:
        if await source.keep_alive.probe(PROBE_SECONDS):
            self._breaker.close()
            self._outage.end()
        else:
            self._breaker.open(self._breaker.reason or LOOKUPS)

    def _report_unresponsive(self, unresponsive: bool) -> None:
        if unresponsive:
            self._last_error = "does not answer"
            self._outage.begin("lost", "does not answer")
        elif self._breaker.reason is None:
            self._outage.end()

    def _report_loss(self, error: Exception) -> None:
        reason = str(error) or "no answer in time"
        if isinstance(error, OSError):
            reason = f"unreachable: {error.strerror or reason}"
        elif isinstance(error, ChannelClosed):
            reason = f"connection lost: {reason}"
        elif isinstance(error, Rejected):
            reason = f"the peer refuses the connection: {reason}"
        self._last_error = printable(reason)
        refused = isinstance(error, PeerError | ProtocolError | Rejected)
        self._outage.begin("refused" if refused else "lost", self._last_error)

    # Status.

    def status(self) -> dict[str, object]:
        """Return the state and counters of this peer."""
        source, seconds, choice = self._source, self.throughput.seconds_per_byte, self.choice
        return {
            "address": self.address,
            "instance": self.instance,
            "state": self._state(),
            "linked": source is not None and source.linked,
            "last_error": self._last_error,
            "granted_chunks": 0 if source is None else len(source.leases),
            "in_flight_bytes": self.throughput.in_flight,
            "read_bytes": self.throughput.bytes_read,
            "seconds_per_mib": None if seconds is None else seconds * MIB,
            "round_trip_seconds": self.throughput.round_trip,
            **({"encodes": choice.encodes, "codec_gain": choice.gain} if choice else {}),
        }

    def _state(self) -> str:
        source = self._source
        if source is None or source.over:
            return "not connected" if self._tried.is_set() else "connecting"
        if source.unresponsive:
            return "does not answer"
        return "connected" if self._breaker.reason is None else f"paused: {self._breaker.reason}"


def drop_leases(clients: Iterable[PeerClient], keys: Iterable[ChunkKey]) -> None:
    """Release what these peers have granted of these chunks."""
    for client in clients:
        if client.source is not None:
            client.source.leases.drop(keys)


class Outage:
    """Logs once that a peer is unavailable, and once that it is back."""

    def __init__(self, logger: Logger, name: str, *, quiet: bool = False) -> None:
        """``quiet``: log at debug level only."""
        self._logger = logger
        self._name = name
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.WARNING, logging.INFO)
        self._reported = ""

    def begin(self, kind: str, reason: str) -> None:
        """Log that the peer is unavailable, unless this kind of outage is already reported."""
        if kind != self._reported:
            self._reported = kind
            self._logger.log(self._levels[0], "peer %s: %s; continuing without it", self._name, reason)

    def end(self) -> None:
        """Log that the peer is available again, if an outage was reported."""
        if self._reported:
            self._reported = ""
            self._logger.log(self._levels[1], "peer %s: answers again", self._name)
