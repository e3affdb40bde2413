"""The public API is a short, fixed list."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"
RENAMED = ROOT / "docs" / "upgrading-0.2.md"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *({*ROOT.glob("docs/**/*.md")} - {RENAMED}))
"""But for the page with the names of before."""
SOURCES = ("kvtier", "csrc", "tests", "benchmarks", "soak", "abuse", "fuzz", "tools", "plugins")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w./-]+\.(?:py|cpp|hpp|cu)|[a-z_/]+/")
NAME = re.compile(r"_?[A-Z][a-z]\w*(?:\.\w+)*(?:\(.*\))?")
DEFINITION = re.compile(
    r"(?:class|struct|using|enum|def) +(\w+)|^ *\"?(\w+)\"?(?:\[[^]]*\])? *[=:]|^    (\w+),$"
    r"|import (?:\w+, )*(\w+)|self\.(\w+) ?[=:]",
    re.MULTILINE,
)
ELSEWHERE = {
    *("AllBlocksCleared", "BackendConfigs", "HiSparseConnector"),  # Of vLLM, llm-d and a peer of kvtier.
    *("LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"),
    *("OffloadingConnector", "SimpleCPUOffloadConnector"),
    *("AttributeError", "Ethernet", "False", "MemoryMax", "NaN", "None", "True"),
}


def test_public_names_are_these() -> None:
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


def test_documentation_names_only_what_exists() -> None:
    """Files, folders and classes in backticks, with their attributes, are somewhere in the sources."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc"]
    paths += [*ROOT.glob("*"), *(ROOT / "docs").rglob("*")]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    ends = {name[at:] for name in files for at in (0, *(slash.end() for slash in re.finditer("/", name)))}
    sources = [path for path in paths if path.suffix in {".py", ".cpp", ".hpp", ".cu"}]
    defined = {name for path in sources for found in DEFINITION.findall(path.read_text()) for name in found}
    missing = set()
    for page in PAGES:
        for code in CODE.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if FILE.fullmatch(code):
                is_missing = code.rstrip("/") not in ends
            else:
                parts = code.partition("(")[0].split(".") if NAME.fullmatch(code) else []
                is_missing = not {*parts} <= defined | ELSEWHERE
            if is_missing:
                missing.add(f"{page.relative_to(ROOT)}: {code}")
    assert missing == set()


def test_renamed_modules_exist() -> None:
    """What the list of renamed names calls the names of today."""
    lines = [line for line in RENAMED.read_text().replace("`", "").splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert {len(row) for row in rows} == {3}
    assert {"module", "name"} <= {kind for kind, _, _ in rows}
    for kind, old, new in rows:
        if kind == "module":
            assert importlib.util.find_spec(new) is not None, f"{old} is {new}"
        elif kind == "name" and new.startswith("kvtier."):
            module, name = re.findall(r"^([a-z_.]+)\.([A-Z]\w+)", new)[0]
            assert hasattr(importlib.import_module(module), name), f"{old} is {new}"


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
