"""Fixtures of the settings tests: a clean environment and settings files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVTIER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a settings file."""

    def write(text: str) -> Path:
        path = tmp_path / "kvtier.yaml"
        path.write_text(text)
        return path

    return write
