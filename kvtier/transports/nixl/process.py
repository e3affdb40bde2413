"""The parent's side of a NIXL process: start it, send it requests, and kill it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import anyio

from kvtier.concurrency import processes
from kvtier.concurrency.tasks import wait_shielded
from kvtier.concurrency.threads import WorkerThreads, in_thread
from kvtier.errors import ChannelError, PeerError, ProtocolError
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Request
from kvtier.rpc.wire import SocketWire
from kvtier.transports.nixl import worker
from kvtier.transports.nixl.protocol import (
    LOST,
    AddPeer,
    Answer,
    Drop,
    Ended,
    Open,
    Opened,
    PeerAdded,
    Transfer,
    decode_from_worker,
)
from kvtier.transports.nixl.settings import NixlSettings

logger = logging.getLogger("kvtier")

AnswerT = TypeVar("AnswerT", bound=Answer)

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
        if not tickets:
            self.ended.set()

    def record(self, ticket: int, result: int) -> None:
        """Record the result of one transfer."""
        self.results[ticket - self.tickets.start] = result
        self.left -= 1
        if not self.left:
            self.ended.set()


class NixlProcessEnded(PeerError):
    """The NIXL process exited unexpectedly."""


class NixlProcess:
    """A child process with NIXL loaded. Use from one event loop; create with :meth:`start`.

    A task receives its messages, and kills and reaps it when the connection ends.
    """

    opened: Opened
    """Its memory and its agent."""

    def __init__(self, region: Region, connected: socket.socket, executor: WorkerThreads) -> None:
        """``connected``: this side of the connection to the process."""
        self.name = f"kvtier-{secrets.token_hex(8)}"
        self.capacity = region.capacity
        """Of its memory, in bytes."""
        self.exited = anyio.Event()
        """Set when the process has exited, and does not access memory any more."""
        self._region = region
        self._executor = executor
        self._process: subprocess.Popen[bytes] | None = None
        self._next_ticket = 0
        self._batches: dict[int, Batch] = {}
        self._endpoint = Endpoint(SocketWire(connected), decode_from_worker)
        self._running = asyncio.get_running_loop().create_task(self._run())

    @classmethod
    async def start(
        cls, region: Region, settings: NixlSettings, executor: WorkerThreads, *, serves: bool
    ) -> NixlProcess:
        """Start a process that creates an agent and registers the memory. Raises :class:`PeerError`.

        ``serves``: whether peers connect to it. Call :meth:`add_peer` before :meth:`transfer`.
        """
        attempts = 0
        while True:
            attempts += 1
            ours, theirs = socket.socketpair()
            started = cls(region, ours, executor)
            try:
                # The child has a copy: its exit closes the connection only once this one is closed.
                with theirs:
                    await started._spawn(settings, theirs)
                await started._open(settings, serves=serves)
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
        await self._request(lambda ticket: AddPeer(ticket, name, address, metadata), PeerAdded)

    def transfer(self, peer: str, transfers: Sequence[Sequence[Part]], *, write: bool) -> Batch:
        """Start transfers with an added peer. Each transfer has at least one part."""
        batch = Batch(range(self._next_ticket, self._next_ticket + len(transfers)))
        self._next_ticket = batch.tickets.stop
        if self.exited.is_set():
            batch.ended.set()
            return batch
        for ticket, parts in zip(batch.tickets, transfers, strict=True):
            self._batches[ticket] = batch
            local, remote, lengths = map(list, zip(*parts, strict=True))
            # A process that does not take the message is killed, as always when its connection ends.
            self._endpoint.send_or_end(Transfer(ticket, peer, write, local, remote, lengths))
        return batch

    def drop(self, batch: Batch) -> None:
        """Drop the batch's waiting transfers. Running transfers are not stopped."""
        if tickets := [ticket for ticket in batch.tickets if ticket in self._batches]:
            self._endpoint.send_or_end(Drop(tickets))

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
        self._endpoint.close()
        try:
            await self.exited.wait()
        except asyncio.CancelledError:
            await wait_shielded([self.exited])
            raise
        finally:
            await self._reap()

    async def _reap(self) -> None:
        """Kill the process, if any, and wait for it. Idempotent.

        If the event loop ends during :meth:`start`, the receiving task may end before there is a process.
        """
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await in_thread(process.wait, self._executor)
            if process.returncode not in (0, -signal.SIGKILL):
                logger.debug("nixl transport: a NIXL process exited with code %d", process.returncode)

    async def _spawn(self, settings: NixlSettings, theirs: socket.socket) -> None:
        region = self._region
        arguments = [str(number) for number in (theirs.fileno(), region.fd, region.capacity)]
        environment = settings.environment()
        shared = [theirs.fileno()]
        if region.fd >= 0:
            shared.append(region.fd)
        else:
            environment["CUDA_VISIBLE_DEVICES"] = region.gpu

        def spawn() -> None:
            self._process = processes.start(
                processes.python(worker.__file__, *arguments),
                env=environment,
                pass_fds=shared,
                stdin=subprocess.DEVNULL,
                # NIXL and UCX log every lost peer, and have no option to disable all of that.
                stdout=subprocess.DEVNULL,
                stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )

        await in_thread(spawn, self._executor)

    async def _open(self, settings: NixlSettings, *, serves: bool) -> None:
        backends = list(settings.backends)
        options = {key: str(value) for key, value in settings.options.items()}
        self.opened = await self._request(
            lambda ticket: Open(ticket, self.name, serves, backends, options, self._region.kind), Opened
        )

    async def _request(self, request: Callable[[int], Request], answer_type: type[AnswerT]) -> AnswerT:
        """Send a request and return the answer. Raises :class:`PeerError` if it fails or is not answered."""
        try:
            with anyio.fail_after(START_SECONDS):
                return await self._endpoint.call(request, answer_type, _successful).reply()
        except TimeoutError as error:
            raise PeerError("NIXL does not answer: see `ucx`") from error
        except PeerError:
            raise
        except ChannelError as error:
            await self.end()
            raise NixlProcessEnded(self._how_ended()) from error

    def _handle(self, message: Ended) -> None:
        if len(message.tickets) != len(message.results):
            raise ProtocolError("the NIXL process reports transfers without their results")
        for ticket, result in zip(message.tickets, message.results, strict=True):
            if (batch := self._batches.pop(ticket, None)) is not None:
                batch.record(ticket, result)

    async def _run(self) -> None:
        """Receive until the connection ends. Then kill and reap the process."""
        try:
            # Both sides send unasked: if each waited for the other to read, neither would.
            await self._endpoint.run(at_once=self._handle, drains=False)
        finally:
            await self._reap()
            self.exited.set()
            for ticket, batch in self._batches.items():
                batch.record(ticket, LOST)
            self._batches.clear()

    def _how_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "the NIXL process exited"
        how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
        return f"the NIXL process {how}"


def _successful(answer: AnswerT) -> AnswerT:
    if answer.failure:
        raise PeerError(f"NIXL {answer.failure}")
    return answer
