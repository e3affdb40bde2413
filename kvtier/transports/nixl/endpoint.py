"""What a host tells its peers of its memory."""

from __future__ import annotations

import msgspec

from kvtier.errors import PeerError
from kvtier.transports.nixl.carrier import Opened

ENDPOINT_VERSION = 1
_MAGIC = "kvtier-nixl"
ARENA_BYTES = 16
MAX_METADATA_BYTES = 1 << 20
_MAX_NAME_CHARACTERS = 64
_MAX_ADDRESS = 1 << 63


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """What a peer's transport is told of this host: its agent, and where its arena lies for that."""

    magic: str
    version: int
    arena: bytes
    """A random number: an arena that took another's place must not be written by the other's grants."""
    name: str
    address: int
    length: int
    metadata: bytes

    @classmethod
    def of(cls, arena: bytes, name: str, length: int, opened: Opened) -> Endpoint:
        """The endpoint of an arena of ``length`` bytes, registered by a carrier."""
        return cls(_MAGIC, ENDPOINT_VERSION, arena, name, opened.address, length, opened.metadata)

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
            len(endpoint.arena) == ARENA_BYTES
            and endpoint.name.isascii()
            and 0 < len(endpoint.name) <= _MAX_NAME_CHARACTERS
            and endpoint.address > 0
            and endpoint.length > 0
            and endpoint.address + endpoint.length <= _MAX_ADDRESS
            and 0 < len(endpoint.metadata) <= MAX_METADATA_BYTES
        ):
            raise PeerError("the peer's endpoint has no name, no metadata or memory that cannot be")
        return endpoint
