"""A carrier as its parent sees it: a process that is started, asked, and surely ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio

from kvtier.errors import PeerError, ProtocolError
from kvtier.sockets.frames import FrameReader, decoder
from kvtier.threads import WorkerThreads, spread
from kvtier.transports.nixl import carrier
from kvtier.transports.nixl.carrier import (
    LOST,
    Carry,
    Drop,
    Ended,
    FromCarrier,
    Open,
    Opened,
    Reach,
    Refused,
    ToCarrier,
    encode,
)
from kvtier.transports.nixl.settings import NixlSettings

logger = logging.getLogger("kvtier")

_decode: Callable[[bytes], FromCarrier] = decoder(FromCarrier, "a message of a carrier")

START_SECONDS = 30.0
"""A carrier that has not come up by then never will. It takes a second."""
MAX_STARTS = 3
"""A process that ends by itself before it is up is replaced so often: someone, or UCX, may have killed it."""
GRACE_SECONDS = 1.0
"""So long a call that is over waits for transfers that have begun before it ends their process."""


class Region(NamedTuple):
    """The memory that a carrier moves bytes from and to."""

    capacity: int
    """In bytes."""
    fd: int = -1
    """Of memory of the host, to be mapped."""
    gpu: str = ""
    """The name, as in ``CUDA_VISIBLE_DEVICES``, of the GPU to take memory of where there is no ``fd``."""

    @property
    def kind(self) -> str:
        """In NIXL's words."""
        return "VRAM" if self.fd < 0 else "DRAM"


class Part(NamedTuple):
    """Bytes that one transfer moves, with others: offsets from the start of either memory."""

    ours: int
    theirs: int
    length: int


class Batch:
    """Transfers that one call waits for."""

    def __init__(self, tickets: range) -> None:
        self.tickets = tickets
        self.results = [LOST] * len(tickets)
        self.left = len(tickets)
        self.ended = asyncio.Event()
        """Set when none of them touches memory any longer."""

    def note(self, ticket: int, result: int) -> None:
        """One of them has ended."""
        self.results[ticket - self.tickets.start] = result
        self.left -= 1
        if not self.left:
            self.ended.set()


class CarrierEnded(PeerError):
    """The process has ended by itself."""


