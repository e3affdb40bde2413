"""Layering of the package: imports go downward only, and each layer excludes certain modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvtier

ROOT = Path(kvtier.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py"))

LAYERS = (
    ("_native", "_native_cuda", "bounded", "version"),
    ("errors", "units", "logs", "native", "hookmarkers"),
    ("settings", "concurrency"),
    ("memory",),
    ("backends", "catalog", "rpc"),
    ("events", "transports"),
    ("tiers",),
    ("hookspecs",),
    ("plugins", "pipeline"),
    ("cache",),
    (
        "observability.breakers",
        "observability.canary",
        "observability.families",
        "observability.recording",
        "observability.traces",
        "observability.transfers",
        "observability.whatif",
    ),
    ("observability.requests",),
    ("observability.metrics", "http", "peers"),
    ("fleet.member", "fleet.service"),
    ("fleet.controller", "fleet.proxy"),
    ("instance",),
    ("bridge", "sync", "testing"),
    ("integrations", "lab.simulation", "lab.bench", "lab.demo"),
    ("cli",),
    ("__main__", "__init__"),
)
"""From the lowest to the highest. A package, or package of a room, imports only those of lower layers."""
ROOMS = ("observability", "fleet", "lab")
"""Their packages have layers of their own."""
LEVELS = {name: level for level, layer in enumerate(LAYERS) for name in layer}

ENGINES = ("torch", "vllm")
MAY_IMPORT_ENGINES = ("integrations", "cli", "lab.demo")
EXCLUDED = {
    # The controller runs on hosts without an instance, and knows only what instances report.
    "fleet.controller": ("bridge", "cache", "instance", "peers"),
    # The proxy is an ordinary client of the engines.
    "fleet.proxy": ("bridge", "cache", "instance", "peers", "transports"),
}

MAY_USE_ASYNCIO = {
    "backends/disk/uring.py": "futures that the native ring completes through an eventfd, one for each batch",
    "concurrency/tasks.py": "tasks that outlive the block that starts them, which no task group allows",
    "concurrency/sockets/executor.py": "futures that native threads complete; one timer for each operation",
    "concurrency/threads.py": "futures that worker threads complete: 60 µs a round trip, anyio 80 to 126 µs",
    "http.py": "uvicorn's HTTP protocol class, with its transport and timers",
    "fleet/proxy/connections.py": "an HTTP protocol class, without a cancel scope for each piece of a stream",
    "rpc/wire.py": "receives an engine's messages in a callback, without a task switch for each",
    "testing/cancelling.py": "cancels with Task.cancel, and counts iterations of the event loop",
    "testing/watch.py": "watches the event loop itself",
    "transports/nixl/link.py": "callers share one connection attempt, and each may be cancelled on its own",
    "transports/nixl/process.py": "waits while NIXL accesses memory, however often it is cancelled",
    "transports/tcp/link.py": "drivers are shared by all batches and outlive each; one timer for each batch",
    "transports/tcp/session.py": "a timer for each request, which is cheaper than a cancel scope",
}
"""The modules that use asyncio directly, and why. All others use anyio."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree that a test needs: walking them all takes long."""
    kept = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kept)]


def imported(path: Path) -> Iterator[str]:
    """Yield each imported module and name, including imports in functions and for type checking."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(name: str) -> str:
    """Return what has a layer: the first part of a name below ``kvtier``, in a room the first two."""
    parts = name.split(".")[1:] or ["__init__"]
    return ".".join(parts[: 2 if parts[0] in ROOMS else 1])


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("kvtier", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def module_of(name: str) -> str:
    """Return the module that has a name: itself, or the one that the name is imported from."""
    while name not in NAMES:
        name = name.rpartition(".")[0]
    return name


NAMES = {module(path) for path in MODULES}


def may_import(package: str, other: str) -> bool:
    return package == other or LEVELS[other] < LEVELS[package]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    here = package(module(path))
    names = list(imported(path))
    others = {package(name) for name in names if name.startswith("kvtier.")}
    assert not [other for other in others if not may_import(here, other)]
    assert not others.intersection(EXCLUDED.get(here, ()))
    if here not in MAY_IMPORT_ENGINES and path != ROOT / "memory" / "arena.py":
        assert not [name for name in names if name.split(".")[0] in ENGINES]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_dangerous_is_imported_or_called(path: Path) -> None:
    assert not {"pickle", "dill", "marshal", "shelve"}.intersection(
        name.split(".")[0] for name in imported(path)
    )
    calls = (node.func for node in nodes(path) if isinstance(node, ast.Call))
    assert not [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("eval", "exec")]


def test_asyncio_is_used_only_where_anyio_cannot_be() -> None:
    def uses_asyncio(path: Path) -> bool:
        return any(name.split(".")[0] == "asyncio" for name in imported(path))

    assert {str(path.relative_to(ROOT)) for path in MODULES if uses_asyncio(path)} == set(MAY_USE_ASYNCIO)


def test_rooms_and_packages_import_each_other_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        here, *_ = package(module(path)).split(".")
        names = {name.split(".")[1] for name in imported(path) if name.startswith("kvtier.")}
        graph.setdefault(here, set()).update(names - {here})
    TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports for annotations count, too, and those in functions. A module may import its own package."""
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        here = module(path)
        others = {module_of(name) for name in imported(path) if name.startswith("kvtier.")}
        within = {other for other in others if here.startswith(f"{other}.")}
        graph[here] = others - within - {here}
    TopologicalSorter(graph).prepare()  # Raises CycleError.
