"""Which requests are traced, and what the queue of spans does when it is full."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.observability.traces.spans import (
    MAX_QUEUED,
    NO_TRACER,
    Sampling,
    Span,
    Tracer,
    child,
    current,
    following,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
ALL = Sampling.of({})


def header(flags: str = "01", *, version: str = "00", trace: str = TRACE, span: str = SPAN) -> str:
    return f"{version}-{trace}-{span}-{flags}"


def test_the_client_decides_by_its_flag() -> None:
    assert ALL.trace(header("01")).hex() == TRACE + SPAN
    assert ALL.trace(header("03")).hex() == TRACE + SPAN
    assert ALL.trace(header("00")) == b""


def test_a_later_version_of_the_header_may_be_longer() -> None:
    assert ALL.trace(header(version="cc") + "-what-comes-later").hex() == TRACE + SPAN


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "garbage",
        header(version="ff"),
        header(trace="0" * 32),
        header(span="0" * 16),
        header(trace=TRACE.upper()),
        header(trace=TRACE[1:]),
        header() + "x",
        f" {header()}",
    ],
)
def test_an_invalid_header_begins_a_new_trace(wrong: str) -> None:
    assert len(ALL.trace(wrong)) == 16


@given(st.text(max_size=80))
def test_any_header_gives_a_trace(text: str) -> None:
    assert len(ALL.trace(text)) in (0, 16, 24)


def test_without_a_header_every_trace_is_new() -> None:
    assert len({ALL.trace() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("name", "argument", "ratio", "follows"),
    [
        ("always_on", "", 1.0, False),
        ("always_off", "", 0.0, False),
        ("parentbased_always_on", "0.1", 1.0, True),
        ("parentbased_always_off", "", 0.0, True),
        ("traceidratio", "0.25", 0.25, False),
        ("parentbased_traceidratio", ".5", 0.5, True),
        ("parentbased_traceidratio", "0", 0.0, True),
        ("traceidratio", "1.0", 1.0, False),
        ("traceidratio", "half", 1.0, False),
        ("traceidratio", "", 1.0, False),
        ("unknown", "", 1.0, False),
    ],
)
def test_samplers_are_those_of_opentelemetry(name: str, argument: str, ratio: float, follows: bool) -> None:
    environment = {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument}
    assert Sampling.of(environment) == Sampling(ratio, follows)


@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.3, 0.999, 1.0])
def test_a_ratio_samples_the_same_traces_as_opentelemetry(ratio: float) -> None:
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    theirs, ours = TraceIdRatioBased(ratio), Sampling(ratio, follows_client=False)
    for _ in range(200):
        trace = Sampling(1.0, follows_client=False).trace().hex()
        sampled = theirs.should_sample(None, int(trace, 16), "name").decision.is_sampled()
        assert bool(ours.trace(header("01", trace=trace))) == sampled


def test_a_span_belongs_to_the_one_before_it() -> None:
    root = ALL.trace()
    within = child(root)
    first = Span.ended("first", root, time.monotonic(), within)
    second = Span.ended("second", within, time.monotonic())
    assert first.trace == within
    assert first.parent == b""
    assert second.parent == within[16:]
    assert second.trace[:16] == root
    assert child(b"") == b""


def test_a_span_has_the_time_at_which_it_began() -> None:
    span = Span.ended("slept", ALL.trace(), time.monotonic() - 2.0)
    assert 2.0 <= (span.end - span.start) / 1e9 < 60
    assert abs(span.end / 1e9 - time.time()) < 60


def test_a_full_queue_drops_and_counts() -> None:
    tracer = Tracer(ALL)
    span = Span.ended("span", ALL.trace(), time.monotonic())
    tracer.add([span] * (MAX_QUEUED - 1))
    tracer.add([span] * 3, dropped=4)
    assert len(tracer.queue) == MAX_QUEUED
    assert tracer.dropped == 2 + 4


def test_nothing_is_recorded_if_traces_are_off() -> None:
    assert NO_TRACER.trace(header()) == b""
    NO_TRACER.add([Span.ended("span", ALL.trace(), time.monotonic())])
    NO_TRACER.record("span", b"", time.monotonic())
    assert not NO_TRACER.queue


def test_a_block_follows_a_trace() -> None:
    with following(b"trace"):
        assert current.get() == b"trace"
    assert current.get() == b""
