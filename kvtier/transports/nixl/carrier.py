"""A process that alone has NIXL loaded, maps the arena, or has memory of a GPU, and moves bytes.

Never in the cache process, for three things that NIXL 1.5 with UCX does, all of them seen:

- A transfer that has begun cannot be taken back. What ``release_xfer_handle`` and ``remove_remote_agent``
  give up goes on where the bytes come over TCP, and fills memory seconds later when the other side wakes up.
  Only the end of the process surely ends it.
- UCX aborts the process whose memory is read over TCP when the reader goes away in the wrong moment.
- Making and destroying an agent holds Python's lock for a tenth of a second and more.

One process serves the arena to others, and each link has one, so that a peer that stands still delays no
other. For each, the arena is registered once. A staging buffer (:mod:`kvtier.peers.staging`) has one process
that does both: memory of a GPU that others are to reach must be that process' own. The carrier ends with the
socket to its parent, always without tidying up NIXL: the kernel does that more reliably.

It is run as a file of its own, and imports nothing of kvtier: that would take longer than all else. The
messages between it and its parent are here for that reason, too: a length (u32) and that many bytes of
MessagePack each.

NIXL: https://github.com/ai-dynamo/nixl, ``src/plugins/ucx/ucx_backend.cpp`` for how transfers are released.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import Any, NamedTuple

import msgspec

DONE, LOST, DROPPED = range(3)
"""What became of a transfer: it is done, nobody knows, or it was never begun."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message to a carrier: make an agent of this name and register its memory with it."""

    name: str
    serves: bool
    """Whether others are to reach it. If not, it only reaches others."""
    backends: list[str]
    options: dict[str, str]
    memory: str
    """``DRAM``, shared by the descriptor that the process was given, or ``VRAM``, its own."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Open`: where its memory lies in the carrier, and the agent's metadata."""

    address: int
    metadata: bytes
    handle: bytes
    """By which another process on the same GPU opens ``VRAM``, as CUDA has it; empty for ``DRAM``."""


