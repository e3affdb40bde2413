"""Estimates of capacities and policies agree with caches in full size."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest

from kvtier.events import PromptLookup
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.observability.whatif import answers
from kvtier.observability.whatif.estimate import MAX_ANSWERS, Estimate
from kvtier.observability.whatif.miniature import Miniature
from kvtier.observability.whatif.report import Change, Report, point_at
from tests.observability.whatif.observing import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    agents,
    chats,
    estimate_of,
    observe,
    observe_with_ends,
    real_hit_rate,
    real_hit_rate_with_ends,
    settings_of,
)

PROMPTS = chats(500, 25)
FULL = {"high_watermark": 1.0, "low_watermark": 1.0}


def report_of(estimate: Estimate, now: float = float(len(PROMPTS))) -> Report:
    return answers.report_of(estimate, now, 0.0, 0)


def estimated(estimate: Estimate, tier: int, factor: float) -> float:
    curve = report_of(estimate).tiers[tier]
    point = point_at(curve, round(factor * curve.capacity_bytes))
    assert point is not None
    return point.hit_rate


def change_of(report: Report, policy: str) -> Change:
    [change] = [change for change in report.changes if change.policy == policy]
    return change


@pytest.mark.parametrize("watermarks", [FULL, {}, {"high_watermark": 0.8, "low_watermark": 0.5}])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_without_sampling_the_hit_rate_of_a_tier_is_that_of_the_cache(
    watermarks: dict[str, Any], factor: float
) -> None:
    estimate = estimate_of(settings_of({"chunks": 250, **watermarks}, sample_chunks=1 << 13))
    observe(estimate, PROMPTS)
    real = real_hit_rate(settings_of({"chunks": int(250 * factor), **watermarks}), PROMPTS)
    assert estimated(estimate, 0, factor) == pytest.approx(real, abs=0.001 if watermarks is FULL else 0.01)


def test_what_a_codec_would_bring() -> None:
    """Of a tier that has none, and is not the one that engines copy from."""
    estimate = estimate_of(settings_of({"chunks": 50, **FULL}, {"chunks": 250, **FULL}))
    observe(estimate, PROMPTS)
    [change] = [change for change in report_of(estimate).changes if change.codec is not None]
    assert (change.tier, change.codec) == ("t1", "lossless")
    real = real_hit_rate(settings_of({"chunks": 50, **FULL}, {"chunks": 350, **FULL}), PROMPTS)
    assert change.hit_rate == pytest.approx(real, abs=0.025)
    assert change.gained == pytest.approx(change.hit_rate - estimated(estimate, 1, 1.0))
    assert change.gained > 0.05
    estimate = estimate_of(settings_of({"chunks": 50}, {"chunks": 250, "codec": "lossless"}))
    observe(estimate, PROMPTS)
    assert not [change for change in report_of(estimate).changes if change.codec is not None]


@pytest.mark.parametrize("chunks", [150, 600])
def test_tier_that_gets_every_chunk_includes_the_faster_ones(chunks: int) -> None:
    """The first tier changes nothing but where chunks are found, unless it is the larger one."""
    estimate = estimate_of(settings_of({"chunks": 150, **FULL}, {"chunks": 600, **FULL}))
    observe(estimate, PROMPTS)
    real = real_hit_rate(settings_of({"chunks": 150, **FULL}, {"chunks": chunks, **FULL}), PROMPTS)
    if chunks == 600:
        assert estimated(estimate, 1, 1.0) == pytest.approx(real, abs=0.001)
    memory, disk = report_of(estimate).tiers
    assert len({round(point.hit_rate, 6) for point in memory.points}) == 1
    alone = real_hit_rate(settings_of({"chunks": 150, **FULL}), PROMPTS)
    [today] = [point for point in memory.points if point.capacity_bytes == memory.capacity_bytes]
    assert today.fast_hit_rate == pytest.approx(alone, abs=0.001)
    assert disk.points[0].hit_rate == pytest.approx(alone, abs=0.001)


def test_sampling_error_is_small() -> None:
    prompts = chats(2000, 100)
    estimate = estimate_of(settings_of({"chunks": 1000}, sample_chunks=1024))
    observe(estimate, prompts)
    assert estimate.distances.rate < 0.5
    for factor in (0.5, 1.0, 2.0):
        real = real_hit_rate(settings_of({"chunks": int(1000 * factor)}), prompts)
        assert estimated(estimate, 0, factor) == pytest.approx(real, abs=0.02)


@pytest.mark.parametrize("policy", ["arc", "resume"])
def test_other_policy_gains_what_a_cache_with_it_does(policy: str) -> None:
    estimate = estimate_of(settings_of({"chunks": 250}, sample_chunks=1024))
    observe(estimate, PROMPTS)
    before = real_hit_rate(settings_of({"chunks": 250}), PROMPTS)
    after = real_hit_rate(settings_of({"chunks": 250, "eviction": policy}), PROMPTS)
    assert policy != "resume" or abs(after - before) > 0.02
    change = change_of(report_of(estimate), policy)
    assert change.gained == pytest.approx(after - before, abs=0.02)


@pytest.mark.parametrize("tiers", [
    [{"chunks": 250, "eviction": "arc"}],
    [{"chunks": 100}, {"chunks": 150, "write": "on_evict"}],
])  # fmt: skip
def test_what_distances_do_not_tell_is_tried_in_miniature(tiers: list[dict[str, Any]]) -> None:
    estimate = estimate_of(settings_of(*tiers, sample_chunks=2048))
    assert not estimate.by_distance
    observe(estimate, PROMPTS)
    last = len(tiers) - 1
    for factor in (0.5, 1.0, 2.0):
        changed = [*tiers[:last], {**tiers[last], "chunks": int(tiers[last]["chunks"] * factor)}]
        real = real_hit_rate(settings_of(*changed), PROMPTS)
        assert estimated(estimate, last, factor) == pytest.approx(real, abs=0.02)


@pytest.mark.parametrize("policy", ["resume", "lru"])
def test_ends_of_answers_count_as_in_the_cache(policy: str) -> None:
    """Also for what a policy would gain that learns from them."""
    prompts = agents(600)
    estimate = estimate_of(settings_of({"chunks": 80, "eviction": policy, **FULL}, sample_chunks=1 << 13))
    observe_with_ends(estimate, prompts)
    real = real_hit_rate_with_ends(settings_of({"chunks": 80, "eviction": "resume", **FULL}), prompts)
    hit_rate = estimated(estimate, 0, 1.0)
    if policy == "lru":
        hit_rate += change_of(report_of(estimate), "resume").gained
    assert hit_rate == pytest.approx(real, abs=0.03)


def test_answers_that_are_waited_for_are_bounded() -> None:
    estimate = estimate_of(settings_of({"chunks": 250}))
    observe(estimate, chats(3000, 100))
    assert len(estimate._answers) <= MAX_ANSWERS


def test_tenants_are_tried_in_miniature() -> None:
    assert not estimate_of(settings_of({"chunks": 250}, tenants={"team": {"max": 0.5}})).by_distance
    assert estimate_of(settings_of({"chunks": 250})).by_distance


def test_policies_are_tried_where_they_matter() -> None:
    def tried(*tiers: dict[str, Any]) -> set[tuple[int, str | None]]:
        estimate = estimate_of(settings_of(*tiers))
        observe(estimate, PROMPTS[:1])
        return {(trial.tier, trial.policy) for trial in estimate.trials}

    assert tried({"chunks": 9}, {"chunks": 90}) == {(1, "arc"), (1, "resume")}
    assert tried({"chunks": 90}, {"chunks": 9}).issuperset({(0, "arc"), (1, "arc")})


def test_useful_capacity_has_almost_the_hits_of_today() -> None:
    estimate = estimate_of(settings_of({"chunks": 4000, **FULL}, sample_chunks=1 << 13))
    observe(estimate, PROMPTS)
    [curve] = report_of(estimate).tiers
    assert curve.useful_bytes < curve.capacity_bytes / 2
    useful = real_hit_rate(settings_of({"chunks": curve.useful_bytes // CHUNK_BYTES, **FULL}), PROMPTS)
    assert useful == pytest.approx(curve.hit_rate - 0.005, abs=0.001)


def test_changes_are_sorted_by_what_they_gain_in_gpu_time() -> None:
    estimate = estimate_of(settings_of({"chunks": 250}))
    for at, prompt in enumerate(PROMPTS):
        keys = chunk_keys(prompt)
        estimate.observe(PromptLookup(float(at), keys, CHUNK_BYTES, CHUNK_TOKENS, 1, CHUNK_TOKENS / 10_000.0))
    report = report_of(estimate)
    gained = [change.gained for change in report.changes]
    assert gained == sorted(gained, reverse=True)
    assert gained[0] > 0 > gained[-1]
    asked = sum(map(len, PROMPTS))
    assert report.measured_hit_rate == pytest.approx(len(PROMPTS) / asked)
    assert report.prefill_tokens_per_second == pytest.approx(10_000)
    tokens_a_day = asked * CHUNK_TOKENS / len(PROMPTS) * 86_400
    best = report.changes[0]
    assert best.gpu_seconds_a_day == pytest.approx(best.gained * tokens_a_day / 10_000)


def test_old_traffic_counts_less() -> None:
    """After prompts that are never repeated, those of a chat are repeated each time, for four half-lives."""
    settings = settings_of({"chunks": 250})
    settings = settings.model_copy(update={"whatif": settings.whatif.model_copy(update={"half_life": 500.0})})
    estimate = estimate_of(settings)
    for at in range(2500):
        prompt = range(at * 10, at * 10 + 10) if at < 500 else range(10)
        estimate.observe(
            PromptLookup(float(at), chunk_keys(prompt), CHUNK_BYTES, CHUNK_TOKENS, 10 * (at > 500))
        )
    report = report_of(estimate, 2500.0)
    assert report.chunks == 25_000
    assert report.measured_hit_rate is not None
    assert report.measured_hit_rate > 0.93
    assert report.tiers[0].hit_rate == pytest.approx(report.measured_hit_rate, abs=0.005)


def test_smaller_sample_keeps_the_answers() -> None:
    estimate = estimate_of(settings_of({"chunks": 250}))
    observe(estimate, PROMPTS[:300])
    for _ in range(8):
        estimate.lower()
    assert estimate.distances.rate < 1
    assert estimate.base is not None
    observe(estimate, PROMPTS[300:])
    assert len(estimate.distances) <= 4096
    real = real_hit_rate(settings_of({"chunks": 250}), PROMPTS)
    assert report_of(estimate).tiers[0].hit_rate == pytest.approx(real, abs=0.05)


def test_samples_that_are_lowered_several_times_at_once_are_restarted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart takes as long as hundreds of lookups."""
    estimates = [estimate_of(settings_of({"chunks": 250})) for _ in range(2)]
    for estimate in estimates:
        observe(estimate, PROMPTS[:100])
    one, other = estimates
    for _ in range(12):
        one.lower()
    made: list[Miniature] = []

    def make(*arguments: Any) -> Miniature:
        made.append(Miniature(*arguments))
        return made[-1]

    monkeypatch.setattr("kvtier.observability.whatif.estimate.Miniature", make)
    other.lower(12)
    assert made == [other.base, *other.trials.values()], "each once"
    for estimate in estimates:
        observe(estimate, PROMPTS[100:])
    assert report_of(one) == report_of(other)


