"""Compare connectors end to end in a real vLLM: time to first token, and throughput.

Each system (``systems.py``) serves one model of 100 M parameters with its default settings, and their
measurements are interleaved. vLLM's own prefix cache is reset before each one, so that hits come from the
connector.

- ``cold`` and ``warm``: the same prompt again; ``warm`` is the median of five times, as the servers that idle
  beside it double some of them.
- ``chat``: five turns of a conversation; the time is that to the first tokens of turns two to five.
- ``shared``: eight concurrent requests that share 90 % of their prompts, a prefix seen before.
- ``fresh``: eight concurrent requests that share nothing, which shows the overhead of a connector.
- ``restarted``: a prompt from before a restart of vLLM, whose cache process went on.
- ``disk``: a prompt from before a restart of both.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.common import confidence, show
from benchmarks.compare.systems import System, running
from kvtier.lab.bench.rows import ratios, rotated
from kvtier.lab.demo.client import Client

AT_ONCE = 8
WARM_TIMES = 5
SHARED_TOKENS, UNIQUE_TOKENS, NEW_TOKENS = 1280, 144, 8
"""Five whole chunks of 256 tokens, and 10 % more."""
FRESH_TOKENS = 256
CHAT_TURNS, SYSTEM_TOKENS, USER_TOKENS = 5, 500, 110
VOCABULARY = 4000
STORE_SECONDS = 0.5
"""Pause after a request and a follow-up one, for background stores. No result depends on its length."""

Seconds = dict[str, dict[str, list[float]]]


def compare(names: Sequence[str], pairs: int, restarts: int) -> None:
    """Print seconds, and ratios to the first of ``names``."""
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    with running(names) as systems:
        started = {system.name: system for system in systems}
        for turn in range(pairs + 1):
            for name in rotated(list(started), turn):
                for measurement, took in measure(started[name].client, turn).items():
                    if turn:
                        seconds[measurement][name].append(took)
            print(f"turn {turn} of {pairs} done", file=sys.stderr, flush=True)
        for turn in range(restarts):
            for name in rotated(list(started), turn):
                for measurement, cache in (("restarted", False), ("disk", True)):
                    took = after_restart(started[name], f"{measurement} {turn}", cache=cache)
                    seconds[measurement][name].append(took)
            print(f"restart {turn + 1} of {restarts} done", file=sys.stderr, flush=True)
    report(list(started), seconds)


def measure(client: Client, turn: int) -> dict[str, float]:
    """Return the seconds by measurement. In one turn, the prompts are the same for all systems."""
    prompt = tokens(f"long {turn}", SHARED_TOKENS + UNIQUE_TOKENS)
    cold = client.complete(prompt, 1)
    warm = []
    for number in range(WARM_TIMES):
        store_and_reset(client, f"{turn} 1 {number}")
        warm.append(client.complete(prompt, 1))
    if any(again.tokens != cold.tokens for again in warm):
        raise SystemExit("the cold and the warm request produced different tokens")
    prefix = tokens(f"prefix {turn}", SHARED_TOKENS)
    client.complete(prefix, 1)
    store_and_reset(client, f"{turn} 2")
    own = [prefix + tokens(f"own {turn} {index}", UNIQUE_TOKENS) for index in range(AT_ONCE)]
    shared = at_once(client, own)
    store_and_reset(client, f"{turn} 3")
    fresh = at_once(client, [tokens(f"fresh {turn} {index}", FRESH_TOKENS) for index in range(AT_ONCE)])
    store_and_reset(client, f"{turn} 4")
    return {
        "cold": cold.ttft,
        "warm": statistics.median(again.ttft for again in warm),
        "chat": chat(client, turn),
        "shared": shared,
        "fresh": fresh,
    }


def chat(client: Client, turn: int) -> float:
    """Return the sum of the times to the first token in all turns of a conversation but the first."""
    history, seconds = tokens(f"system {turn}", SYSTEM_TOKENS), 0.0
    for number in range(CHAT_TURNS):
        history += tokens(f"user {turn} {number}", USER_TOKENS)
        answer = client.complete(history, NEW_TOKENS)
        history += answer.tokens
        store_and_reset(client, f"{turn} chat {number}")
        seconds += answer.ttft if number else 0.0
    return seconds


def after_restart(system: System, seed: str, *, cache: bool) -> float:
    """Return the time to the first token of a prompt from before a restart. Others come first."""
    prompt = tokens(seed, SHARED_TOKENS + UNIQUE_TOKENS)
    before = system.client.complete(prompt, 1)
    store_and_reset(system.client, f"{seed} before")
    system.restart(cache=cache)
    system.client.complete(tokens(f"{seed} first", SHARED_TOKENS), NEW_TOKENS)
    store_and_reset(system.client, f"{seed} after")
    after = system.client.complete(prompt, 1)
    if before.tokens != after.tokens:
        raise SystemExit(f"{system.name} produced other tokens after a restart")
    return after.ttft


def at_once(client: Client, prompts: Sequence[list[int]]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: client.complete(prompt, NEW_TOKENS), prompts))
    return time.perf_counter() - started


def store_and_reset(client: Client, seed: str) -> None:
    """Wait until chunks are stored, some only in a further step, and reset vLLM's own prefix cache."""
    client.complete(tokens(f"settle {seed}", 16), 2)
    time.sleep(STORE_SECONDS)
    if not client.reset_prefix_cache():
        raise SystemExit("vLLM did not reset its prefix cache")


def tokens(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, VOCABULARY), k=count)


def report(names: Sequence[str], seconds: Seconds) -> None:
    rows: list[Sequence[object]] = []
    for measurement, by_name in seconds.items():
        for name in names:
            speedups = ratios(by_name[name], by_name[names[0]])
            took = statistics.median(by_name[name])
            rows.append(
                (measurement, name, len(speedups), took * 1e3, confidence(speedups, statistics.median))
            )
    title = (
        f"first token of {SHARED_TOKENS + UNIQUE_TOKENS:,} tokens; chat: {CHAT_TURNS} turns; "
        f"shared and fresh: {AT_ONCE} at once"
    )
    show(title, ("", "", "pairs", "ms", f"times {names[0]}, median (95 %)"), rows)
