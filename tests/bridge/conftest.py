"""Fixtures of a real ``kvtier serve``, and of one in the event loop of a test."""

from __future__ import annotations

from importlib import import_module

import pytest

from kvtier.plugins import Plugins
from tests.rigs.bridges import _close_bridges, start

__all__ = ["_close_bridges", "start"]


@pytest.fixture(scope="session", autouse=True)
def _imported_modules() -> None:
    """Import slow modules up front: they would block the event loop of the first test for a second."""
    import_module("kvtier.peers.kv_transfer")
    import_module("kvtier.peers.server")
    Plugins.load([])
