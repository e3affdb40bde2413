"""The parent's side of a NIXL process: start it, send it requests, and kill it."""

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

from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.errors import PeerError, ProtocolError
from kvtier.sockets.frames import FrameReader, decoder
from kvtier.transports.nixl import worker
from kvtier.transports.nixl.settings import NixlSettings
from kvtier.transports.nixl.worker import (
    LOST,
    AddPeer,
    Drop,
    Ended,
    FromWorker,
    Open,
    Opened,
    Refused,
    ToWorker,
    Transfer,
    encode,
)

logger = logging.getLogger("kvtier")

_decode: Callable[[bytes], FromWorker] = decoder(FromWorker, "a message of a NIXL process")

START_SECONDS = 30.0
"""Timeout of a process's answers. Startup normally takes 1 s."""
MAX_STARTS = 3
"""Maximum number of starts if the process exits during startup, for example because UCX aborts it."""
GRACE_SECONDS = 1.0
"""How long a cancelled call waits for its running transfers before it kills their process."""


class Region(NamedTuple):
    """The local memory of a NIXL process."""

    capacity: int
    """In bytes."""
    fd: int = -1
    """File descriptor of shared host memory to map."""
    gpu: str = ""
    """Without ``fd``: the GPU to allocate memory on, as in ``CUDA_VISIBLE_DEVICES``."""

    @property
    def kind(self) -> str:
        """NIXL's memory type."""
        return "VRAM" if self.fd < 0 else "DRAM"


class Part(NamedTuple):
    """A contiguous part of a transfer. Offsets are from the start of the local and remote memory."""

    local: int
    remote: int
    length: int


class Batch:
    """The transfers of one call."""

    def __init__(self, tickets: range) -> None:
        self.tickets = tickets
        self.results = [LOST] * len(tickets)
        self.left = len(tickets)
        self.ended = asyncio.Event()
        """Set when no transfer accesses memory any more."""

    def record(self, ticket: int, result: int) -> None:
        """Record the result of one transfer."""
        self.results[ticket - self.tickets.start] = result
        self.left -= 1
        if not self.left:
            self.ended.set()


class NixlProcessEnded(PeerError):
    """The NIXL process exited unexpectedly."""


