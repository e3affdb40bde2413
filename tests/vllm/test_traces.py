"""Spans of a real vLLM's requests, of its cache process and of vLLM itself form one trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.cache_process import CHUNK, CacheProcess
from tests.rigs.collector import Collector, Received
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, StartEngine, peer_settings

LENGTH = 1000
WHOLE = LENGTH // CHUNK * CHUNK
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CLIENT}-01", f"00-{TRACE}-{CLIENT}-00"
SALT = "the-salt-of-a-tenant"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    collector = Collector(tmp_path).start()
    yield collector
    collector.kill()


@pytest.fixture
def traced(make_cache: MakeCache, collector: Collector) -> CacheProcess:
    """A running cache process that exports to the collector."""
    cache = make_cache(traces=True)
    cache.environment = collector.environment()
    return cache.start()


def by_name(spans: list[Received]) -> dict[str, list[Received]]:
    names = {span.name for span in spans}
    return {name: [span for span in spans if span.name == name] for name in names}


def names(spans: list[Received]) -> set[str]:
    """Return the names of the spans of the request."""
    return {span.name for span in spans if span.trace == TRACE}


def test_a_request_is_one_trace_from_client_to_disk(
    llama: Path, traced: CacheProcess, collector: Collector, start: StartEngine
) -> None:
    tokens = prompt(LENGTH)
    with start(llama, traced) as engine:
        engine.answer(engine.submit(tokens, trace=SAMPLED, salt=SALT))
        traced.wait_until_stored(LENGTH)
        traced.stop()
        cold = by_name(collector.wait_for(lambda spans: {"kvtier.save", "kvtier.lookup"} <= names(spans)))
        collector.file.write_text("")
        traced.start()
        engine.reset_prefix_cache()
        engine.generate(prompt(300, start=5000))  # Until it has reconnected.
        answer = engine.answer(engine.submit(tokens, trace=SAMPLED, salt=SALT))
        assert answer.cached == WHOLE
        warm = by_name(collector.wait_for(lambda spans: {"kvtier.copy", "kvtier.load"} <= names(spans)))
    [lookup] = [span for span in cold["kvtier.lookup"] if span.trace == TRACE]
    assert (lookup.parent, lookup.error, lookup.attributes["kvtier.tokens"]) == (CLIENT, "", 0)
    saves = [span for span in cold["kvtier.save"] if span.trace == TRACE]
    assert {span.parent for span in saves} == {CLIENT}
    assert sum(int(span.attributes["kvtier.tokens"]) for span in saves) >= WHOLE

    [lookup] = [span for span in warm["kvtier.lookup"] if span.trace == TRACE]
    [load] = [span for span in warm["kvtier.load"] if span.trace == TRACE]
    reads = [span for span in warm["kvtier.tier.read"] if span.trace == TRACE]
    copies = [span for span in warm["kvtier.copy"] if span.trace == TRACE]
    assert (lookup.parent, load.parent) == (CLIENT, CLIENT)
    assert (lookup.attributes["kvtier.tokens"], load.attributes["kvtier.ssd"]) == (WHOLE, WHOLE)
    assert {span.parent for span in reads} == {lookup.id}
    assert {span.parent for span in copies} == {load.id}
    assert sum(int(span.attributes["kvtier.tokens"]) for span in copies) == WHOLE
    assert not [span for spans in warm.values() for span in spans if span.trace == TRACE and span.error]
    exported = collector.file.read_text()
    assert SALT not in exported
    assert str(tokens)[1:40] not in exported


def test_vllms_own_span_is_in_the_same_trace(
    llama: Path, traced: CacheProcess, collector: Collector, start: StartEngine
) -> None:
    endpoint = collector.environment()["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
    with start(llama, traced, otlp_traces_endpoint=endpoint) as engine:
        engine.answer(engine.submit(prompt(LENGTH), trace=SAMPLED))
        engine.generate(prompt(LENGTH, start=2000))  # The client of which sends no context.
        both = {"llm_request", "kvtier.lookup"}
        spans = collector.wait_for(lambda spans: len([span for span in spans if span.name in both]) == 4)
    found = by_name(spans)
    with_client = [span for name in both for span in found[name] if span.trace == TRACE]
    assert {span.name for span in with_client} == both
    assert {span.parent for span in with_client} == {CLIENT}
    [root] = found["kvtier.request"]
    assert root.parent == ""
    without = [span for name in both for span in found[name] if span.trace != TRACE]
    assert {span.name for span in without} == both
    assert {(span.trace, span.parent) for span in without} == {(root.trace, root.id)}


def test_an_unsampled_request_records_nothing(
    llama: Path, traced: CacheProcess, collector: Collector, start: StartEngine
) -> None:
    with start(llama, traced) as engine:
        engine.answer(engine.submit(prompt(LENGTH), trace=UNSAMPLED))
        traced.wait_until_stored(LENGTH)
    traced.stop()
    assert {span.name for span in collector.spans} == {"kvtier.tier.write"}
    assert TRACE not in {span.trace for span in collector.spans}


def test_requests_are_served_while_the_cache_process_is_killed_and_traced_when_it_is_back(
    llama: Path, traced: CacheProcess, collector: Collector, start: StartEngine
) -> None:
    with start(llama, traced) as engine:
        number = engine.submit(prompt(LENGTH), trace=SAMPLED)
        traced.kill()
        assert len(engine.answer(number).tokens) == 16
        assert len(engine.answer(engine.submit(prompt(LENGTH, start=2000), trace=SAMPLED)).tokens) == 16
        traced.start()
        for number in range(3, 60):
            engine.answer(engine.submit(prompt(LENGTH, start=1000 * number), trace=SAMPLED))
            if any(span.trace == TRACE and span.name == "kvtier.save" for span in collector.spans):
                break
    traced.stop()
    assert TRACE in {span.trace for span in collector.spans}


def test_a_prompt_that_is_transferred_is_one_trace_on_both_sides(
    llama: Path, make_cache: MakeCache, collector: Collector, start: StartEngine
) -> None:
    one, two = peer_settings(2)
    caches = [
        make_cache(traces=True, peer=peer, kv_transfer={"targets": [two["listen"]]}) for peer in (one, two)
    ]
    for cache in caches:
        cache.environment = collector.environment()
        cache.start()
    tokens = prompt(LENGTH)
    with start(llama, caches[0]) as prefill:
        params = {"kvtier": {"kv_transfer": {"to": two["listen"]}}}
        prefill.answer(prefill.submit(tokens, 1, trace=SAMPLED, params=params))
        spans = by_name(collector.wait_for(lambda spans: "kvtier.kv_transfer" in by_name(spans)))
    [transfer] = spans["kvtier.kv_transfer"]
    assert (transfer.trace, transfer.parent, transfer.error) == (TRACE, CLIENT, "")
    assert transfer.attributes["kvtier.peer"] == two["listen"]
    assert int(transfer.attributes["kvtier.bytes"]) > 0
    received = collector.wait_for(lambda spans: "kvtier.peer.receive" in by_name(spans))
    receives = by_name(received)["kvtier.peer.receive"]
    assert {(span.trace, span.parent) for span in receives} == {(TRACE, transfer.id)}


def test_what_a_peer_reads_from_its_disk_is_in_the_trace_of_the_request(
    llama: Path, make_cache: MakeCache, collector: Collector, start: StartEngine
) -> None:
    waiting = {"adaptive": False, "deadline": "60s"}  # On a busy machine, it may compute instead of waiting.
    caches = [make_cache(traces=True, peer=peer, prefetch=waiting) for peer in peer_settings(2)]
    for cache in caches:
        cache.environment = collector.environment()
        cache.start()
    tokens = prompt(LENGTH)
    with start(llama, caches[0]) as engine:
        engine.generate(tokens)
        caches[0].wait_until(lambda status: status["tiers"][1]["chunks"] == WHOLE // CHUNK)
    caches[0].stop()
    caches[0].start()  # Its memory is empty.
    with start(llama, caches[1]) as engine:
        # It may still wait before it connects again.
        caches[1].wait_until(lambda status: status["peers"][0]["linked"])
        caches[1].wait_until(lambda status: status["peers"][0]["state"] == "connected")
        caches[1].wait_until(lambda status: status["tiers"][2]["available"])
        answer = engine.answer(engine.submit(tokens, trace=SAMPLED))
        assert answer.cached == WHOLE, caches[1].tail()
        both = {"kvtier.peer.serve", "kvtier.load"}
        spans = by_name(collector.wait_for(lambda spans: both <= names(spans)))
    [lookup] = [span for span in spans["kvtier.lookup"] if span.trace == TRACE]
    [query] = [span for span in spans["kvtier.tier.lookup"] if span.trace == TRACE]
    serves = [span for span in spans["kvtier.peer.serve"] if span.trace == TRACE]
    assert (query.parent, query.attributes["kvtier.tier"]) == (lookup.id, "peers")
    assert {span.parent for span in serves} == {lookup.id}
    reads = {
        (span.attributes["kvtier.tier"], span.parent)
        for span in spans["kvtier.tier.read"]
        if span.trace == TRACE
    }
    assert reads == {("peers", lookup.id), ("ssd", serves[0].id)}
