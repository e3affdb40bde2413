"""The public API is a short, fixed list."""

from __future__ import annotations

import kvtier


def test_public_names() -> None:
    assert kvtier.__all__ == [
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
    assert all(hasattr(kvtier, name) for name in kvtier.__all__)