def test_chunks_of_another_size_take_over_the_miniature_caches() -> None:
    estimate = estimate_of(settings_of({"chunks": 100}))
    observe(estimate, PROMPTS[:10])
    for at in range(1001):
        estimate.observe(PromptLookup(10.0 + at, chunk_keys([at]), CHUNK_BYTES // 2, CHUNK_TOKENS, 0))
    first = estimate.base
    estimate.observe(PromptLookup(2000.0, chunk_keys([1]), CHUNK_BYTES // 2, CHUNK_TOKENS, 0))
    assert first is estimate.base
    assert estimate.trials


def test_memory_is_bounded() -> None:
    """Also with an unlimited number of chunks that are used once."""
    estimate = estimate_of(settings_of({"chunks": 1_000_000}, sample_chunks=1024))
    observe(estimate, ([at] for at in range(10_000)))
    gc.collect()
    tracemalloc.start()
    try:
        observe(estimate, ([at] for at in range(10_000, 30_000)))
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(estimate.distances) <= 1024
    assert grown < 2 << 20


def test_report_before_the_first_lookup_is_empty() -> None:
    report = report_of(estimate_of(settings_of({"chunks": 10})), 5.0)
    assert (report.chunks, report.measured_hit_rate, report.seconds) == (0, None, 0.0)
    assert [curve.hit_rate for curve in report.tiers] == [0.0]