class Reach(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Be ready for transfers with this agent, anew if it is known already."""

    name: str
    address: int
    metadata: bytes


class Reached(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answer to :class:`Reach`."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answer to :class:`Open` or :class:`Reach` where that cannot be, in words."""

    reason: str


class Carry(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Read, or write, these spans of that agent's memory; offsets are from the start of either memory."""

    ticket: int
    peer: str
    write: bool
    ours: list[int]
    theirs: list[int]
    lengths: list[int]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """These transfers are not wanted any longer: those that are not begun need not be."""

    tickets: list[int]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Transfers that touch no memory any longer, and what became of each."""

    tickets: list[int]
    results: list[int]


ToCarrier = Open | Reach | Carry | Drop
FromCarrier = Opened | Reached | Refused | Ended

_LENGTH = struct.Struct("<I")
_decoder = msgspec.msgpack.Decoder(ToCarrier)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToCarrier | FromCarrier) -> bytes:
    """A message as it travels between the two."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


MOST_BYTES_UNDER_WAY = 256 << 20
"""Beyond these, transfers wait their turn, and can be dropped."""

SPIN_SECONDS = 100e-6
"""For so long after something has happened the carrier looks again at once."""
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-6, 50e-6
"""Then in pauses that grow, so that a long transfer does not cost a core."""

THREAD_PAUSE_MICROSECONDS = 10_000
"""After so long NIXL's own thread looks for what no event has told it of."""

READ_BYTES = 1 << 18
LARGE_PAGE_BYTES = 2 << 20

_PR_SET_TIMERSLACK = 29
_PROT_NONE, _MAP_FIXED = 0, 0x10
"""Which Python's ``mmap`` has no names for (asm-generic/mman-common.h)."""


class NothingToDo(Exception):
    """The parent has gone."""


class _Transfer(NamedTuple):
    ticket: int
    peer: str
    length: int
    handle: Any


def _let_thread_sleep(bindings: Any) -> None:  # noqa: ANN401 - NIXL has no types
    """Have NIXL's own thread wait for events, and look for what they miss in pauses.

    NIXL's Python has it look without a pause, which takes a whole core, idle or not, and offers no setting.
    ``src/plugins/ucx/ucx_engine_thread.cpp`` says what the pause is for.
    """
    base = bindings.nixlAgentConfig

    class Config(base):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, THREAD_PAUSE_MICROSECONDS if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config


class Agent:
    """NIXL's agent, its memory, and the other agents that it may reach."""

    def __init__(
        self,
        name: str,
        backends: list[str],
        options: dict[str, str],
        *,
        serves: bool,
        memory: str = "DRAM",
    ) -> None:
        if memory == "DRAM":
            # NIXL imports torch only to learn which CUDA there is, which costs a second and 200 MiB.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        from nixl import _api

        _let_thread_sleep(_api.nixlBind)
        self.name = name
        self._agent = _api.nixl_agent(
            name,
            # NIXL's own thread serves those who reach this agent. Where nobody does, it would only be in the
            # way of the one that looks after the transfers.
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
        """Make memory known: of the host, or, as ``VRAM``, of the first device that this process sees."""
        self._agent.register_memory([(address, length, 0, "")], self._memory)

    @property
    def metadata(self) -> bytes:
        """What another agent needs to reach this one: text and numbers, no pickle."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def reach(self, name: str, metadata: bytes) -> None:
        """Know the agent that the metadata tells of, anew if it is known."""
        if name in self._peers:
            self._peers.discard(name)
            self._agent.remove_remote_agent(name)
        loaded = self._agent.add_remote_agent(metadata)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        self._peers.add(loaded)
        if loaded != name:
            raise ValueError(f"the metadata is of {loaded!r}, not of {name!r}")

    def start(
        self, peer: str, write: bool, ours: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]]
    ) -> tuple[Any, str]:
        """Begin a transfer between spans of memory of one kind; its handle and its state."""
        handle = self._agent.initialize_xfer(
            "WRITE" if write else "READ",
            self._agent.get_xfer_descs(ours, self._memory),
            self._agent.get_xfer_descs(theirs, self._memory),
            peer,
        )
        return handle, self._agent.transfer(handle)

    def state(self, handle: Any) -> str:  # noqa: ANN401 - NIXL has no types
        """``DONE``, ``PROC`` or ``ERR``."""
        state: str = self._agent.check_xfer_state(handle)
        return state


class Carrier:
    """Does what the parent asks for, in one thread, until that has gone."""

    def __init__(self, parent: socket.socket, capacity: int, shared: int | None) -> None:
        """``capacity``: of its memory, in bytes; ``shared`` is the address of that where it is the host's."""
        self._parent = parent
        self._capacity = capacity
        self._shared = shared
        self._received = bytearray()
        self._base = 0
        self._peers: dict[str, int] = {}
        """Where the memory of each lies in its process."""
        self._agent: Agent | None = None
        self._waiting: deque[Carry] = deque()
        self._under_way: list[_Transfer] = []
        self._bytes_under_way = 0
        self._ended: list[tuple[int, int]] = []

    def run(self) -> None:
        """Raises :class:`NothingToDo` in the end."""
        active_at = time.monotonic()
        pause = SHORTEST_PAUSE
        while True:
            busy = bool(self._under_way or self._waiting)
            if not busy:
                wait = None
            elif time.monotonic() - active_at < SPIN_SECONDS:
                wait = 0.0
            else:
                wait = pause
                pause = min(2 * pause, LONGEST_PAUSE)
            came = self._receive(wait)
            begun = self._begin()
            if self._look() or begun or came:
                active_at = time.monotonic()
                pause = SHORTEST_PAUSE
            self._tell()

    def _receive(self, wait: float | None) -> bool:
        """Take in what the parent says, waiting so many seconds for it; for ever with ``None``."""
        readable, _, _ = select.select([self._parent], [], [], wait)
        if not readable:
            return False
        data = self._parent.recv(READ_BYTES)
        if not data:
            raise NothingToDo
        received = self._received
        received += data
        while len(received) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(received)[0]
            if len(received) < stop:
                break
            message = _decoder.decode(bytes(received[_LENGTH.size : stop]))
            del received[:stop]
            self._take(message)
        return True

    def _take(self, message: ToCarrier) -> None:
        match message:
            case Carry():
                self._waiting.append(message)
            case Drop(tickets=tickets):
                dropped = set(tickets)
                self._ended += [(carry.ticket, DROPPED) for carry in self._waiting if carry.ticket in dropped]
                self._waiting = deque(carry for carry in self._waiting if carry.ticket not in dropped)
            case Open():
                self._send(self._open(message))
            case Reach():
                self._send(self._reach(message))

    def _open(self, message: Open) -> FromCarrier:
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
            return Opened(self._base, self._agent.metadata, handle)
        except ImportError as error:
            return Refused(f"is missing ({error}): install it: pip install 'kvtier[nixl]'")
        except LookupError as error:
            return Refused(f"{error}: see `backends`")
        except Exception as error:
            return Refused(f"does not start ({_in_words(error)}): see `backends`, `options` and `ucx`")

    def _reach(self, message: Reach) -> FromCarrier:
        assert self._agent is not None
        if any(transfer.peer == message.name for transfer in self._under_way):
            return Refused("is still moving bytes from or to that agent")
        try:
            self._agent.reach(message.name, message.metadata)
        except Exception as error:
            return Refused(f"does not reach the peer: {_in_words(error)}")
        self._peers[message.name] = message.address
        return Reached()

    def _begin(self) -> bool:
        """Begin what waits, as far as the bounds allow."""
        begun = False
        while self._waiting and (not self._under_way or self._bytes_under_way < MOST_BYTES_UNDER_WAY):
            self._start(self._waiting.popleft())
            begun = True
        return begun

    def _start(self, carry: Carry) -> None:
        assert self._agent is not None
        ours = [
            (self._base + offset, length, 0) for offset, length in zip(carry.ours, carry.lengths, strict=True)
        ]
        theirs = [
            (self._peers[carry.peer] + offset, length, 0)
            for offset, length in zip(carry.theirs, carry.lengths, strict=True)
        ]
        try:
            handle, state = self._agent.start(carry.peer, carry.write, ours, theirs)
        except Exception:
            self._ended.append((carry.ticket, LOST))
            return
        if state == "PROC":
            length = sum(carry.lengths)
            self._under_way.append(_Transfer(carry.ticket, carry.peer, length, handle))
            self._bytes_under_way += length
        else:
            self._ended.append((carry.ticket, DONE if state == "DONE" else LOST))

    def _look(self) -> bool:
        """See how the transfers that are under way are getting on; whether one has ended."""
        assert self._agent is not None or not self._under_way
        still: list[_Transfer] = []
        for transfer in self._under_way:
            try:
                state = self._agent.state(transfer.handle) if self._agent is not None else "ERR"
            except Exception:
                state = "ERR"
            if state == "PROC":
                still.append(transfer)
            else:
                self._ended.append((transfer.ticket, DONE if state == "DONE" else LOST))
                self._bytes_under_way -= transfer.length
        has_ended = len(still) < len(self._under_way)
        self._under_way = still
        return has_ended

    def _tell(self) -> None:
        """Say in one message what has ended."""
        if self._ended:
            tickets, results = zip(*self._ended, strict=True)
            self._ended = []
            self._send(Ended(list(tickets), list(results)))

    def _send(self, message: FromCarrier) -> None:
        self._parent.sendall(encode(message))


def map_shared(descriptor: int, length: int) -> int:
    """Map memory until the process ends, at an address where pages of 2 MiB may be. Raises ``OSError``.

    As :mod:`kvtier.arena` does with native code.
    """
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved: int = libc.mmap(0, length + LARGE_PAGE_BYTES, _PROT_NONE, flags, -1, 0)
    aligned = reserved + -reserved % LARGE_PAGE_BYTES
    access = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = libc.mmap(aligned, length, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if mapped != aligned:
        raise OSError(ctypes.get_errno(), "cannot map the arena")
    return aligned


class _GPUHandle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def allocate_on_gpu(length: int) -> tuple[int, bytes]:
    """Memory of the first GPU that this process sees: its address, and the handle by which others open it.

    It is freed with the process. Raises ``OSError`` without a driver, ``RuntimeError`` for what that refuses.
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), _GPUHandle()
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
            raise RuntimeError(f"{name} gives CUDA error {result} for {length} bytes")
    return address.value, bytes(handle.reserved)


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__


def main() -> None:
    """The arguments are two descriptors, of the socket to the parent and of shared memory, and its capacity.

    The second is negative where the memory is to be that of a GPU.
    """
    parent_fd, memory_fd, capacity = map(int, sys.argv[1:])
    # An abort of UCX must not write the arena to the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Pauses of some microseconds would else take 50 longer.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    parent = socket.socket(fileno=parent_fd)
    parent.setblocking(True)
    try:
        Carrier(parent, capacity, map_shared(memory_fd, capacity) if memory_fd >= 0 else None).run()
    except (NothingToDo, OSError, msgspec.DecodeError):
        pass
    finally:
        # Not by way of destructors: NIXL's end the process with a signal, or the peer's.
        os._exit(0)


if __name__ == "__main__":
    main()