class NixlProcess(asyncio.Protocol):
    """A child process with NIXL loaded. Use from one event loop; create with :meth:`start`."""

    def __init__(self, region: Region, settings: NixlSettings, name: str, executor: WorkerThreads) -> None:
        self.name = name
        self.opened: Opened | None = None
        self.exited = asyncio.Event()
        """Set when the process has exited, and does not access memory any more."""
        self._region = region
        self._settings = settings
        self._executor = executor
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._frames = FrameReader()
        self._answers: list[asyncio.Future[FromWorker]] = []
        self._tickets = itertools.count()
        self._batches: dict[int, Batch] = {}

    @classmethod
    async def start(
        cls, region: Region, settings: NixlSettings, name: str, executor: WorkerThreads, *, serves: bool
    ) -> NixlProcess:
        """Start a process that creates an agent and registers the memory. Raises :class:`PeerError`.

        ``serves``: whether peers connect to it. Call :meth:`add_peer` before :meth:`transfer`.
        """
        attempts = 0
        while True:
            attempts += 1
            started = cls(region, settings, name, executor)
            try:
                await started._open(serves=serves)
            except NixlProcessEnded as error:
                await started.end()
                if attempts == MAX_STARTS:
                    raise PeerError(f"{error} during startup, {attempts} times: see `ucx`") from error
                logger.warning("%s during startup: restarting it", error)
            except BaseException:
                await started.end()
                raise
            else:
                return started

    async def add_peer(self, name: str, address: int, metadata: bytes) -> None:
        """Prepare for transfers with another host's agent. Raises :class:`PeerError`."""
        await self._request(AddPeer(name, address, metadata))

    def transfer(self, peer: str, transfers: Sequence[Sequence[Part]], *, write: bool) -> Batch:
        """Start transfers with an added peer. Each transfer has at least one part."""
        first = next(self._tickets)
        batch = Batch(range(first, first + len(transfers)))
        if self.exited.is_set() or self._transport is None or self._transport.is_closing():
            batch.left = 0
            batch.ended.set()
            return batch
        for _ in transfers[1:]:
            next(self._tickets)
        for ticket, parts in zip(batch.tickets, transfers, strict=True):
            self._batches[ticket] = batch
            local, remote, lengths = map(list, zip(*parts, strict=True))
            self._transport.write(encode(Transfer(ticket, peer, write, local, remote, lengths)))
        return batch

    def drop(self, batch: Batch) -> None:
        """Drop the batch's waiting transfers. Running transfers are not stopped."""
        tickets = [ticket for ticket in batch.tickets if ticket in self._batches]
        if tickets and self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(Drop(tickets)))

    async def until_ended(self, batch: Batch) -> None:
        """Wait until the batch's transfers do not access memory any more.

        If cancelled, drop the transfers, and kill the process if they take longer than ``GRACE_SECONDS``.
        NIXL cannot cancel a running transfer, and its memory must not be used for anything else meanwhile.
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
        """Kill the process and wait until it has exited. Idempotent."""
        if self._process is not None:
            self._process.kill()
        if self._transport is None and self._reaping is None:
            self._reaping = asyncio.get_running_loop().create_task(self._reap())
        await _wait_shielded(self.exited)

    async def _open(self, *, serves: bool) -> None:
        await self._spawn()
        backends, options = list(self._settings.backends), self._settings.options
        texts = {key: str(value) for key, value in options.items()}
        opened = await self._request(Open(self.name, serves, backends, texts, self._region.kind))
        assert isinstance(opened, Opened)
        self.opened = opened

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            command = [
                sys.executable,
                *("-P", worker.__file__),
                *map(str, (theirs.fileno(), self._region.fd, self._region.capacity)),
            ]
            environment = self._settings.environment()
            shared = [theirs.fileno()]
            if self._region.fd >= 0:
                shared.append(self._region.fd)
            else:
                environment["CUDA_VISIBLE_DEVICES"] = self._region.gpu

            def spawn() -> None:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    pass_fds=shared,
                    stdin=subprocess.DEVNULL,
                    # NIXL and UCX log every lost peer, and have no option to disable all of that.
                    stdout=subprocess.DEVNULL,
                    stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
                )

            await in_thread(self._executor, spawn)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)

    async def _request(self, message: ToWorker) -> FromWorker:
        """Send a message and return the answer. Raises :class:`PeerError` if refused or not answered."""
        assert self._transport is not None
        answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise NixlProcessEnded(self._how_ended())
        self._answers.append(answer)
        self._transport.write(encode(message))
        try:
            with anyio.fail_after(START_SECONDS):
                reply: FromWorker = await answer
        except TimeoutError as error:
            raise PeerError("NIXL does not answer: see `ucx`") from error
        if isinstance(reply, Refused):
            raise PeerError(f"NIXL {reply.reason}")
        return reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the socket to the process."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle answers, and reports of ended transfers."""
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
                        batch.record(ticket, result)
            elif self._answers and not (answer := self._answers.pop(0)).done():
                answer.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Kill and reap the process."""
        self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            await in_thread(self._executor, process.wait)
            if process.returncode not in (0, -signal.SIGKILL):
                logger.debug("nixl transport: a NIXL process exited with code %d", process.returncode)
        self._set_exited()

    def _set_exited(self) -> None:
        self.exited.set()
        batches, self._batches = self._batches, {}
        for ticket, batch in batches.items():
            batch.record(ticket, LOST)
        answers, self._answers = self._answers, []
        for answer in answers:
            if not answer.done():
                answer.set_exception(NixlProcessEnded(self._how_ended()))

    def _how_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "the NIXL process exited"
        how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        return f"the NIXL process {how}"


async def in_thread(executor: WorkerThreads, function: Callable[[], object]) -> None:
    """Run a function in a worker thread, and wait for it even if cancelled."""
    await spread(_call, [function], parts=1, executor=executor)


def _call(function: Callable[[], object]) -> None:
    function()


async def _wait_shielded(event: asyncio.Event) -> None:
    """Wait for an event even if cancelled meanwhile, then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not event.is_set():
            try:
                await event.wait()
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
