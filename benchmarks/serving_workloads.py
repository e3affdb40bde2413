"""Workloads of :mod:`benchmarks.serving`: the prompts, and when each arrives.

A prompt consists of blocks of as many tokens each, which follow from the block's name: equal names are equal
KV. Everything follows from a seed, so all systems get the same. The answer of a request is known before,
because it is restricted to one token: so the next prompt of its session contains it, and can be sent at its
time even if the answer has not come.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare.engines import tokens
from benchmarks.replay_vllm import CHUNK_TOKENS, read_plan
from kvtier.lab.demo.client import Client

BLOCK = 16
NEW_TOKENS = BLOCK
ANSWER = "answer "
"""Names of blocks that are the answer of a request begin with it."""
TRACE_BLOCKS = 4
"""Of a trace's 512 tokens each, for :data:`CHUNK_TOKENS` tokens: prompts are 1/64 as long."""
TRACE_START, TRACE_SPAN = 600.0, 3000.0
MAX_TRACE_TOKENS = 4096
MAX_ENGINES = 2


class Request(NamedTuple):
    """A request of a plan."""

    time: float
    """Seconds since the window began."""
    session: object
    blocks: Sequence[str]
    answer: str = ""
    """Name of the block that the answer consists of; empty if it is not restricted."""

    def prompt(self, block_tokens: int) -> list[int]:
        return [token for name in self.blocks for token in block(name, block_tokens)]

    def body(self, client: Client, block_tokens: int) -> dict[str, Any]:
        """Return the body of the request."""
        restricted = {"allowed_token_ids": block(self.answer, 1)} if self.answer else {}
        return client.request(self.prompt(block_tokens), NEW_TOKENS) | restricted


class Plan(NamedTuple):
    """A window of arrivals."""

    before: Sequence[Request]
    """The last request of each open session before the window, without a time: they are sent in turn."""
    requests: Sequence[Request]
    """By their time."""
    block_tokens: int = BLOCK
    in_flight: int = 0
    """If not 0, times do not count: each is sent as soon as fewer than so many have not been answered."""


class Workload(NamedTuple):
    """Sessions, whose prompts grow with each request. Lengths are in blocks."""

    text: str
    requests: int
    """Of a session."""
    shared: int
    """At the beginning of all prompts."""
    own: int
    """After it, in all prompts of a session."""
    added: int
    """By each request, in addition to the answer of the last one."""


WORKLOADS = {
    "chat": Workload("chats of 5 turns, 608 to 1,312 tokens", 5, 0, 28, 10),
    "agents": Workload("agents of 10 calls, 512 tokens in common, 704 to 1,424", 10, 32, 8, 4),
    "system": Workload("one system prompt of 1,280 tokens, 144 of their own", 1, 80, 8, 1),
    "fresh": Workload("nothing shared, 1,424 tokens", 1, 0, 88, 1),
}
TRACE = "trace"


def plan(workload: Workload, count: int, seconds: float, sessions: int, seed: str) -> Plan:
    """Return ``count`` arrivals of a Poisson process in a window, of ``sessions`` sessions that are open.

    The number of arrivals is given, so the offered rate is exact. Each arrival is the next request of any
    session but the quarter that came last; a session that has ended is replaced by a new one.
    """
    generator = random.Random(seed)
    times = sorted(generator.uniform(0, seconds) for _ in range(count))
    # Sessions are anywhere between their beginning and their end, as in the middle of a long run.
    waiting = [(number, generator.randrange(workload.requests)) for number in range(sessions)]
    before = [request_of(workload, 0.0, *session, seed) for session in waiting if session[1]]
    if workload.requests == 1:
        before = [request_of(workload, 0.0, -1 - engine, 1, seed) for engine in range(MAX_ENGINES)]
    requests = []
    for number, time in enumerate(times, sessions):
        session, done = waiting.pop(generator.randrange(len(waiting) - len(waiting) // 4))
        requests.append(request_of(workload, time, session, done + 1, seed))
        waiting.append((session, done + 1) if done + 1 < workload.requests else (number, 0))
    return Plan(before, requests)


def request_of(workload: Workload, time: float, session: int, number: int, seed: str) -> Request:
    """Return a session's request with this number, from 1."""
    blocks = [f"{seed} shared {at}" for at in range(workload.shared)]
    blocks += [f"{seed} {session} own {at}" for at in range(workload.own)]
    for earlier in range(1, number + 1):
        blocks += [f"{seed} {session} added {earlier} {at}" for at in range(workload.added)]
        blocks.append(f"{ANSWER}{seed} {session} {earlier}")
    return Request(time, session, blocks[:-1], blocks[-1])


def block(name: str, count: int) -> list[int]:
    """Return the tokens of a block."""
    return tokens(name, 1) * count if name.startswith(ANSWER) else tokens(name, count)


def plan_of_trace(trace: Path, count: int, seconds: float, sessions: int, seed: str) -> Plan:
    """Return the first requests of the first sessions of a trace, in a window of ``seconds``.

    Prompts are 1/64 as long; those longer than :data:`MAX_TRACE_TOKENS` are left out. Times are divided by
    what makes the window, so gaps keep their proportions.
    """
    planned = read_plan(
        trace, blocks=TRACE_BLOCKS, start=TRACE_START, span=TRACE_SPAN, speed=1.0, sessions=sessions
    )
    fitting = [one for one in planned if len(one.chunks) * CHUNK_TOKENS <= MAX_TRACE_TOKENS - NEW_TOKENS]
    requests = [
        Request(one.time, one.session, [f"{seed} {chunk}" for chunk in one.chunks]) for one in fitting
    ]
    first = {request.session: request for request in reversed(requests)}
    rest = [request for request in requests if request is not first[request.session]][:count]
    if len(rest) < count:
        raise SystemExit(
            f"--trace: has {len(rest)} requests of {sessions} sessions, of {count}: more --sessions"
        )
    began, scale = rest[0].time, seconds / (rest[-1].time - rest[0].time or 1.0)
    return Plan(
        [first[session] for session in dict.fromkeys(request.session for request in rest)],
        [request._replace(time=(request.time - began) * scale) for request in rest],
        CHUNK_TOKENS,
    )


def timed_trace(plan: Plan, gap: float) -> tuple[list[dict[str, object]], float]:
    """Return the plan as vLLM's ``timed_trace`` has it, and when its window begins.

    ``gap``: the seconds between the requests before the window.
    """
    began = len(plan.before) * gap
    timed = [request._replace(time=at * gap) for at, request in enumerate(plan.before)]
    timed += [request._replace(time=began + request.time) for request in plan.requests]
    rows = [
        {
            "timestamp": request.time,
            "input_length": len(request.blocks) * plan.block_tokens,
            "output_length": NEW_TOKENS,
            "hash_ids": [random.Random(name).getrandbits(48) for name in request.blocks],
        }
        for request in timed
    ]
    return rows, began
