"""Everything that kvtier raises on purpose.

::

    KVTierError
    ├── SettingsError        a setting is unknown, malformed or contradicts another; names the key
    ├── PluginError          a plugin cannot be loaded, or two claim one name
    ├── LayoutError          a model's KV cache has a form that cannot be stored (Mamba, a wrong chunk size)
    ├── ArenaError           the shared memory cannot be made or mapped
    ├── TierError            a tier cannot be opened: an unwritable path, a directory that is taken
    ├── CorruptChunk         bytes that do not match their header
    ├── ChannelError         two processes cannot talk: engine and cache process, or two instances
    │   ├── ProtocolError    the other side sent what the protocol does not allow
    │   ├── ChannelClosed    the other side is gone
    │   └── PeerError        a peer cannot be reached, is not who it should be, or will not serve us
    ├── ControllerError      the controller cannot do what it was asked for (kvtier.controller.errors)
    └── UnsupportedEngine    this vLLM, or this way of running it, is not one that kvtier was built for

Losing a chunk, a tier that is down, a file that is torn: none of these raises. They are outcomes
(:class:`kvtier.backends.base.Outcome`) and cost a miss.
"""


class KVTierError(Exception):
    """Root of every exception that kvtier raises on purpose."""


class SettingsError(KVTierError):
    """A setting is unknown, malformed or contradicts another. The message names the key and the remedy."""


class PluginError(KVTierError):
    """A plugin cannot be loaded, or two plugins claim the same name."""


class LayoutError(KVTierError):
    """A model's KV cache has a form that cannot be stored."""


class ArenaError(KVTierError):
    """The shared memory cannot be made or mapped."""


class TierError(KVTierError):
    """A tier cannot be opened."""


class CorruptChunk(KVTierError):
    """Bytes that do not match the header they came with."""


class ChannelError(KVTierError):
    """Two processes cannot talk to each other: engine and cache process, or two instances."""


class ProtocolError(ChannelError):
    """The other side of a channel sent something that the protocol does not allow."""


class ChannelClosed(ChannelError):
    """The other side of a channel is gone."""


class PeerError(ChannelError):
    """A peer cannot be reached, is not who it should be, or will not serve us; says what mends it."""


class ControllerError(KVTierError):
    """The controller cannot do what it was asked for; kinds of it are in :mod:`kvtier.controller.errors`."""


class UnsupportedEngine(KVTierError):
    """This vLLM, or this way of running it, is not one that kvtier was built for."""
