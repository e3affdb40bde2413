"""Arrivals of the serving benchmark do not wait for answers, and what it counts."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.abc
import pytest

from benchmarks.replay_vllm import CHUNK_TOKENS
from benchmarks.serving import Sample, Window, compared_row, goodput, latency_row, offer
from benchmarks.serving_workloads import (
    BLOCK,
    NEW_TOKENS,
    WORKLOADS,
    Plan,
    Request,
    block,
    plan,
    plan_of_trace,
    timed_trace,
)
from kvtier.lab.demo.client import Client
from tests.lab.simulation.making import mooncake_line

OBJECTIVE = Namespace(ttft=1.0, tpot=0.1)
LIMIT_SECONDS = 60.0


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_of_a_session_continue_each_other(name: str) -> None:
    """Each begins with the previous prompt and its answer, so that there are hits, also before the window."""
    made = plan(WORKLOADS[name], 60, 10.0, sessions=6, seed="a")
    times = [request.time for request in made.requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 10
    last: dict[object, Request] = {}
    for request in (*made.before, *made.requests):
        prompt = request.prompt(made.block_tokens)
        if request.session in last:
            earlier = last[request.session]
            begin = earlier.prompt(made.block_tokens) + block(earlier.answer, NEW_TOKENS)
            assert prompt[: len(begin)] == begin
        last[request.session] = request
    assert (len(last) < 60) == (WORKLOADS[name].requests > 1)
    assert plan(WORKLOADS[name], 60, 10.0, sessions=6, seed="a") == made
    other = plan(WORKLOADS[name], 60, 10.0, sessions=6, seed="b")
    assert not {*other.requests[0].blocks} & {*made.requests[0].blocks}, (
        "windows would hit each other's prompts"
    )


def test_trace_keeps_its_order_and_proportions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(mooncake_line(600_000 + 1000 * at * at, list(range(at + 1))) for at in range(9)))
    made = plan_of_trace(trace, 5, 10.0, sessions=9, seed="")
    assert len(made.before) == 1, "of the only session"
    assert [request.time for request in made.requests] == pytest.approx([0, 1.25, 3.33, 6.25, 10], abs=0.01)
    assert made.block_tokens == CHUNK_TOKENS


def test_trace_for_vllm_has_the_same_prefixes_and_times() -> None:
    made = plan(WORKLOADS["chat"], 20, 10.0, sessions=3, seed="a")
    rows, began = timed_trace(made, gap=0.5)
    assert began == 0.5 * len(made.before)
    requests = [*made.before, *made.requests]
    names = {name for request in requests for name in request.blocks}
    assert len({number for row in rows for number in row["hash_ids"]}) == len(names)  # type: ignore[attr-defined]
    assert [row["input_length"] for row in rows] == [len(request.blocks) * BLOCK for request in requests]
    assert [row["timestamp"] for row in rows[len(made.before) :]] == [
        began + request.time for request in made.requests
    ]


async def served(answers: int, requests: int, in_flight: int = 0) -> tuple[list[Sample], int]:
    """Offer requests to a server that answers none before all, or all that may be in flight, have arrived.

    It answers only some of them at all. Returns how many were in flight at most as well.
    """
    arrived = waiting = most = 0
    everyone = anyio.Event()

    async def handle(stream: anyio.abc.SocketStream) -> None:
        nonlocal arrived, waiting, most
        async with stream:
            await stream.receive()
            arrived += 1
            waiting += 1
            mine, most = arrived, max(most, waiting)
            if arrived == (in_flight or requests):
                everyone.set()
            await everyone.wait()
            # So that others that are sent meanwhile would be counted.
            await anyio.sleep(0.05 if in_flight else 0)
            waiting -= 1
            if mine <= answers:
                event = {"choices": [{"token_ids": [1]}], "usage": {"prompt_tokens": 1}}
                body = f"data: {json.dumps(event)}\n\n" * 2
                await stream.send(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())

    arrivals = Plan([], [Request(0.01 * at, at, [f"{at}"]) for at in range(requests)])
    arrivals = arrivals._replace(in_flight=in_flight)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with Client(port, "model") as client:
            samples = await offer([client], arrivals, LIMIT_SECONDS)
        tasks.cancel_scope.cancel()
    return samples, most


def test_arrivals_do_not_wait_for_answers() -> None:
    """Otherwise, the first one would wait for the last one, which would never come."""
    samples, most = anyio.run(served, 12, 12)
    assert most == 12
    assert [sample.session for sample in samples] == list(range(12))
    assert all(sample.tpot is not None for sample in samples)
    # The first one waited for the last one to arrive, 0.11 s later, and that is part of its latency.
    assert samples[0].ttft >= 0.1
    assert all(sample.ttft >= sample.late >= 0 for sample in samples)


def test_no_more_requests_are_in_flight_than_was_asked_for() -> None:
    samples, most = anyio.run(served, 12, 12, 3)
    assert most == 3
    assert all(sample.tpot is not None for sample in samples)


def test_failed_requests_count_with_the_time_until_they_failed() -> None:
    samples, _ = anyio.run(served, 2, 4)
    assert sorted(sample.tpot is None for sample in samples) == [False, False, True, True]
    assert all(sample.ttft > 0 for sample in samples)
    window = Window(0, samples, 2.0, 100, {}, 0.0)
    assert goodput([window], OBJECTIVE) == 1.0


def window_of(ttfts: Sequence[float]) -> Window:
    samples = [Sample(at // 2, 0.0, ttft, 0.05, 1.0) for at, ttft in enumerate(ttfts)]
    return Window(0, samples, 4.0, 1000, {"device": 100}, 0.0)


def test_goodput_and_ratios_are_those_of_the_samples() -> None:
    slow, fast = window_of([0.5, 2.0, 2.0, 2.0]), window_of([0.25, 1.0, 1.0, 1.0])
    offered, done, p50, *_, good = latency_row([slow], OBJECTIVE)
    assert (offered, done, p50, good) == (1.0, 1.0, 2000.0, 0.25)
    assert compared_row([slow], [fast], OBJECTIVE) == [
        "2.000 (2.000 to 2.000)",
        "2.000 (2.000 to 2.000)",
        "0.750 (0.500 to 1.000)",
    ]
