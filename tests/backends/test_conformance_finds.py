"""The conformance suite fails for each faulty backend, and passes for a correct one."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.base import Backend
from kvtier.testing.backend import BackendConformance
from tests.rigs import broken_backends as broken
from tests.rigs.broken_backends import Suite

pytestmark = pytest.mark.anyio

CANCELLED = {"through": "task", "lag": 0}

FAULTS: list[tuple[type[Backend], str, dict[str, Any]]] = [
    (broken.ReversesResults, "test_answers_come_in_the_order_of_the_question", {}),
    (broken.RaisesOnMiss, "test_a_batch_that_succeeds_in_part", {}),
    (broken.NeverOverwrites, "test_put_replaces", {"size": 6000}),
    (broken.ReadsPartially, "test_a_value_of_another_length_is_a_miss", {"size": 20_000}),
    (broken.ReadsPartially, "test_a_value_of_another_length_is_a_miss", {"size": 1}),
    (broken.KeepsCallerMemory, "test_put_takes_a_copy", {}),
    (broken.IgnoresDelete, "test_delete", {}),
    (broken.FailsBatchOnMiss, "test_a_batch_that_succeeds_in_part", {}),
    (broken.WritesInPlace, "test_equal_keys_at_once_are_never_a_mix", {"size": 4000}),
    (broken.WritesAfterCancellation, "test_cancelled_at_every_await", {"method": "get", **CANCELLED}),
    (broken.DeletesBeforeReplacing, "test_cancelled_at_every_await", {"method": "put", **CANCELLED}),
    (broken.ClearsOnCancellation, "test_cancelled_at_every_await", {"method": "put", **CANCELLED}),
    (broken.ClearsOnClose, "test_reopening", {}),
    (broken.ScansTwice, "test_scanning", {}),
    (broken.MishandlesEmptyBatch, "test_empty_batches", {}),
    (broken.LeaksLease, "test_holds_what_was_put", {}),
]


async def run(suite: Suite, test: str, path: Path, arguments: dict[str, Any]) -> None:
    function = getattr(suite, test)
    if "backend" not in inspect.signature(function).parameters:
        await function(path, **arguments)
        return
    async with suite.opened(path) as backend:
        await function(backend, **arguments)


@pytest.mark.parametrize(
    ("kind", "test", "arguments"), FAULTS, ids=[f"{kind.__name__}-{test}" for kind, test, _ in FAULTS]
)
async def test_suite_detects_fault(
    kind: type[Backend], test: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    await run(Suite(broken.ListedBackend), test, tmp_path / "correct", arguments)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        await run(Suite(kind), test, tmp_path / "broken", arguments)


@pytest.mark.loop_may_block("the dictionary copies on the event loop")
class TestDict(BackendConformance):
    persistent = True

    def make_backend(self, path: Path) -> Backend:
        self.folder = getattr(self, "folder", {})
        return broken.ListedBackend(self.folder)
