"""A cache that serves is observed without delay: overload lowers the sample, a failure ends the estimate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kvtier import Settings
from kvtier.cache import ModelCache
from kvtier.events import AnswerEnd, PromptLookup
from kvtier.instance import Instance
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.answers import report_of
from kvtier.observability.whatif.estimate import Estimate
from kvtier.observability.whatif.estimator import BUDGET, HALVINGS, Estimator
from kvtier.pipeline.query import Expected, Query
from kvtier.settings import DEFAULT_EVICTION
from kvtier.tiers.planner import FIRST
from tests.observability.whatif.observing import PLUGINS, chats, estimate_of, settings_of
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without a pause, and all the time that they take: a slow machine is no reason to fail."""
    monkeypatch.setattr("kvtier.observability.whatif.estimator.REPORT_SECONDS", 0.0)
    monkeypatch.setattr("kvtier.observability.whatif.estimator.BUDGET", 1.0)


TOKEN_BYTES, CHUNK_TOKENS = 64, 16
CHUNK_OBJECT_BYTES = object_bytes(TOKEN_BYTES * CHUNK_TOKENS)


@asynccontextmanager
async def opened(
    chunks: int = 300, eviction: str = DEFAULT_EVICTION, **more: Any
) -> AsyncIterator[tuple[Instance, ModelCache]]:
    tiers = [{"name": "ram", "type": "cpu", "capacity": chunks * CHUNK_OBJECT_BYTES, "eviction": eviction}]
    settings = Settings(tiers=tiers, chunk_tokens=CHUNK_TOKENS, plugins=[], **more)
    async with Instance.open(settings, plugins=PLUGINS) as instance:
        yield instance, instance.cache.model("model", token_bytes=TOKEN_BYTES)


def tokens_of(prompt: list[int]) -> list[int]:
    return [number for number in prompt for _ in range(CHUNK_TOKENS)]


async def serve(model: ModelCache, prompt: list[int]) -> None:
    tokens = tokens_of(prompt)
    rows = bytearray(len(tokens) * TOKEN_BYTES)
    if await model.retrieve(tokens, rows) < len(tokens):
        await model.store(tokens, rows)


def chunks_of(instance: Instance) -> int:
    report = instance.what_if()
    return 0 if report is None else report.chunks


@pytest.mark.parametrize("eviction", ["lru", DEFAULT_EVICTION])
async def test_estimate_of_today_is_the_measured_hit_rate(eviction: str) -> None:
    prompts = chats(150, 8)
    async with opened(eviction=eviction) as (instance, model):
        served = 0
        for number, prompt in enumerate(prompts, 1):
            await serve(model, prompt)
            served += len(prompt)
            # An estimate that falls behind on a busy machine would be made of a smaller sample.
            if number % 25 == 0 or number == len(prompts):
                await until(lambda: chunks_of(instance) == served)  # noqa: B023 - called at once
        report = instance.what_if()
    assert report is not None
    assert (report.sampled, report.sampling, report.dropped) == (report.chunks, 1.0, 0)
    [curve] = report.tiers
    assert (curve.tier, curve.policy) == ("ram", eviction)
    assert report.measured_hit_rate is not None
    assert 0.1 < report.measured_hit_rate < 0.9
    assert curve.hit_rate == pytest.approx(report.measured_hit_rate, abs=0.02)
    assert {change.policy for change in report.changes} == {None, "lru", "arc", "resume"} - {eviction}


@pytest.mark.parametrize("eviction", ["lru", "arc", DEFAULT_EVICTION])
async def test_chunks_that_were_stored_without_a_lookup_are_hits_later(eviction: str) -> None:
    """Those of an answer: the next turn of the chat looks them up for the first time."""
    async with opened(eviction=eviction) as (instance, model):
        for first in range(0, 100, 10):
            prompt = list(range(first, first + 10))
            tokens = tokens_of(prompt)
            await model.store(tokens, bytearray(len(tokens) * TOKEN_BYTES))
            await serve(model, prompt)
        await until(lambda: chunks_of(instance) == 100)
        report = instance.what_if()
    assert report is not None
    assert report.measured_hit_rate == 1.0
    # The very first chunks were stored before the size of a chunk was known.
    assert report.tiers[0].hit_rate == pytest.approx(0.9)


async def test_repeated_and_local_lookups_do_not_count() -> None:
    seen: list[PromptLookup] = []
    async with opened() as (instance, model):
        instance.cache.observe_lookup = seen.append
        prompt = tokens_of([1, 2, 3])
        await serve(model, [1, 2, 3])
        keys, expected = model.keys(prompt), Expected(model.namespace, [CHUNK_OBJECT_BYTES] * 3)
        instance.cache.look_up(Query(keys, len(prompt), repeated=True), expected).release()
        instance.cache.look_up(Query(keys, len(prompt), local=True), expected).release()
        instance.cache.look_up(Query(keys)).release()
        instance.cache.look_up(Query(keys, len(prompt), compute_seconds=2.0 * len(keys)), expected).release()
    assert [(lookup.found, lookup.compute_seconds) for lookup in seen] == [(0, 0.0), (3, 2.0)]
    assert {(lookup.chunk_bytes, lookup.chunk_tokens) for lookup in seen} == {
        (CHUNK_OBJECT_BYTES, CHUNK_TOKENS)
    }


async def test_it_can_be_switched_off() -> None:
    async with opened(whatif={"enabled": False}) as (instance, model):
        await serve(model, [1, 2, 3])
        assert instance.what_if() is None
        assert instance.cache.observe_lookup is None
        assert instance.cache.observe_answer_end is None


