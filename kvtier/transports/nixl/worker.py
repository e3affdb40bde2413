"""The NIXL process: maps the arena or allocates GPU memory, and runs transfers with NIXL.

NIXL is never loaded in the cache process, because of three observed properties of NIXL 1.5 with UCX:

- A running transfer cannot be cancelled. After ``release_xfer_handle`` and ``remove_remote_agent``, one over
  TCP continues, and writes to memory seconds later when the remote side resumes. Only the exit of the process
  reliably ends it.
- UCX can abort the process whose memory is read over TCP when the reader disconnects.
- Creating and destroying an agent holds the GIL for 100 ms or more.

One process serves the arena to peers, and each link has another, so that a stalled peer delays no other. Each
of them registers the arena once. A staging buffer (:mod:`kvtier.peers.staging.buffers`) has one process for
both roles: GPU memory that peers access must belong to that process. The process exits when the socket to its
parent closes, always without NIXL's clean-up: the kernel's is more reliable.

This file runs as a script, and imports only what is fast to import.

NIXL: https://github.com/ai-dynamo/nixl, ``src/plugins/ucx/ucx_backend.cpp`` for how transfers are released.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import socket
import sys
import time
from collections import deque
from typing import Any, NamedTuple

from kvtier.errors import ChannelClosed, ChannelError
from kvtier.memory import large_pages_process
from kvtier.memory.large_pages_process import LARGE_PAGE_BYTES
from kvtier.rpc.frames import Refused, encode_body
from kvtier.rpc.wire import FrameSocket
from kvtier.transports.nixl.protocol import (
    DONE,
    DROPPED,
    LOST,
    AddPeer,
    Drop,
    Ended,
    FromWorker,
    Open,
    Opened,
    PeerAdded,
    ToWorker,
    Transfer,
    decode_to_worker,
)

MAX_BYTES_IN_FLIGHT = 256 << 20
"""Beyond this, transfers wait in a queue, where they can be dropped."""

SPIN_SECONDS = 100e-6
"""How long the worker busy-polls after the last event."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-6, 50e-6
"""After that it polls at growing intervals, so that a long transfer does not occupy a core."""

THREAD_PAUSE_MICROSECONDS = 10_000
"""Polling interval of NIXL's progress thread, for work that raises no event."""

_PR_SET_TIMERSLACK = 29


class _InFlight(NamedTuple):
    ticket: int
    peer: str
    length: int
    handle: Any


def _let_thread_sleep(bindings: Any) -> None:  # noqa: ANN401 - NIXL has no types
    """Have NIXL's progress thread wait for events, and poll at intervals only.

    NIXL's Python API has no setting for this: its thread busy-polls, which takes a whole core even when idle.
    See ``src/plugins/ucx/ucx_engine_thread.cpp`` for the interval.
    """
    base = bindings.nixlAgentConfig

    class Config(base):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, THREAD_PAUSE_MICROSECONDS if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config


class Agent:
    """A NIXL agent, its registered memory, and its remote agents."""

    def __init__(
        self,
        name: str,
        backends: list[str],
        options: dict[str, str],
        *,
        serves: bool,
        memory: str,
    ) -> None:
        if memory == "DRAM":
            # NIXL imports torch only to find the CUDA version, which takes 1 s and 200 MiB.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from nixl import _api

        _let_thread_sleep(_api.nixlBind)
        self._agent = _api.nixl_agent(
            name,
            # The progress thread serves remote agents. Without them, it would only slow down the thread
            # that polls the transfers.
            _api.nixl_agent_config(
                enable_prog_thread=serves,
                backends=[],
                sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            ),
        )
        available = self._agent.get_plugin_list()
        for backend in backends:
            if backend not in available:
                raise LookupError(f"has no backend {backend!r}, only {', '.join(sorted(available))}")
            self._agent.create_backend(backend, options)
        self._memory = memory
        self._peers: set[str] = set()

    def register(self, address: int, length: int) -> None:
        """Register memory: of the host or, for ``VRAM``, of the first visible device."""
        self._agent.register_memory([(address, length, 0, "")], self._memory)

    @property
    def metadata(self) -> bytes:
        """The data with which another agent connects to this one. Text and numbers, no pickle."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Add the remote agent that the metadata describes, or replace it."""
        if name in self._peers:
            self._peers.discard(name)
            self._agent.remove_remote_agent(name)
        loaded = self._agent.add_remote_agent(metadata)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        self._peers.add(loaded)
        if loaded != name:
            raise ValueError(f"the metadata is of agent {loaded!r}, not {name!r}")

    def start(
        self, peer: str, write: bool, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]
    ) -> tuple[Any, str]:
        """Start a transfer between spans of one memory type. Return its handle and state."""
        handle = self._agent.initialize_xfer(
            "WRITE" if write else "READ",
            self._agent.get_xfer_descs(local, self._memory),
            self._agent.get_xfer_descs(remote, self._memory),
            peer,
        )
        return handle, self._agent.transfer(handle)

    def state(self, handle: Any) -> str:  # noqa: ANN401 - NIXL has no types
        """Return the state of a transfer: ``DONE``, ``PROC`` or ``ERR``."""
        state: str = self._agent.check_xfer_state(handle)
        return state


