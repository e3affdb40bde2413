"""Replay a trace against a real vLLM with kvtier, once for each eviction policy, and against the simulation.

::

    python -m benchmarks.replay_vllm TRACE                                  # lru and adaptive: ten minutes
    python -m benchmarks.replay_vllm TRACE --policy lru,arc,resume,adaptive
    python -m benchmarks.replay_vllm TRACE --serve   # with ``kvtier serve``, not the process that vLLM starts
    python -m benchmarks.replay_vllm TRACE --sessions 4 --span 120 --capacity 60    # a smoke test

TRACE has the format of Mooncake. Requests with the same ``session`` are one session; without that field,
those with the same first block. What is replayed are the first sessions in a window of the trace, with
shorter prompts and in less time: several blocks become one chunk of 32 tokens, and a second is several
seconds of the trace. The tokens of a chunk follow from its id, so equal ids are equal KV. Each prompt ends
with a few tokens of its own, which fill no chunk.

Every policy gets a new cache process, with one memory tier for a fraction of all distinct chunks, and a new
vLLM with a small model and without a prefix cache of its own, so that all hits come from the tier. An answer
whose duration the trace has takes about as long, and one after a tool call ends with other tokens. The engine
computes on one core: on a busy machine, two threads would wait for each other. A request is sent at its time,
but not before the previous one of its session is answered. Hits are what vLLM reports. They are compared with
what ``kvtier simulate`` computes from the plan, and from the times at which the requests were sent (*as
sent*), which differ if the machine cannot keep up. All policies must produce the same tokens: otherwise the
benchmark fails.

With ``--disk``, a disk is below memory, and each policy is replayed with and without ``prefetch.ahead``: hits
are then those of both tiers, and the time to the first token shows where they were.

Times must not be divided by much. ``resume``, and so ``adaptive``, learns for how long prompts are away, but
does not distinguish times below two seconds. A typical gap of an agent is 15 seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import msgspec

from benchmarks.cache_process import CacheProcess
from benchmarks.common import parse, show
from benchmarks.timed_requests import Answer, http_client, send_at
from kvtier.bridge import client as bridge
from kvtier.catalog.endings import signature
from kvtier.concurrency.processes import exit_on_signals
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import Server, start_vllm
from kvtier.lab.demo.work import VLLM_READY_SECONDS
from kvtier.lab.simulation.formats import MOONCAKE, read_lines, read_trace
from kvtier.lab.simulation.replay import Model
from kvtier.lab.simulation.study import Study, study
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.recording.reader import TraceRequest
from kvtier.observability.whatif.simulated_cache import configured
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.testing.servers import free_port
from tests.rigs.vllm import models

CHUNK_TOKENS = 32
TOKEN_BYTES = 4096
"""KV of a token of the model: 4 layers, 2 heads of 64 float32 values, keys and values."""
MODEL = Model(TOKEN_BYTES)
OWN_TOKENS, MIN_NEW_TOKENS = 8, 4
ENDS = {"tool_use": (10, 12), "end_turn": (11, 13)}
"""The tokens that an answer consists of, by how it ended in the trace: so endings differ, and answers too."""
WARM_UP_TOKENS = CHUNK_TOKENS // 2
TIER = "ram"
ENGINE = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--block-size", str(CHUNK_TOKENS)),
    *("--kv-cache-memory-bytes", "256M", "--gpu-memory-utilization", "0.1", "--no-enable-prefix-caching"),
)


class Session(msgspec.Struct):
    """The fields of a row of a trace that identify its session."""

    hash_ids: list[int]
    session: msgspec.Raw = msgspec.Raw()
    stop: str = ""


class Planned(NamedTuple):
    """A request of the replay."""

    time: float
    """In seconds since the replay began."""
    session: object
    chunks: Sequence[int]
    seconds: float
    """Until the end of the answer; 0 if unknown."""
    new_tokens: int
    stop: str

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of the request with this number."""
        own = tokens_of(f"request {number}", OWN_TOKENS)
        return [token for chunk in self.chunks for token in tokens_of(str(chunk), CHUNK_TOKENS)] + own


