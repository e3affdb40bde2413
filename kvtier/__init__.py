"""kvtier keeps the KV cache of LLM prompts in storage tiers outside the GPU, to avoid repeated prefill.

The names below and those that docs/extending documents for plugins are the public API. Everything else may
change between minor versions.

Importing this package imports only the exceptions. The other names are imported on first use, so that a NIXL
process (:mod:`kvtier.transports.nixl.worker`) starts fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    Rejected,
    SettingsError,
    TierError,
    UnsupportedEngine,
)
from kvtier.version import __version__ as __version__

if TYPE_CHECKING:
    from kvtier.cache import ModelCache, TieredCache
    from kvtier.catalog.hints import ChunkHints
    from kvtier.hookmarkers import hookimpl
    from kvtier.instance import Instance
    from kvtier.pipeline.query import Query
    from kvtier.settings import Settings, load_settings
else:
    _MODULES = {
        "ChunkHints": "kvtier.catalog.hints",
        "Instance": "kvtier.instance",
        "ModelCache": "kvtier.cache",
        "Query": "kvtier.pipeline.query",
        "Settings": "kvtier.settings",
        "TieredCache": "kvtier.cache",
        "hookimpl": "kvtier.hookmarkers",
        "load_settings": "kvtier.settings",
    }

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "ArenaError",
    "ChannelClosed",
    "ChannelError",
    "ChunkHints",
    "CorruptChunk",
    "Instance",
    "KVTierError",
    "LayoutError",
    "ModelCache",
    "PeerError",
    "PluginError",
    "ProtocolError",
    "Query",
    "Rejected",
    "Settings",
    "SettingsError",
    "TierError",
    "TieredCache",
    "UnsupportedEngine",
    "hookimpl",
    "load_settings",
]
