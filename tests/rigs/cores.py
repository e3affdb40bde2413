"""The same computation with the native core and with the Python code that stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from kvtier import native

ResultT = TypeVar("ResultT")


def with_each_core(compute: Callable[[], ResultT]) -> tuple[ResultT, ResultT]:
    """Return the results with the native core, if it is built, and without it."""
    results = []
    for available in (native.available(), False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "available", lambda now=available: now)
            results.append(compute())
    return results[0], results[1]
