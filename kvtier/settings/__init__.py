"""Settings: models, sources, validation messages, and the JSON schema."""

from __future__ import annotations

from kvtier.settings.model import (
    DEFAULT_EVICTION,
    PAGE_BYTES,
    SOCKET_PATH_BYTES,
    LocalTierSettings,
    PrefetchSettings,
    Settings,
    TierSettings,
    load_settings,
)
from kvtier.settings.sources import Origin
from kvtier.settings.values import LocalPath

__all__ = [
    "DEFAULT_EVICTION",
    "PAGE_BYTES",
    "SOCKET_PATH_BYTES",
    "LocalPath",
    "LocalTierSettings",
    "Origin",
    "PrefetchSettings",
    "Settings",
    "TierSettings",
    "load_settings",
]
