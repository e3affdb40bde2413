"""Two workers share the tests: one runs the real vLLM engines, the other what is left, and both what remains.

Files stay whole, so that what a module's tests share is made once. Engines stay together and come first: they
take the longest, and two at once would take each other's processors.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ENGINES = ("tests/vllm/", "tests/integrations/", "tests/demo/")


class _Sharing(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """What stays together with this test."""
        path = nodeid.partition("::")[0]
        return "engines" if path.startswith(ENGINES) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Sharing:  # noqa: ANN401 - as xdist has it
    """How the tests are shared, where there are several workers."""
    return _Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first those that take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))
