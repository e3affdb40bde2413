"""The exceptions of kvtier.

A lost chunk, an unavailable tier or a torn file does not raise. These are outcomes
(:class:`kvtier.backends.base.Outcome`) and count as a miss.
"""


class KVTierError(Exception):
    """Base class of all exceptions that kvtier raises."""


class SettingsError(KVTierError):
    """A setting is unknown, malformed or conflicts with another. The message names the key and the remedy."""


class PluginError(KVTierError):
    """A plugin cannot be loaded, or two plugins claim the same name."""


class LayoutError(KVTierError, ValueError):
    """A model's KV cache layout is not supported, or is invalid."""


class ArenaError(KVTierError):
    """The shared memory cannot be created or mapped."""


class TierError(KVTierError):
    """A tier cannot be opened. The message is what was found, followed by the remedy if it is known."""

    def __init__(self, found: str, remedy: str = "") -> None:
        super().__init__(f"{found}: {remedy}" if remedy else found)
        self.found = found
        self.remedy = remedy


class MediumReplaced(KVTierError):
    """A private medium has lost all its objects, and works again, without them or with others."""


class IncompleteScan(KVTierError):
    """A medium holds objects that it could not list or delete. The message names what, why and how much."""

    def __init__(self, message: str, unseen_bytes: int | None = None) -> None:
        """``unseen_bytes``: what the others take, as far as known; ``None`` if that may be anything."""
        super().__init__(message)
        self.unseen_bytes = unseen_bytes


class CorruptChunk(KVTierError):
    """A chunk does not match its header."""

    def __init__(self, fault: str, *details: object) -> None:
        """``fault``: what it does or is, with a ``{}`` for each of the ``details``."""
        super().__init__(fault.format(*details) if details else fault)
        self.kind = fault
        """The fault without its details."""


class UnreadableChunk(CorruptChunk):
    """A chunk was stored with other settings: a codec that is not installed, or a key that is not known."""


class ChannelError(KVTierError):
    """Communication between an engine and the cache process, or between two instances, failed."""


class ProtocolError(ChannelError):
    """The other side of a channel violated the protocol."""


class ChannelClosed(ChannelError):
    """The other side closed the channel."""


class Rejected(ChannelError):
    """The other side rejected the connection. The message is its reason."""


class PeerError(ChannelError):
    """A peer is unreachable, fails authentication or refuses to serve. The message names the remedy."""


class ControllerError(KVTierError):
    """The controller cannot execute a request. Subclasses are in :mod:`kvtier.fleet.controller.errors`."""


class UnsupportedEngine(KVTierError):
    """The vLLM version or configuration is not supported."""
