"""The endpoint of the transport ``nixl``: a host's agent and memory, as sent to its peers."""

from __future__ import annotations

import msgspec

from kvtier.errors import PeerError
from kvtier.transports.nixl.protocol import Opened

ENDPOINT_VERSION = 1
_MAGIC = "kvtier-nixl"
ARENA_BYTES = 16
MAX_METADATA_BYTES = 1 << 20
_MAX_NAME_CHARACTERS = 64
_MAX_ADDRESS = 1 << 63


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """A host's NIXL agent, and the address of its arena in that agent's process."""

    magic: str
    version: int
    arena: bytes
    """A random id of the arena, so that grants of a former arena are not used for this one."""
    name: str
    address: int
    length: int
    metadata: bytes

    @classmethod
    def of(cls, arena: bytes, name: str, length: int, opened: Opened) -> Endpoint:
        """Return the endpoint of an arena of ``length`` bytes that a NIXL process has registered."""
        return cls(_MAGIC, ENDPOINT_VERSION, arena, name, opened.address, length, opened.metadata)

    def encode(self) -> bytes:
        """Encode as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Decode and validate another host's endpoint. Raises :class:`PeerError` if it is invalid."""
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise PeerError(f"the peer's endpoint is not one of the `nixl` transport: {error}") from error
        if (endpoint.magic, endpoint.version) != (_MAGIC, ENDPOINT_VERSION):
            raise PeerError(
                "the peer's `nixl` transport has another version: install the same kvtier on both sides"
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
            raise PeerError("the peer's endpoint has an invalid name, metadata or memory range")
        return endpoint
