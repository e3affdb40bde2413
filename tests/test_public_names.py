"""The public API is a short, fixed list."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"


def test_public_names() -> None:
    assert kvtier.__all__ == [
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


def test_documentation_imports_only_public_names() -> None:
    """Public are also what docs/api lists, and what docs/extending imports."""
    docs = {
        page: page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *API.glob("*.md")]
    }
    listed = {name for page in API.glob("*.md") for name in re.findall(r"(?m)^::: (\S+)", docs[page])}
    public = listed | {f"kvtier.{name}" for name in kvtier.__all__}
    imported = {
        (page.name, f"{module}.{name.strip()}", module)
        for page, text in docs.items()
        for module, names in re.findall(r"(?m)^from (kvtier[\w.]*) import (.+)$", text)
        for name in names.split(",")
    }
    assert ("README.md", "kvtier.TieredCache", "kvtier") in imported
    assert not [(page, name) for page, name, module in imported if not {name, module} & public]


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
