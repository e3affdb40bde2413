"""kvtier keeps the KV cache of LLM prompts in storage tiers outside the GPU, to avoid repeated prefill.

The names below and those that docs/extending documents for plugins are the public API. Everything else may
change between minor versions.
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
from kvtier.hookmarkers import hookimpl
from kvtier.model import ModelCache
from kvtier.settings import Settings, load_settings

__version__ = "0.2.0"

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