class CarrierProcess(asyncio.Protocol):
    """One process with NIXL in it. Used in one event loop; made with :meth:`start`."""

    def __init__(self, region: Region, settings: NixlSettings, name: str, hop: WorkerThreads) -> None:
        self.name = name
        self.opened: Opened | None = None
        self.gone = asyncio.Event()
        """Set when the process has ended, and with that whatever it was doing to memory."""
        self._region = region
        self._settings = settings
        self._hop = hop
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._frames = FrameReader()
        self._answers: list[asyncio.Future[FromCarrier]] = []
        self._tickets = itertools.count()
        self._batches: dict[int, Batch] = {}

    @classmethod
    async def start(
        cls, region: Region, settings: NixlSettings, name: str, hop: WorkerThreads, *, serves: bool
    ) -> CarrierProcess:
        """Start a process that makes an agent and registers the memory. Raises :class:`PeerError`.

        ``serves``: whether others are to reach it. :meth:`reach` comes before :meth:`carry`.
        """
        attempts = 0
        while True:
            attempts += 1
            started = cls(region, settings, name, hop)
            try:
                await started._open(serves=serves)
            except CarrierEnded as error:
                await started.end()
                if attempts == MAX_STARTS:
                    raise PeerError(f"{error}, {attempts} times before it was up: see `ucx`") from error
                logger.warning("%s before it was up: starting another", error)
            except BaseException:
                await started.end()
                raise
            else:
                return started

    async def reach(self, name: str, address: int, metadata: bytes) -> None:
        """Be ready for transfers with another host's agent. Raises :class:`PeerError`."""
        await self._ask(Reach(name, address, metadata))

    def carry(self, peer: str, transfers: Sequence[Sequence[Part]], *, write: bool) -> Batch:
        """Begin some transfers with an agent that is reached, each of at least one part."""
        first = next(self._tickets)
        batch = Batch(range(first, first + len(transfers)))
        if self.gone.is_set() or self._transport is None or self._transport.is_closing():
            batch.left = 0
            batch.ended.set()
            return batch
        for _ in transfers[1:]:
            next(self._tickets)
        for ticket, parts in zip(batch.tickets, transfers, strict=True):
            self._batches[ticket] = batch
            ours, theirs, lengths = map(list, zip(*parts, strict=True))
            self._transport.write(encode(Carry(ticket, peer, write, ours, theirs, lengths)))
        return batch

    def drop(self, batch: Batch) -> None:
        """Have those transfers end as soon as they can: what is under way is not stopped by this."""
        tickets = [ticket for ticket in batch.tickets if ticket in self._batches]
        if tickets and self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(Drop(tickets)))

    async def until_ended(self, batch: Batch) -> None:
        """Wait until none of these transfers touches memory any longer.

        Where this is cancelled, the transfers are dropped, and in the end their process is ended.
        NIXL cannot take a transfer back: while one is under way nobody may do anything else with its memory.
        """
        try:
            await batch.ended.wait()
        except asyncio.CancelledError:
            self.drop(batch)
            loop = asyncio.get_running_loop()
            until = loop.time() + GRACE_SECONDS
            with anyio.CancelScope(shield=True):
                while not batch.ended.is_set():
                    with suppress(asyncio.CancelledError):
                        if (left := until - loop.time()) > 0:
                            with anyio.move_on_after(left):
                                await batch.ended.wait()
                        else:
                            await self.end()
            raise

    async def end(self) -> None:
        """Kill the process and wait until it is gone. Harmless when repeated."""
        if self._process is not None:
            self._process.kill()
        if self._transport is None and self._reaping is None:
            self._reaping = asyncio.get_running_loop().create_task(self._reap())
        await _uncancelled(self.gone)

    async def _open(self, *, serves: bool) -> None:
        await self._begin()
        backends, options = list(self._settings.backends), self._settings.options
        texts = {key: str(value) for key, value in options.items()}
        opened = await self._ask(Open(self.name, serves, backends, texts, self._region.kind))
        assert isinstance(opened, Opened)
        self.opened = opened

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = [
                sys.executable,
                *("-P", carrier.__file__),
                *map(str, (theirs.fileno(), self._region.fd, self._region.capacity)),
            ]
            environment = self._settings.environment()
            shared = [theirs.fileno()]
            if self._region.fd >= 0:
                shared.append(self._region.fd)
            else:
                environment["CUDA_VISIBLE_DEVICES"] = self._region.gpu

            def begin() -> None:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    pass_fds=shared,
                    stdin=subprocess.DEVNULL,
                    # NIXL and UCX speak of every lost peer, and know no way to be quiet about all of it.
                    stdout=subprocess.DEVNULL,
                    stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                )

            await in_thread(self._hop, begin)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    async def _ask(self, message: ToCarrier) -> FromCarrier:
        """The answer, unless it is a refusal. Raises :class:`PeerError` where none comes."""
        assert self._transport is not None
        answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise CarrierEnded(self._how_ended())
        self._answers.append(answer)
        self._transport.write(encode(message))
        try:
            with anyio.fail_after(START_SECONDS):
                reply: FromCarrier = await answer
        except TimeoutError as error:
            raise PeerError("NIXL does not answer: see `ucx`") from error
        if isinstance(reply, Refused):
            raise PeerError(f"NIXL {reply.reason}")
        return reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket to the process is in the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """The process has answered, or transfers have ended."""
        try:
            messages = [_decode(body) for body in self._frames.feed(data)]
        except ProtocolError:
            assert self._transport is not None
            self._transport.abort()
            return
        for message in messages:
            if isinstance(message, Ended):
                for ticket, result in zip(message.tickets, message.results, strict=True):
                    if (batch := self._batches.pop(ticket, None)) is not None:
                        batch.note(ticket, result)
            elif self._answers and not (answer := self._answers.pop(0)).done():
                answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is ending, or has to."""
        self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            await in_thread(self._hop, process.wait)
            if process.returncode not in (0, -signal.SIGKILL):
                logger.debug("a process with NIXL in it has ended with code %d", process.returncode)
        self._set_gone()

    def _set_gone(self) -> None:
        self.gone.set()
        batches, self._batches = self._batches, {}
        for ticket, batch in batches.items():
            batch.note(ticket, LOST)
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():
                answer.set_exception(CarrierEnded(self._how_ended()))

    def _how_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        how = "" if code is None else f" with code {code}" if code >= 0 else f" with signal {-code}"
        return f"NIXL's process has ended{how}"


async def in_thread(hop: WorkerThreads, function: Callable[[], object]) -> None:
    """Run a function in a worker thread; ends only when it has, also where it is cancelled."""
    await spread(_call, [function], parts=1, hop=hop)


def _call(function: Callable[[], object]) -> None:
    function()


async def _uncancelled(event: asyncio.Event) -> None:
    """Wait for an event, however often the waiting is cancelled, and raise the cancellation then."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