class NixlWorker:
    """The loop that handles the parent's messages and polls transfers, in one thread."""

    def __init__(self, parent: FrameSocket, capacity: int, shared: int | None) -> None:
        """``capacity``: size of the memory in bytes; ``shared``: its address if it is host memory."""
        self._parent = parent
        self._capacity = capacity
        self._shared = shared
        self._base = 0
        self._peers: dict[str, int] = {}
        """By agent, the address of its memory in its process."""
        self._agent: Agent | None = None
        self._waiting: deque[Transfer] = deque()
        self._in_flight: list[_InFlight] = []
        self._bytes_in_flight = 0
        self._ended: list[tuple[int, int]] = []

    def run(self) -> None:
        """Run until the parent exits, then raise :class:`ChannelError`."""
        active_at = time.monotonic()
        pause = SHORTEST_PAUSE
        while True:
            busy = bool(self._in_flight or self._waiting)
            if not busy:
                wait = None
            elif time.monotonic() - active_at < SPIN_SECONDS:
                wait = 0.0
            else:
                wait = pause
                pause = min(2 * pause, LONGEST_PAUSE)
            received = self._receive(wait)
            started = self._start_waiting()
            if self._poll() or started or received:
                active_at = time.monotonic()
                pause = SHORTEST_PAUSE
            self._report_ended()

    def _receive(self, wait: float | None) -> bool:
        """Receive and handle messages; wait up to ``wait`` seconds for them, or forever with ``None``."""
        parent = self._parent
        # poll(2) waits for whole milliseconds, select(2) for microseconds.
        unsent = [parent.socket] if parent.unsent else []
        readable, writable, _ = select.select([parent.socket], unsent, [], wait)
        if writable:
            parent.flush()
        if not readable:
            return False
        for body in parent.read() or ():
            self._handle(decode_to_worker(body))
        return True

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Transfer():
                self._waiting.append(message)
            case Drop(tickets=tickets):
                drop = set(tickets)
                self._ended += [(queued.ticket, DROPPED) for queued in self._waiting if queued.ticket in drop]
                self._waiting = deque(queued for queued in self._waiting if queued.ticket not in drop)
            case Open():
                self._send(self._open(message))
            case AddPeer():
                self._send(PeerAdded(message.ticket, self._add_peer(message)))
            case Refused(reason=reason):
                raise ChannelClosed(reason)

    def _open(self, message: Open) -> Opened:
        try:
            handle = b""
            if self._shared is not None:
                self._base = self._shared
            else:
                self._base, handle = allocate_on_gpu(self._capacity)
            self._agent = Agent(
                message.name,
                message.backends,
                message.options,
                serves=message.serves,
                memory=message.memory,
            )
            self._agent.register(self._base, self._capacity)
            return Opened(message.ticket, "", self._base, self._agent.metadata, handle)
        except ImportError as error:
            failure = f"is not installed ({error}): pip install 'kvtier[nixl]'"
        except LookupError as error:
            failure = f"{error}: see `backends`"
        except Exception as error:
            failure = f"does not start ({_describe_error(error)}): see `backends`, `options` and `ucx`"
        return Opened(message.ticket, failure)

    def _add_peer(self, message: AddPeer) -> str:
        """Return why it failed; empty if it did not."""
        assert self._agent is not None
        if any(transfer.peer == message.name for transfer in self._in_flight):
            return "still has transfers with that agent in flight"
        try:
            self._agent.add_peer(message.name, message.metadata)
        except Exception as error:
            return f"cannot connect to the peer: {_describe_error(error)}"
        self._peers[message.name] = message.address
        return ""

    def _start_waiting(self) -> bool:
        """Start waiting transfers within the limit. Return whether any was started."""
        started = False
        while self._waiting and (not self._in_flight or self._bytes_in_flight < MAX_BYTES_IN_FLIGHT):
            self._start(self._waiting.popleft())
            started = True
        return started

    def _start(self, transfer: Transfer) -> None:
        assert self._agent is not None
        local = [
            (self._base + offset, length, 0)
            for offset, length in zip(transfer.local, transfer.lengths, strict=True)
        ]
        remote = [
            (self._peers[transfer.peer] + offset, length, 0)
            for offset, length in zip(transfer.remote, transfer.lengths, strict=True)
        ]
        try:
            handle, state = self._agent.start(transfer.peer, transfer.write, local, remote)
        except Exception:
            self._ended.append((transfer.ticket, LOST))
            return
        if state == "PROC":
            length = sum(transfer.lengths)
            self._in_flight.append(_InFlight(transfer.ticket, transfer.peer, length, handle))
            self._bytes_in_flight += length
        else:
            self._ended.append((transfer.ticket, DONE if state == "DONE" else LOST))

    def _poll(self) -> bool:
        """Poll the running transfers. Return whether any has ended."""
        assert self._agent is not None or not self._in_flight
        still: list[_InFlight] = []
        for transfer in self._in_flight:
            try:
                state = self._agent.state(transfer.handle) if self._agent is not None else "ERR"
            except Exception:
                state = "ERR"
            if state == "PROC":
                still.append(transfer)
            else:
                self._ended.append((transfer.ticket, DONE if state == "DONE" else LOST))
                self._bytes_in_flight -= transfer.length
        has_ended = len(still) < len(self._in_flight)
        self._in_flight = still
        return has_ended

    def _report_ended(self) -> None:
        """Report all ended transfers in one message."""
        if self._ended:
            tickets, results = zip(*self._ended, strict=True)
            self._ended = []
            self._send(Ended(list(tickets), list(results)))

    def _send(self, message: FromWorker) -> None:
        self._parent.write(encode_body(message))
        self._parent.flush()


