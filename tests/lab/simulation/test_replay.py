"""Simulated caches: exact hits of small traces, and of tiny models of LRU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.eviction import EvictionPolicy
from kvtier.catalog.hints import ChunkHints
from kvtier.errors import KVTierError
from kvtier.lab.simulation.belady import belady_hits, next_uses
from kvtier.lab.simulation.replay import MAX_IDLE_SECONDS, Model
from kvtier.lab.simulation.trace import Trace, chunk_keys
from kvtier.memory.keys import ChunkKey
from kvtier.observability.recording.reader import TraceRequest
from kvtier.observability.whatif.simulated_cache import SimulatedCache, configured, one_tier
from kvtier.settings import LocalTierSettings, Settings
from kvtier.settings.tenants import TenantSettings
from tests.lab.simulation.making import (
    CHUNK_TOKENS,
    FULL,
    MODEL,
    PLUGINS,
    in_one_tier,
    in_tiers,
    size_of,
    trace_of,
    two_tiers,
)

POLICIES = PLUGINS.names("kvtier_eviction_policies")

Prompts = list[list[int]]


def chained(words: Sequence[Sequence[int]]) -> Prompts:
    """Return prompts with equal chunks for equal prefixes of words."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        [numbers.setdefault(tuple(word[: end + 1]), len(numbers)) for end in range(len(word))]
        for word in words
    ]


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40).map(chained)


def lru_hits(prompts: Prompts, capacity: int) -> int:
    """Return the hits of LRU, with the coldest chunk first in a list."""
    order: list[int] = []
    hits = 0
    for prompt in prompts:
        found = next((at for at, chunk in enumerate(prompt) if chunk not in order), len(prompt))
        hits += found
        for chunk in reversed(prompt[:found]):
            order.remove(chunk)
            order.append(chunk)
        missing = prompt[found:]
        while len(order) > found and len(order) + len(missing) > capacity:
            order.pop(0)
        for at in range(found, min(len(prompt), found + capacity - len(order))):
            order.insert(order.index(prompt[at - 1]) if at else len(order), prompt[at])
    return hits


@given(PROMPTS, st.integers(1, 12))
def test_lru_has_the_hits_of_a_tiny_model(prompts: Prompts, capacity: int) -> None:
    assert in_one_tier(trace_of(*prompts), capacity).hits == lru_hits(prompts, capacity)


@given(PROMPTS, st.integers(1, 12), st.sampled_from(POLICIES))
def test_no_policy_exceeds_the_optimum(prompts: Prompts, capacity: int, policy: str) -> None:
    trace = trace_of(*prompts)
    assert in_one_tier(trace, capacity, policy).hits <= belady_hits(trace, capacity, next_uses(trace))


@pytest.mark.parametrize("policy", POLICIES)
def test_large_enough_cache_has_every_repeated_chunk(policy: str) -> None:
    trace = trace_of([1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3])
    outcome = in_one_tier(trace, 6, policy)
    assert (outcome.asked, outcome.hits) == (11, 5)
    assert outcome.saved_tokens == 5 * CHUNK_TOKENS
    assert (outcome.tiers[0].read_bytes, outcome.tiers[0].written_bytes) == (size_of(5), size_of(6))
    assert outcome.tiers[0].evicted == 0


def test_only_a_prefix_hits() -> None:
    # 3 and 2 leave, so that the third prompt finds 1 alone.
    outcome = in_one_tier(trace_of([1, 2, 3], [7, 8], [1, 2, 3]), 3)
    assert outcome.hits == 1


def test_prompt_larger_than_the_tier_is_stored_as_far_as_it_fits() -> None:
    outcome = in_one_tier(trace_of(range(10), range(10)), 4)
    assert outcome.hits == 4
    assert outcome.tiers[0].written_bytes == size_of(4)


def test_equal_runs_have_equal_results() -> None:
    trace = trace_of(*chained([[at % 3, at % 5, at % 2] for at in range(60)]))
    for policy in POLICIES:
        first, second = in_one_tier(trace, 7, policy, windows=4), in_one_tier(trace, 7, policy, windows=4)
        assert replace(first, seconds=0.0) == replace(second, seconds=0.0)


