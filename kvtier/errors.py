"""Everything that kvtier raises on purpose.

::

    KVTierError
    ├── SettingsError        a setting is unknown, malformed or contradicts another; names the key
    ├── PluginError          a plugin cannot be loaded, or two claim one name
    ├── LayoutError          a model's KV cache has a form that cannot be stored (Mamba, a wrong chunk size)
    ├── ArenaError           the shared memory cannot be made or mapped
    ├── TierError            a tier cannot be opened: an unwritable path, a directory that is taken
    ├── CorruptChunk         bytes that do not match their header
    ├── BridgeError          engine and cache process cannot talk
    │   ├── ProtocolError    the other side sent what the protocol does not allow
    │   └── BridgeClosed     the other side is gone
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


class BridgeError(KVTierError):
    """Engine and cache process cannot talk to each other."""


class ProtocolError(BridgeError):
    """The other side of the bridge sent something that the protocol does not allow."""


class BridgeClosed(BridgeError):
    """The other side of the bridge is gone."""


class UnsupportedEngine(KVTierError):
    """This vLLM, or this way of running it, is not one that kvtier was built for."""
