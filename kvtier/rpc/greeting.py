"""The first message of each side: ``Hello`` of the client, ``Welcome`` of the server, or ``Refused``.

Both have the protocol's ``version`` as their first field, and no message of a protocol is sent before them.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from kvtier.errors import ProtocolError
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import Message


class Versioned(Protocol):
    """A message with a protocol version."""

    @property
    def version(self) -> int:
        """The protocol version."""


VersionedT = TypeVar("VersionedT", bound=Versioned)


def check_hello(message: object, expected: type[VersionedT], version: int) -> VersionedT:
    """Return the client's first message if it is ``expected``. Raises :class:`ProtocolError`."""
    hello = _expect(message, expected)
    if hello.version != version:
        raise ProtocolError(describe_mismatch(hello.version, version))
    return hello


def check_welcome(message: object, expected: type[VersionedT], version: int) -> VersionedT:
    """Return the server's first message if it is ``expected``. Raises :class:`ProtocolError`."""
    welcome = _expect(message, expected)
    if welcome.version != version:
        raise ProtocolError(describe_mismatch(version, welcome.version))
    return welcome


def _expect(message: object, expected: type[VersionedT]) -> VersionedT:
    if not isinstance(message, expected):
        raise ProtocolError(f"its first message is {type(message).__name__}, not {expected.__name__}")
    return message


def describe_mismatch(client: int, server: int) -> str:
    """Return the error text for two protocol versions that differ.

    It is logged where it is found, and sent to the other side: so it names the sides by their role.
    """
    return (
        f"the client speaks protocol version {client} and the server version {server}: "
        "install the same kvtier on both, and restart both"
    )


async def greet(
    endpoint: Endpoint, hello: Message, welcome: type[VersionedT], version: int, seconds: float
) -> VersionedT:
    """Send ``hello``, and return the server's welcome. Raises :class:`kvtier.errors.ChannelError`."""
    endpoint.send(hello)
    reply: Any = await endpoint.receive(seconds)
    return check_welcome(reply, welcome, version)
