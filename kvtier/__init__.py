"""kvtier keeps the KV cache of LLM prompts in tiers outside the GPU, so that no prompt is prefilled twice.

The names below are the public API, and so is what docs/extending tells plugins to import; everything else
may change between minor versions.
"""

from kvtier.cache import TieredCache
from kvtier.errors import (
    ArenaError,
    ChannelClosed,
    ChannelError,
    CorruptChunk,
    KVTierError,
    LayoutError,
    PeerError,
    PluginError,
    ProtocolError,
    SettingsError,
    TierError,
    UnsupportedEngine,
)
from kvtier.hookspecs import hookimpl
from kvtier.model import ModelCache
from kvtier.settings import Settings, load_settings

__version__ = "0.1.0"

__all__ = [
    "ArenaError",
    "ChannelClosed",
    "ChannelError",
    "CorruptChunk",
    "KVTierError",
    "LayoutError",
    "ModelCache",
    "PeerError",
    "PluginError",
    "ProtocolError",
    "Settings",
    "SettingsError",
    "TierError",
    "TieredCache",
    "UnsupportedEngine",
    "hookimpl",
    "load_settings",
]