def test_windows_are_equal_parts_of_time() -> None:
    times = [0.0, 1.0, 2.0, 9.0, 10.0]
    requests = [TraceRequest(time=time, chunks=[1, 2], tokens=20) for time in times]
    outcome = in_one_tier(Trace.load("made", requests, CHUNK_TOKENS), 4, windows=3)
    assert outcome.windows == [2 / 3, None, 1.0]
    assert outcome.saved_tokens == 4 * 20, "the last chunk of a prompt may be shorter"


def test_hints_reach_the_policy() -> None:
    hints = ChunkHints(tenant="a", priority=5)
    requests = [TraceRequest(time=at, chunks=[1, 2], tokens=20, hints=hints) for at in (0.0, 1.0)]
    trace = Trace.load("made", requests, CHUNK_TOKENS)
    assert trace.hints == {0: hints, 1: hints}
    assert in_one_tier(trace, 4).hits == 2


def test_ttft_is_the_time_of_loading_and_computing() -> None:
    outcome = in_one_tier(trace_of([1, 2], [1, 2, 3]), 4)
    computed = 3 * CHUNK_TOKENS / MODEL.prefill_tokens_per_second
    assert outcome.ttft_seconds == pytest.approx((computed + size_of(2) / 20e9) / 2)


def test_deep_tokens_take_longer() -> None:
    """Behind 10 tokens, the next one takes twice as long: 10 to 30 take 20 and, for attention, 40 more."""
    model = Model(prefill_tokens_per_second=10.0, attention_tokens=10.0)
    assert model.prefill_seconds(30, 10) == pytest.approx((20 + (30 * 30 - 10 * 10) / 20) / 10)
    assert Model(prefill_tokens_per_second=10.0).prefill_seconds(30, 10) == 2.0
    assert model.prefill_seconds(30, 30) == 0.0


# The ends of answers.


def answered(*requests: tuple[float, Sequence[int], float]) -> Trace:
    """Return a trace of requests with their time, chunks and the seconds to the end of their answer."""
    rows = (
        TraceRequest(
            time=time,
            chunks=chunks,
            tokens=len(chunks) * CHUNK_TOKENS,
            seconds=seconds,
            signature=[len(chunks)] if seconds > 1 else [],
        )
        for time, chunks, seconds in requests
    )
    return Trace.load("made", rows, CHUNK_TOKENS)


def test_ends_are_reported_in_order_before_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, list[ChunkKey], Sequence[int]]] = []
    serve, ended = SimulatedCache.serve, SimulatedCache.answer_ended

    def record_serve(
        self: SimulatedCache, time: float, keys: list[ChunkKey], hints: ChunkHints | None
    ) -> int:
        seen.append((time, keys, "asked"))
        return serve(self, time, keys, hints)

    def record_end(
        self: SimulatedCache, time: float, keys: list[ChunkKey], signature: Sequence[int], hints: None
    ) -> None:
        seen.append((time, keys, signature))
        ended(self, time, keys, signature, hints)

    monkeypatch.setattr(SimulatedCache, "serve", record_serve)
    monkeypatch.setattr(SimulatedCache, "answer_ended", record_end)
    trace = answered(
        (0.0, [1, 2, 3], 5.0), (1.0, [4], 0.5), (2.0, [5], 0.0), (5.0, [1, 2, 3], 9.0), (6.0, [6], 0)
    )
    one, two, three, four = chunk_keys([1]), chunk_keys([4]), chunk_keys([5]), chunk_keys([6])
    long = chunk_keys([1, 2, 3])
    assert one == long[:1]
    outcome = in_one_tier(trace, 9)
    assert seen == [
        (0.0, long, "asked"),
        (1.0, two, "asked"),
        (1.5, two, ()),
        (2.0, three, "asked"),
        (5.0, long, [3]),
        (5.0, long, "asked"),
        (6.0, four, "asked"),
    ]
    assert outcome.ends == 2, "what ends after the last request is of no use"


