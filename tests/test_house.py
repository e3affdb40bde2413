"""Imports go downward only, and what must stay out of a layer stays out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier

ROOT = Path(kvtier.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py"))

TOP = ("bridge", "controller", "proxy", "integrations", "cli", "demo", "testing")
MIDDLE = ("peers", "agent", "instance", "http", "metrics")
"""Above the cache, and below those on top."""
ENGINES = ("torch", "vllm")
MAY_IMPORT_ENGINES = ("integrations", "arena", "cli", "demo")


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions and for type checking only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def within(path: Path, places: tuple[str, ...]) -> bool:
    return path.relative_to(ROOT).parts[0].removesuffix(".py") in places


def modules(places: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"kvtier.{place}" for place in places)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    names = list(imported(path))
    if not within(path, (*TOP, "__main__")):
        assert not [name for name in names if name.startswith(modules(TOP))]
        if not within(path, MIDDLE):
            assert not [name for name in names if name.startswith(modules(MIDDLE))]
    if not within(path, MAY_IMPORT_ENGINES):
        assert not [name for name in names if name.split(".")[0] in ENGINES]
    if within(path, ("bridge", "controller")):
        assert not [name for name in names if name.startswith(modules(("integrations", "cli")))]
    if within(path, ("controller",)):
        # Of instances it knows what they tell it, no more: it runs where there is none.
        assert not [
            name for name in names if name.startswith(modules(("bridge", "cache", "instance", "peers")))
        ]
    if within(path, ("proxy",)):
        # Nor of engines: it asks them as any client does.
        away = ("bridge", "cache", "instance", "peers", "transports", "integrations", "cli")
        assert not [name for name in names if name.startswith(modules(away))]
    if within(path, ("agent",)):
        assert not [name for name in names if name.startswith("kvtier.instance")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_dangerous_is_imported_or_called(path: Path) -> None:
    assert not {"pickle", "dill", "marshal", "shelve"}.intersection(imported(path))
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert not [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("eval", "exec")]
