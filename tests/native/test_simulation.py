"""Native functions of the simulation: bad input."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvtier import native

pytestmark = pytest.mark.skipif(not native.available(), reason=native.summary())


def test_columns_that_do_not_fit_together_are_refused() -> None:
    core, ids, ends, order = native.core, array("Q", [0, 1]), array("Q", [1, 2]), range(2)
    chunks, uses = array("I", [0, 1]), array("I", [2, 2])
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: core.number_chunks(ids, array("Q", [1]), 4, chunks)),
        (ValueError, lambda: core.number_chunks(ids, ends, 4, array("I", [0]))),
        (TypeError, lambda: core.number_chunks(chunks, ends, 4, chunks)),
        (ValueError, lambda: core.next_uses(chunks, ends, order, 2, array("I", [0]))),
        (IndexError, lambda: core.next_uses(chunks, ends, order, 1, uses)),
        (IndexError, lambda: core.next_uses(chunks, ends, [2], 2, uses)),
        (IndexError, lambda: core.belady_hits(array("I", [0, 2]), ends, order, 1, 0, None)),
        (IndexError, lambda: core.belady_hits(uses, array("Q", [1, 3]), order, 1, 0, None)),
        (TypeError, lambda: core.belady_hits(uses, ends, order, -1, 0, None)),
        (ZeroDivisionError, lambda: core.belady_hits(uses, ends, order, 1, 1, lambda count: count // 0)),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert core.number_chunks(ids, ends, 4, chunks) == (2, 2, 2)
    assert core.belady_hits(uses, ends, order, 1, 0, None) == 0
