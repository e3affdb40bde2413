"""What a process and its carriers say to each other, and what a host tells another about its memory."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvtier.errors import PeerError
from kvtier.sockets.frames import Message, decoder

ENDPOINT_VERSION = 1
_MAGIC = "kvtier-nixl"
MAX_METADATA_BYTES = 1 << 20
_MAX_NAME_CHARACTERS = 64
_MAX_ADDRESS = 1 << 63

DONE, LOST, DROPPED = range(3)
"""What became of a transfer: it is done, nobody knows, or it was never begun."""


class Open(Message, frozen=True, array_like=True, tag=1):
    """First message to a carrier: make an agent of this name and register the arena with it."""

    name: str
    backends: list[str]
    options: dict[str, str]


class Opened(Message, frozen=True, array_like=True, tag=2):
    """Answer to :class:`Open`: where the arena lies in the carrier, and the agent's metadata."""

    address: int
    metadata: bytes


class Reach(Message, frozen=True, array_like=True, tag=3):
    """Be ready for transfers with this agent, anew if it is known already, and with no other one."""

    name: str
    address: int
    metadata: bytes


class Reached(Message, frozen=True, array_like=True, tag=4):
    """Answer to :class:`Reach`."""


class Refused(Message, frozen=True, array_like=True, tag=5):
    """Answer to :class:`Open` or :class:`Reach` where that cannot be, in words."""

    reason: str


class Carry(Message, frozen=True, array_like=True, tag=6):
    """Read, or write, these spans of the other arena; offsets are from the start of each arena."""

    ticket: int
    write: bool
    ours: list[int]
    theirs: list[int]
    lengths: list[int]


class Drop(Message, frozen=True, array_like=True, tag=7):
    """These transfers are not wanted any longer: those that are not begun need not be."""

    tickets: list[int]


class Ended(Message, frozen=True, array_like=True, tag=8):
    """Transfers that touch no memory any longer, and what became of each."""

    tickets: list[int]
    results: list[int]


decode_to_carrier: Callable[[bytes], Open | Reach | Carry | Drop] = decoder(
    Open | Reach | Carry | Drop, "a message to a carrier"
)
decode_from_carrier: Callable[[bytes], Opened | Reached | Refused | Ended] = decoder(
    Opened | Reached | Refused | Ended, "a message of a carrier"
)


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """What a peer's transport is told of this host: its agent, and where its arena lies for that."""

    magic: str
    version: int
    name: str
    address: int
    length: int
    metadata: bytes

    @classmethod
    def of(cls, name: str, length: int, opened: Opened) -> Endpoint:
        """The endpoint of an arena of ``length`` bytes, registered by a carrier."""
        return cls(_MAGIC, ENDPOINT_VERSION, name, opened.address, length, opened.metadata)

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """What another host has sent. Raises :class:`PeerError` for what cannot be an endpoint of ours."""
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise PeerError(f"the peer's endpoint is none of a `nixl` transport: {error}") from error
        if (endpoint.magic, endpoint.version) != (_MAGIC, ENDPOINT_VERSION):
            raise PeerError(
                "the peer's endpoint is none of this version's `nixl` transport: run the same kvtier on both"
            )
        if not (
            endpoint.name.isascii()
            and 0 < len(endpoint.name) <= _MAX_NAME_CHARACTERS
            and endpoint.address > 0
            and endpoint.length > 0
            and endpoint.address + endpoint.length <= _MAX_ADDRESS
            and 0 < len(endpoint.metadata) <= MAX_METADATA_BYTES
        ):
            raise PeerError("the peer's endpoint has no agent, no metadata or memory that cannot be")
        return endpoint
