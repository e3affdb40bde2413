"""The messages between a NIXL process and its parent, as frames of :mod:`kvtier.rpc.frames`.

Both sides are of one installation: there is no greeting and no version. The parent starts with :class:`Open`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.rpc.frames import Message, Refused, Reply, Request, decoder

DONE, LOST, DROPPED = range(3)
"""The result of a transfer: completed, failed with an unknown state, or never started."""


class Answer(Reply, frozen=True, array_like=True):
    """Base of the answers. The process continues after a failure."""

    failure: str
    """Why the request failed; empty if it did not."""


class Open(Request, frozen=True, array_like=True, tag=10):
    """The first message to a NIXL process: create an agent, and register the memory with it."""

    name: str
    serves: bool
    """Whether peers connect to it. If not, it only connects to peers."""
    backends: list[str]
    options: dict[str, str]
    memory: str
    """``DRAM``, shared through an inherited file descriptor, or ``VRAM``, allocated by the process."""


class Opened(Answer, frozen=True, array_like=True, tag=11):
    """Answer to :class:`Open`: the memory's address in the NIXL process, and the agent's metadata."""

    address: int = 0
    metadata: bytes = b""
    handle: bytes = b""
    """CUDA IPC handle with which another process on the same GPU opens ``VRAM``; empty for ``DRAM``."""


class AddPeer(Request, frozen=True, array_like=True, tag=12):
    """Prepare for transfers with a peer's agent. Replaces a known agent of the same name."""

    name: str
    address: int
    metadata: bytes


class PeerAdded(Answer, frozen=True, array_like=True, tag=13):
    """Answer to :class:`AddPeer`."""


class Transfer(Message, frozen=True, array_like=True, tag=14):
    """Read or write spans of a peer's memory. Offsets are from the start of the local and remote memory."""

    ticket: int
    peer: str
    write: bool
    local: list[int]
    remote: list[int]
    lengths: list[int]


class Drop(Message, frozen=True, array_like=True, tag=15):
    """Drop these transfers unless they are running."""

    tickets: list[int]


class Ended(Message, frozen=True, array_like=True, tag=16):
    """Transfers that do not access memory any more, and the result of each."""

    tickets: list[int]
    results: list[int]


ToWorker = Open | AddPeer | Transfer | Drop | Refused
FromWorker = Opened | PeerAdded | Ended

decode_to_worker: Callable[[bytes], ToWorker] = decoder(ToWorker, "a message to a NIXL process")
decode_from_worker: Callable[[bytes], FromWorker] = decoder(FromWorker, "a message of a NIXL process")
