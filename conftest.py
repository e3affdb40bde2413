"""Two workers share the tests: one runs the real vLLM engines, the other what is left, and both what remains.

Files stay whole, so that what a module's tests share is made once. Engines stay together and come first: they
take the longest, and two at once would take each other's processors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ENGINES = ("tests/vllm", "tests/integrations", "tests/demo")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say which tests stay together."""
    path = item.path.relative_to(item.config.rootpath)
    item.add_marker(pytest.mark.xdist_group("engines" if _needs_engines(path) else str(path)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put first those that take longest."""
    items.sort(key=lambda item: not _needs_engines(item.path.relative_to(config.rootpath)))


def _needs_engines(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ENGINES)