def map_shared(descriptor: int, length: int) -> int:
    """Map shared memory, 2 MiB-aligned for huge pages, and return its address. Raises ``OSError``.

    It stays mapped until the process exits.
    """
    reserved = large_pages_process.reserve_addresses(length + LARGE_PAGE_BYTES)
    aligned = reserved + -reserved % LARGE_PAGE_BYTES
    large_pages_process.map_shared(aligned, length, descriptor, 0)
    return aligned


def allocate_on_gpu(length: int) -> tuple[int, bytes]:
    """Allocate memory on the first visible GPU. Return its address and its CUDA IPC handle.

    It is freed when the process exits. Raises ``OSError`` without a driver, ``RuntimeError`` for CUDA errors.
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    handle = ctypes.create_string_buffer(64)  # A CUipcMemHandle.
    for name, *arguments in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxSetCurrent", context),
        ("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length)),
        ("cuIpcGetMemHandle", ctypes.byref(handle), address),
    ):
        result = getattr(cuda, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} failed with CUDA error {result} for {length} bytes")
    return address.value, handle.raw


def _describe_error(error: Exception) -> str:
    return str(error) or type(error).__name__


def main() -> None:
    """Run the worker. Arguments: descriptors of the parent's socket and of shared memory, and its capacity.

    A negative memory descriptor stands for GPU memory.
    """
    parent_fd, memory_fd, capacity = map(int, sys.argv[1:])
    # No core dumps: an abort by UCX would write the whole arena to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The default timer slack would add 50 microseconds to each pause.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    # The lowest free descriptor: the parent may have more than the 1024 that select(2) can take.
    parent = FrameSocket(socket.socket(fileno=os.dup(parent_fd)))
    os.close(parent_fd)
    try:
        NixlWorker(parent, capacity, map_shared(memory_fd, capacity) if memory_fd >= 0 else None).run()
    except (ChannelError, OSError):
        pass
    finally:
        # Skip destructors: NIXL's can abort this process, or the peer's.
        os._exit(0)


if __name__ == "__main__":
    main()
