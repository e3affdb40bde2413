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


def check_greeting(message: object, expected: type[VersionedT], version: int) -> VersionedT:
    """Return the first message of the other side if it is ``expected``. Raises :class:`ProtocolError`."""
    if not isinstance(message, expected):
        raise ProtocolError(f"its first message is {type(message).__name__}, not {expected.__name__}")
    if message.version != version:
        raise ProtocolError(describe_mismatch(message.version, version))
    return message


def describe_mismatch(theirs: int, ours: int) -> str:
    """Return the error text for two protocol versions that differ."""
    return (
        f"it speaks protocol version {theirs} and this process version {ours}: "
        "install the same kvtier on both, and restart both"
    )


async def greet(
    endpoint: Endpoint, hello: Message, welcome: type[VersionedT], version: int, seconds: float
) -> VersionedT:
    """Send ``hello``, and return the server's welcome. Raises :class:`kvtier.errors.ChannelError`."""
    endpoint.send(hello)
    reply: Any = await endpoint.receive(seconds)
    return check_greeting(reply, welcome, version)