def test_policies_are_told_the_last_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[int, Sequence[ChunkKey], float, Sequence[int]]] = []

    def ended(
        self: EvictionPolicy,
        rows: Sequence[int],
        keys: Sequence[ChunkKey],
        now: float,
        signature: Sequence[int],
    ) -> None:
        reported.append((len(rows), keys, now, signature))

    monkeypatch.setattr(EvictionPolicy, "answer_ended", ended)
    in_one_tier(answered((0.0, [1, 2, 3], 4.0), (0.5, [4], 1.0), (1.0, [5, 6], 0), (5.0, [7], 0)), 3)
    assert reported == [(1, chunk_keys([4]), 1.5, ()), (0, chunk_keys([2, 3]), 4.0, [3])]


@given(PROMPTS, st.integers(1, 12), st.floats(0, 30))
def test_ends_change_nothing_for_lru(prompts: Prompts, capacity: int, seconds: float) -> None:
    trace = answered(*((float(at), chunks, seconds) for at, chunks in enumerate(prompts)))
    reported, unreported = in_one_tier(trace, capacity), in_one_tier(trace.without_ends(), capacity)
    assert replace(reported, seconds=0.0, ends=0) == replace(unreported, seconds=0.0)
    assert reported.stored_again == 0


@given(PROMPTS, st.integers(1, 12), st.floats(0, 30), st.sampled_from(POLICIES))
def test_ends_keep_a_tier_within_its_capacity(
    prompts: Prompts, capacity: int, seconds: float, policy: str
) -> None:
    trace = answered(*((float(at), chunks, seconds) for at, chunks in enumerate(prompts)))
    outcome = in_one_tier(trace, capacity, policy)
    [ram] = outcome.tiers
    assert 0 <= ram.written_bytes - size_of(ram.evicted) <= size_of(capacity)
    assert size_of(outcome.asked - outcome.hits + outcome.stored_again) >= ram.written_bytes
    assert in_one_tier(trace.without_ends(), capacity, policy).ends == 0


# Several tiers.


def test_a_week_without_requests_is_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(SimulatedCache, "prefetch_ahead", lambda _, time: looks.append(time))
    week = 7 * 86400.0
    in_tiers(
        answered((0.0, [1], 20.0), (week, [2], 5000.0), (week + 6000, [1], 0)),
        two_tiers(2, 4, tmp_path, "through"),
    )
    assert looks[0] == 0.0
    assert looks == sorted(set(looks))
    assert not any(20.0 + MAX_IDLE_SECONDS < time < week for time in looks)
    assert sum(time >= week for time in looks) >= 2 * (MAX_IDLE_SECONDS + 1000)
    assert looks[-1] == week + 6000


def test_write_through_keeps_what_memory_evicts(tmp_path: Path) -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2])
    outcome = in_tiers(trace, two_tiers(2, 10, tmp_path, "through"))
    ram, disk = outcome.tiers
    assert (ram.hits, disk.hits, outcome.demoted) == (0, 2, 0)
    assert (disk.written_bytes, disk.read_bytes) == (size_of(4), size_of(2))
    assert ram.written_bytes == size_of(6), "four stored, two promoted"
    assert (ram.evicted, disk.evicted) == (4, 0)


def test_demotion_writes_what_memory_evicts(tmp_path: Path) -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2], [1, 2])
    outcome = in_tiers(trace, two_tiers(2, 10, tmp_path, "on_evict"))
    ram, disk = outcome.tiers
    assert (ram.hits, disk.hits, outcome.demoted) == (2, 2, 4)
    assert disk.written_bytes == size_of(4)


def test_tier_that_is_never_written_gets_nothing(tmp_path: Path) -> None:
    outcome = in_tiers(trace_of([1, 2], [3, 4], [1, 2]), two_tiers(2, 10, tmp_path, "never"))
    assert (outcome.hits, outcome.tiers[1].written_bytes) == (0, 0)


def test_lower_tier_evicts_as_well(tmp_path: Path) -> None:
    outcome = in_tiers(trace_of([1, 2], [3, 4], [5, 6], [1, 2]), two_tiers(2, 4, tmp_path, "through"))
    assert outcome.hits == 0
    assert outcome.tiers[1].evicted == 4


