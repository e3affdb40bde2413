"""A server for a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from kvtier.testing.servers import Server

ServerT = TypeVar("ServerT", bound=Server)


@contextmanager
def running(kind: type[ServerT], folders: pytest.TempPathFactory) -> Iterator[ServerT]:
    """Run a server within the block. The test is skipped if it is not installed."""
    if reason := kind.missing():
        pytest.skip(reason)
    with kind(folders.mktemp("s")) as server:
        yield server
