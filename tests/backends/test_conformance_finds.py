"""The conformance suite finds what is broken, and lets pass what is not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.base import Backend
from kvtier.testing.backend import BackendConformance
from tests.backends import broken
from tests.backends.broken import Suite

pytestmark = pytest.mark.anyio

CANCELLED = {"through": "task", "lag": 0}

FINDS: list[tuple[type[Backend], str, dict[str, Any]]] = [
    (broken.AnswersBackwards, "test_answers_come_in_the_order_of_the_question", {}),
    (broken.RaisesWhatIsMissing, "test_a_batch_that_succeeds_in_part", {}),
    (broken.NeverReplaces, "test_put_replaces", {"size": 6000}),
    (broken.FillsInPart, "test_a_value_of_another_length_is_a_miss", {"size": 20_000}),
    (broken.FillsInPart, "test_a_value_of_another_length_is_a_miss", {"size": 1}),
    (broken.KeepsTheMemory, "test_put_takes_a_copy", {}),
    (broken.DeletesNothing, "test_delete", {}),
    (broken.OneMissSpoilsAll, "test_a_batch_that_succeeds_in_part", {}),
    (broken.WritesInPlace, "test_equal_keys_at_once_are_never_a_mix", {"size": 4000}),
    (broken.WritesAfterTheEnd, "test_cancelled_at_every_await", {"method": "get", **CANCELLED}),
    (broken.LosesWhatItReplaces, "test_cancelled_at_every_await", {"method": "put", **CANCELLED}),
    (broken.SwallowsCancellation, "test_cancelled_at_every_await", {"method": "put", **CANCELLED}),
    (broken.ForgetsWhenClosed, "test_reopening", {}),
    (broken.TellsTwice, "test_scanning", {}),
    (broken.CannotBeEmpty, "test_empty_batches", {}),
    (broken.LeaksALease, "test_holds_what_was_put", {}),
]


async def run(suite: Suite, test: str, path: Path, arguments: dict[str, Any]) -> None:
    function = getattr(suite, test)
    if "backend" not in inspect.signature(function).parameters:
        await function(path, **arguments)
        return
    async with suite.opened(path) as backend:
        await function(backend, **arguments)


@pytest.mark.parametrize(
    ("kind", "test", "arguments"), FINDS, ids=[f"{kind.__name__}-{test}" for kind, test, _ in FINDS]
)
async def test_it_finds(kind: type[Backend], test: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    await run(Suite(broken.DictBackend), test, tmp_path / "sound", arguments)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        await run(Suite(kind), test, tmp_path / "broken", arguments)


@pytest.mark.loop_may_block("a dictionary copies where it is called")
class TestDict(BackendConformance):
    persistent = True

    def make_backend(self, path: Path) -> Backend:
        self.folder = getattr(self, "folder", {})
        return broken.DictBackend(self.folder)