async def test_ends_of_answers_reach_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order with lookups."""
    seen: list[object] = []
    monkeypatch.setattr(Estimate, "answer_ended", lambda _, end: seen.append(end))
    monkeypatch.setattr(Estimate, "observe", lambda _, lookup: seen.append(lookup))
    async with opened() as (instance, model):
        await serve(model, [1, 2, 3])
        assert instance.cache.observe_answer_end is not None
        end = AnswerEnd(time.monotonic(), model.keys(tokens_of([1, 2, 3]))[-1], (1, 2))
        instance.cache.observe_answer_end(end)
        await until(lambda: len(seen) == 2)
    assert isinstance(seen[0], PromptLookup)
    assert seen[0].keys[-1] == end.key
    assert seen[1] == end


async def test_failure_warns_once_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Estimate, seen: PromptLookup) -> None:
        raise RuntimeError("no such chunk")

    monkeypatch.setattr(Estimate, "observe", fail)
    async with opened() as (instance, model):
        await serve(model, [1, 2, 3])
        await until(lambda: (report := instance.what_if()) is not None and report.stopped)
        await serve(model, [1, 2, 3])
        report = instance.what_if()
    assert report is not None
    assert report.stopped == "RuntimeError: no such chunk"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["whatif: the estimate has stopped, serving goes on: RuntimeError: no such chunk"]


def lookup_of(chunks: int) -> PromptLookup:
    return PromptLookup(1.0, chunk_keys(range(chunks)), 1 << 20, 256, 0)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each call has halved the sample."""
    lowered: list[int] = []
    monkeypatch.setattr(Estimate, "lower", lambda _, halvings: lowered.append(halvings))
    return lowered


async def test_overload_drops_lookups_and_lowers_the_sample(
    monkeypatch: pytest.MonkeyPatch, lowered: list[int]
) -> None:
    stored: list[Sequence[ChunkKey]] = []
    monkeypatch.setattr(Estimate, "stored", lambda _, keys: stored.append(keys))
    estimator = Estimator(estimate_of(settings_of({"chunks": 2000})))
    for _ in range(10):
        estimator.observe_lookup(lookup_of(10_000))
    dropped = estimator.report().dropped
    assert 0 < dropped < 10
    estimator.changed(FIRST, chunk_keys(range(20_000)), [])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(estimator.run)
        await until(lambda: estimator.report().chunks == (10 - dropped) * 10_000)
        assert lowered
        assert not stored, "there was no room for them either"
        estimator.observe_lookup(lookup_of(100))
        estimator.changed(FIRST, chunk_keys(range(20_000)), [])
        await until(lambda: stored)
        tasks.cancel_scope.cancel()
    assert estimator.report().dropped == dropped


def test_sample_is_lowered_as_often_as_it_is_behind(
    monkeypatch: pytest.MonkeyPatch, lowered: list[int]
) -> None:
    monkeypatch.setattr("kvtier.observability.whatif.estimator.SLICE_SECONDS", -1.0)  # Nothing is processed.
    estimator = Estimator(estimate_of(settings_of({"chunks": 2000})))

    for _ in range(16):
        estimator.observe_lookup(lookup_of(100))
    estimator._process()
    assert not lowered, "nothing has waited for long"
    monkeypatch.setattr("kvtier.observability.whatif.estimator.MAX_BEHIND_SECONDS", 0.0)
    report = estimator.report()
    assert (report.looked_up, report.chunks, report.observed, report.dropped) == (1600, 0, 0.0, 0)
    assert report.behind_seconds > 0
    estimator._process()
    assert lowered == [HALVINGS], "it has processed nothing"
    estimator._process()
    assert lowered == [HALVINGS], "what waits has come while the sample was larger"
    monkeypatch.setattr("kvtier.observability.whatif.estimator.SLICE_SECONDS", 60.0)
    estimator._process()
    assert (estimator.report().observed, estimator.report().behind_seconds) == (1.0, 0.0)
    # As many come as it processes.
    monkeypatch.setattr("kvtier.observability.whatif.estimator.SLICE_SECONDS", -1.0)
    for _ in range(16):
        estimator.observe_lookup(lookup_of(100))
    estimator._process()
    assert lowered == [HALVINGS, 2]


async def test_lookups_are_processed_and_answers_are_made_in_a_thread_and_only_if_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take milliseconds: none for the event loop, and no more than one in an interval."""
    # Longer than the test on any machine.
    monkeypatch.setattr("kvtier.observability.whatif.estimator.REPORT_SECONDS", 3600.0)
    observe, observing, threads = Estimate.observe, set[int](), list[int]()

    def note(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return report_of(*arguments)

    def note_lookup(self: Estimate, seen: PromptLookup) -> None:
        observing.add(threading.get_ident())
        observe(self, seen)

    monkeypatch.setattr(Estimate, "observe", note_lookup)
    async with opened() as (instance, model):
        monkeypatch.setattr("kvtier.observability.whatif.estimator.report_of", note)
        for first in range(5):
            await serve(model, [first, 10, 11])
            await until(lambda: instance.what_if() is not None)
        await until(lambda: (report := instance.what_if()) is not None and not report.behind_seconds)
        assert len(threads) == 1
        monkeypatch.setattr("kvtier.observability.whatif.estimator.REPORT_SECONDS", 0.0)
        await until(lambda: chunks_of(instance) == 15)
    assert len(threads) == 2
    assert threading.get_ident() not in {*threads, *observing}


async def test_thread_waits_until_its_time_is_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("kvtier.observability.whatif.estimator.anyio.sleep", sleep)
    monkeypatch.setattr("kvtier.observability.whatif.estimator.BUDGET", BUDGET)
    estimator = Estimator(estimate_of(settings_of({"chunks": 10})))
    await estimator._pace(0.05)
    await estimator._pace(0.01)
    assert waits[0] == 0
    assert 1.0 < waits[1] <= 2.0