class Result(NamedTuple):
    """A policy's replay."""

    answers: Sequence[Answer]
    """In the order of the plan."""
    evicted: int
    ahead: int
    """Chunks that were read from the disk before they were asked for."""
    seconds: float


def main() -> None:
    options = parsed()
    plan = read_plan(
        options.trace,
        blocks=options.blocks,
        start=options.start,
        span=options.span,
        speed=options.speed,
        sessions=options.sessions,
        tokens_per_second=options.tokens_per_second,
    )
    if options.plan:
        print(
            json.dumps(
                [
                    {
                        "time": planned.time,
                        "session": str(planned.session),
                        "chunks": list(planned.chunks),
                        "prompt": planned.prompt(number),
                    }
                    for number, planned in enumerate(plan)
                ]
            )
        )
        return
    if not plan:
        raise SystemExit(f"--start, --span: {options.trace} has no request in this window")
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="kvt-") as name:
        models.make_llama(Path(name, "model"), width=options.width)
        compare(plan, options, Path(name))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replay a trace against a real vLLM, by eviction policy.")
    parser.add_argument("trace", type=Path, metavar="TRACE")
    parser.add_argument("--policy", default="lru,adaptive", help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--start", type=float, default=600, help="of the window, in s; default: %(default)s")
    parser.add_argument("--span", type=float, default=480, help="of the window, in s; default: %(default)s")
    parser.add_argument("--speed", type=float, default=2, help="divides times, default: %(default)s")
    parser.add_argument(
        "--blocks", type=int, default=16, help="of the trace in a chunk, default: %(default)s"
    )
    parser.add_argument(
        "--width", type=int, default=1024, help="of the model: how much it computes; default: %(default)s"
    )
    parser.add_argument("--capacity", type=float, default=10, help="%% of the distinct chunks; %(default)s")
    parser.add_argument(
        "--tokens-per-second",
        type=float,
        default=25,
        help="so long are answers whose duration is known; default: %(default)s",
    )
    parser.add_argument(
        "--disk",
        type=float,
        help="also a disk for %% of the distinct chunks, with and without prefetch.ahead",
    )
    parser.add_argument("--plan", action="store_true", help="only print the requests, as JSON")
    parser.add_argument("--serve", action="store_true", help="run kvtier serve; by default, vLLM starts it")
    return parse(parser, policy="lru", sessions=2, start=0.0, capacity=100.0)


def read_plan(
    trace: Path,
    *,
    blocks: int,
    start: float,
    span: float,
    speed: float,
    sessions: int,
    tokens_per_second: float = 0.0,
) -> list[Planned]:
    """Return the requests to replay, in the order of their time. For the rest, see the command line."""
    requests, _ = read_trace(trace, blocks * MOONCAKE.block_tokens)
    rows = (msgspec.json.decode(line, type=Session) for _, line in read_lines(trace))
    inside = [
        Planned(
            (request.time - start) / speed,
            session_of(row),
            request.chunks,
            request.seconds / speed,
            max(MIN_NEW_TOKENS, round(request.seconds / speed * tokens_per_second)),
            row.stop,
        )
        for request, row in zip(requests, rows, strict=True)
        if isinstance(request, TraceRequest) and 0 <= request.time - start < span
    ]
    inside.sort(key=lambda planned: planned.time)
    chosen = set(itertools.islice(dict.fromkeys(planned.session for planned in inside), sessions))
    return [planned for planned in inside if planned.session in chosen]


def session_of(row: Session) -> object:
    return bytes(row.session) or row.hash_ids[0]


def tokens_of(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(models.VOCABULARY), k=count)


def compare(plan: Sequence[Planned], options: argparse.Namespace, folder: Path) -> None:
    """Replay the plan with each policy, and print the table. ``folder`` has the model."""
    trace = trace_of(plan, [planned.time for planned in plan], [planned.seconds for planned in plan])
    chunk_bytes = MODEL.chunk_bytes(trace)
    chunks = int(trace.unique * options.capacity / 100)
    longest = max(len(planned.chunks) for planned in plan)
    if chunks < longest:
        raise SystemExit(f"--capacity: has {chunks} chunks, of {longest} of the longest prompt: use more")
    disk = int(trace.unique * (options.disk or 0) / 100) * chunk_bytes
    settings = {
        policy if ahead else f"{policy}, not ahead": settings_for(
            policy, chunks * chunk_bytes, folder / f"{policy}-{ahead}", disk, ahead=ahead
        )
        for policy in options.policy.split(",")
        for ahead in ((True, False) if disk else (True,))
    }
    prompts = [planned.prompt(number) for number, planned in enumerate(plan)]
    results = {}
    for number, (policy, each) in enumerate(settings.items()):
        (own := folder / str(number)).mkdir()
        results[policy] = replay(plan, prompts, each, folder / "model", own, chunk_bytes, serve=options.serve)
        hits = sum(answer.completion.cached_tokens for answer in results[policy].answers)
        print(f"{policy}: {hits} hit tokens, {results[policy].seconds:.0f} s", file=sys.stderr, flush=True)
    sent = {
        policy: trace_of(
            plan,
            [at.time + answer.late for at, answer in zip(plan, result.answers, strict=True)],
            [answer.seconds for answer in result.answers],
        )
        for policy, result in results.items()
    }
    predicted = {
        policy: (simulated(trace, each), simulated(sent[policy], each)) for policy, each in settings.items()
    }
    report(plan, results, predicted, chunks)
    check(plan, results)


def trace_of(plan: Sequence[Planned], times: Sequence[float], seconds: Sequence[float]) -> Trace:
    """Return the trace of the requests at other times, with other durations of their answers."""
    requests = [
        TraceRequest(
            time,
            array("Q", planned.chunks),
            len(planned.chunks) * CHUNK_TOKENS,
            seconds=until_end,
            signature=signature(bytes(32), planned.stop, ()) if planned.stop else (),
        )
        for planned, time, until_end in zip(plan, times, seconds, strict=True)
    ]
    return Trace.load("the replay", requests, CHUNK_TOKENS)


def simulated(trace: Trace, settings: dict[str, Any]) -> Study:
    """Do what ``kvtier simulate`` does with the same settings."""
    plugins = Plugins.load([])
    return study(trace, plugins, [configured(plugins, Settings(**settings), None, {})], MODEL)


def settings_for(policy: str, capacity: int, path: Path, disk: int, *, ahead: bool) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = [{"name": TIER, "type": "cpu", "capacity": capacity, "eviction": policy}]
    if disk:
        tiers.append({"name": "ssd", "type": "disk", "path": str(path), "capacity": disk, "eviction": policy})
    return {
        "chunk_tokens": CHUNK_TOKENS,
        "partial_chunks": False,
        # A chunk stands for thousands of tokens, which no answer has: its tokens only take time here.
        "save_decode": False,
        "prefetch": {"ahead": ahead},
        "tiers": tiers,
    }


def replay(
    plan: Sequence[Planned],
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    model: Path,
    folder: Path,
    chunk_bytes: int,
    *,
    serve: bool,
) -> Result:
    """Replay the plan on new processes."""
    cache = CacheProcess(folder, settings, serve=serve)
    longest = max(len(prompt) + planned.new_tokens for prompt, planned in zip(prompts, plan, strict=True))
    with serving(cache, model, folder, longest) as (client, engine):
        client.complete(tokens_of("warm-up", WARM_UP_TOKENS), 2)
        started = time.perf_counter()
        try:
            answers = anyio.run(send_all, client, plan, prompts)
        except ExceptionGroup as errors:
            raise engine.failure(f"failed to respond ({errors.exceptions[0]!r})") from errors
        seconds = time.perf_counter() - started
        status = bridge.status(cache.socket)
    tier, *_ = status["tiers"]
    if tier["used_bytes"] != tier["chunks"] * chunk_bytes:
        raise SystemExit(f"{tier['chunks']} chunks have {tier['used_bytes']} bytes, not {chunk_bytes} each")
    counts = status["counts"]
    return Result(answers, counts.get("evicted", 0), counts.get("ahead", 0), seconds)


@contextmanager
def serving(
    cache: CacheProcess, model: Path, folder: Path, max_tokens: int
) -> Iterator[tuple[Client, Server]]:
    """Start a cache process and vLLM, and yield the latter."""
    port = free_port()
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        stack.callback(cache.kill)
        cache.start()
        engine = start_vllm(
            str(model),
            port=port,
            config=None,
            log=folder / "vllm.log",
            max_tokens=max_tokens,
            arguments=[*ENGINE, "--hf-overrides", json.dumps({"max_position_embeddings": max_tokens})],
            scratch=folder,
            variables={**threads, **cache.variables, "HF_HUB_OFFLINE": "1"},
        )
        stack.callback(engine.kill)
        client = stack.enter_context(Client(port, str(model)))
        engine.wait_until(client.healthy, VLLM_READY_SECONDS)
        yield client, engine


async def send_all(client: Client, plan: Sequence[Planned], prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Send every request at its time, those of a session one after the other. Return the answers."""
    answers: dict[int, Answer] = {}
    sessions: dict[object, list[int]] = defaultdict(list)
    for number, planned in enumerate(plan):
        sessions[planned.session].append(number)
    started = time.perf_counter()

    async def run(http: httpx.AsyncClient, numbers: Sequence[int]) -> None:
        for number in numbers:
            body = client.request(prompts[number], plan[number].new_tokens)
            if plan[number].stop in ENDS:
                body["allowed_token_ids"] = ENDS[plan[number].stop]
            answers[number] = await send_at(http, body, started + plan[number].time)

    async with http_client(client.url) as http, anyio.create_task_group() as tasks:
        for numbers in sessions.values():
            tasks.start_soon(run, http, numbers)
    return [answers[number] for number in range(len(plan))]


def report(
    plan: Sequence[Planned],
    results: dict[str, Result],
    predicted: dict[str, tuple[Study, Study]],
    chunks: int,
) -> None:
    rows = [row_of(policy, result, *predicted[policy]) for policy, result in results.items()]
    sessions = len({planned.session for planned in plan})
    planned, _ = next(iter(predicted.values()))
    title = (
        f"{len(plan)} requests of {sessions} sessions, {planned.chunks:,} chunks, {planned.unique:,} "
        f"distinct; a tier of {chunks} chunks; optimum {planned.rows[0].bound:.4f}"
    )
    hits, ttft = (
        ("hit tokens", "hit rate", "simulated", "as sent", "evicted", "ahead"),
        ("TTFT, ms", "p50", "p99"),
    )
    show(title, ("", *hits, *ttft, "late, ms", "s"), rows)


def row_of(policy: str, result: Result, planned: Study, sent: Study) -> Sequence[object]:
    ttft = sorted(answer.completion.ttft * 1e3 for answer in result.answers)
    hits = sum(answer.completion.cached_tokens for answer in result.answers)
    return (
        policy,
        f"{hits:,}",
        f"{hits / (planned.chunks * CHUNK_TOKENS):.4f}",
        f"{planned.rows[0].outcome.hit_rate:.4f}",
        f"{sent.rows[0].outcome.hit_rate:.4f}",
        result.evicted,
        result.ahead,
        round(statistics.fmean(ttft)),
        round(statistics.median(ttft)),
        round(ttft[len(ttft) * 99 // 100]),
        round(statistics.fmean(answer.late for answer in result.answers) * 1e3),
        round(result.seconds),
    )


def check(plan: Sequence[Planned], results: dict[str, Result]) -> None:
    """Fail if a policy has produced other tokens than the first one."""
    (first, reference), *others = results.items()
    pairs = zip(reference.answers, plan, strict=True)
    incomplete = sum(len(answer.completion.tokens) != planned.new_tokens for answer, planned in pairs)
    if incomplete:
        raise SystemExit(f"{first}: {incomplete} answers do not have as many tokens as asked for")
    for policy, result in others:
        both = zip(reference.answers, result.answers, strict=True)
        tokens = [(one.completion.tokens, other.completion.tokens) for one, other in both]
        different = [number for number, (one, other) in enumerate(tokens) if one != other]
        if different:
            raise SystemExit(f"{first} and {policy} produced different tokens for requests {different[:10]}")


if __name__ == "__main__":
    main()
