from __future__ import annotations

from collections.abc import Iterator

import pytest

from .endpoints import open_wires


@pytest.fixture(autouse=True)
def _closed_wires() -> Iterator[None]:
    yield
    while open_wires:
        open_wires.pop().close()
