"""Two workers share the tests: one runs the real vLLM engines, the other what is left, and both what remains.

Files stay whole, so that what a module's tests share is made once. Engines stay together and come first: they
take the longest, and two at once would take each other's processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

ENGINES = ("tests/vllm", "tests/integrations", "tests/demo")


@pytest.hookimpl(tryfirst=True)  # The groups are read by another such hook.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests stay together, and put first those that take longest."""
    groups = {item: _group(item.path.relative_to(config.rootpath)) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: groups[item] != "engines")


def _group(path: Path) -> str:
    return "engines" if _is_within(path, ENGINES) else str(path)


def _is_within(path: Path, folders: Sequence[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