def test_prefix_of_a_lower_tier_that_memory_cannot_hold_is_a_miss(tmp_path: Path) -> None:
    # A disk keeps both halves, of which memory has room for two chunks.
    trace = trace_of([1, 2], [1, 2, 3, 4], [1, 2, 3, 4])
    outcome = in_tiers(trace, two_tiers(2, 10, tmp_path, "through"))
    assert outcome.hits == 4
    assert outcome.no_room == 0


def test_slow_tier_is_computed_instead(tmp_path: Path) -> None:
    trace = trace_of([1, 2], [3, 4], [1, 2])
    slow = replace(two_tiers(2, 10, tmp_path, "through"), gb_s=[20.0, 1e-6])
    outcome = in_tiers(trace, slow)
    assert (outcome.hits, outcome.computed_instead) == (0, 2)
    patient = slow.cache.prefetch.model_copy(update={"policy": "wait_complete"})
    waiting = replace(slow, cache=slow.cache.model_copy(update={"prefetch": patient}))
    assert in_tiers(trace, waiting).hits == 2


@given(PROMPTS, st.integers(1, 8), st.integers(1, 12), st.sampled_from(["through", "on_evict", "never"]))
def test_tiers_never_exceed_their_capacity_or_the_optimum(
    prompts: Prompts, memory: int, disk: int, write: str
) -> None:
    trace = trace_of(*prompts)
    outcome = in_tiers(trace, two_tiers(memory, disk, Path("unused"), write))
    assert sum(tier.hits for tier in outcome.tiers) == outcome.hits
    assert outcome.hits <= belady_hits(trace, memory + disk, next_uses(trace))
    for tier, chunks in zip(outcome.tiers, (memory, disk), strict=True):
        assert 0 <= tier.written_bytes - size_of(tier.evicted) <= size_of(chunks)


def test_tenants_keep_their_share() -> None:
    settings = Settings(
        tiers=[{"name": "ram", "type": "cpu", "capacity": size_of(4), **FULL}],
        tenants={"a": TenantSettings(share=0.5), "b": TenantSettings(max=0.5)},
    )
    prompts = [
        ("a", [1, 2]),
        *(("b", [10 * at, 10 * at + 1]) for at in range(1, 9)),
        ("a", [1, 2]),
    ]
    requests = [
        TraceRequest(time=float(at), chunks=chunks, tokens=len(chunks) * CHUNK_TOKENS, tenant=tenant)
        for at, (tenant, chunks) in enumerate(prompts)
    ]
    trace = Trace.load("made", requests, CHUNK_TOKENS)
    assert in_one_tier(trace, 4).hits == 0
    assert in_tiers(trace, configured(PLUGINS, settings, None, {})).hits == 2


def test_unknown_policy_and_useless_capacity_are_refused() -> None:
    with pytest.raises(KVTierError, match=r"eviction.*unknown.*'mru'.*lru"):
        one_tier(PLUGINS, "mru", size_of(1), {})
    with pytest.raises(KVTierError, match="use a size that holds many chunks"):
        one_tier(PLUGINS, "lru", 100, {})


def test_tier_with_a_codec_holds_more(tmp_path: Path) -> None:
    """As much more as the codec usually does, or as is given."""

    def capacity(codec: str, ratios: dict[str, float]) -> int:
        disk = {"name": "disk", "type": "disk", "path": str(tmp_path), "capacity": size_of(100)}
        tiers = [{"name": "ram", "type": "cpu", "capacity": size_of(2)}, {**disk, "codec": codec}]
        found = configured(PLUGINS, Settings(tiers=tiers), None, {}, ratios).settings[1]
        assert isinstance(found, LocalTierSettings)
        return found.capacity

    assert capacity("identity", {}) == size_of(100)
    assert capacity("lossless", {}) == capacity("auto", {}) == round(1.4 * size_of(100))
    assert capacity("lossless", {"disk": 1.2}) == round(1.2 * size_of(100))
