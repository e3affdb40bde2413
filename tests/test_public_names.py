"""The public API is a short, fixed list."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvtier


def test_public_names() -> None:
    assert kvtier.__all__ == [
        "ArenaError",
        "ChannelClosed",
        "ChannelError",
        "ChunkHints",
        "CorruptChunk",
        "KVTierError",
        "LayoutError",
        "ModelCache",
        "PeerError",
        "PluginError",
        "ProtocolError",
        "Rejected",
        "Settings",
        "SettingsError",
        "TierError",
        "TieredCache",
        "UnsupportedEngine",
        "hookimpl",
        "load_settings",
    ]
    assert all(hasattr(kvtier, name) for name in kvtier.__all__)
    assert set(kvtier.__all__) <= set(dir(kvtier))
    with pytest.raises(AttributeError, match="module 'kvtier' has no attribute 'Tiers'"):
        _ = kvtier.Tiers  # type: ignore[attr-defined]


def test_nixl_process_imports_little() -> None:
    """Its startup time is that of NIXL."""
    code = "import sys, kvtier.transports.nixl.worker; print(*sys.modules)"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"pydantic", "ssl"}.intersection(names)
    assert {name for name in names if name.split(".")[0] == "kvtier"} == {
        "kvtier",
        "kvtier.errors",
        "kvtier.hookmarkers",
        "kvtier.memory",
        "kvtier.memory.large_pages_process",
        "kvtier.rpc",
        "kvtier.rpc.frames",
        "kvtier.rpc.wire",
        "kvtier.transports",
        "kvtier.transports.nixl",
        "kvtier.transports.nixl.protocol",
        "kvtier.transports.nixl.worker",
        "kvtier.version",
    }
