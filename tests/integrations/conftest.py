"""Tests of the connector with vLLM's own classes, and without engines: ``pytest tests/integrations``.

They need a run of their own (``tools/run_tests.py``), because vLLM changes the interpreter that imports it:
its environment variables, its logging, torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm import instruction_set

os.environ.update(VLLM_ENVIRONMENT)  # Before any test imports vLLM.
instruction_set.limit()


def pytest_configure(config: pytest.Config) -> None:
    # vLLM and torch cause warnings themselves.
    config.addinivalue_line("filterwarnings", "ignore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integrations/" in item.nodeid:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    """An engine that is connected to a scripted cache process, before any request."""
    from tests.rigs.scripted_scheduling import scripted_engine

    with scripted_engine(tmp_path / "socket") as engine:
        yield engine


@pytest.fixture
def cache(engine: Any) -> Any:
    """The scripted cache process."""
    return engine.cache
