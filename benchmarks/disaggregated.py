"""Measure the cost of a KV transfer: how much of it is hidden, and what it adds to the time to first token.

::

    python -m benchmarks.disaggregated                    # five minutes
    python -m benchmarks.disaggregated --transport nixl
    python -m benchmarks.disaggregated --small

Runs a prefill instance, a decode instance and a proxy, as ``kvtier demo --disaggregated`` does. *Hidden*: a
prompt is sent to the prefill instance, as by the proxy. The bytes that have reached the decode instance when
the prefill instance answers are hidden; the remaining ones take *late* milliseconds. *Added*: the same prompt
is sent through the proxy and, with a salt, to a single engine, interleaved.

Memory is small, and all of it is touched before the measurements: a new page costs a virtual machine up to
2 ms per MiB, which engines and caches that have run for a while do not pay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import parse, show
from kvtier.lab.demo.disaggregated import Serving, serving
from kvtier.lab.demo.work import Options, Steps, work_folder

NEW_TOKENS = 8
SALT = "one engine"
ANSWER_SECONDS = 600.0
END_SECONDS = 60.0
POLL_SECONDS = 0.001
WARM_UPS = 4
"""Number of prompts that touch all memory once."""
MEMORY = "320MiB"
KV_MEMORY = ("--kv-cache-memory-bytes", "256M")


@dataclass(frozen=True)
class Transfer:
    """Measurements of one KV transfer, from the prefill instance."""

    prefill_seconds: float
    """From the request to the answer of the prefill instance."""
    late_seconds: float
    """From that answer until the decode instance serves the last byte."""
    bytes: int
    early_bytes: int
    """The bytes that had arrived when the prefill instance answered."""
    pushing_seconds: float

    @property
    def share(self) -> float:
        return self.early_bytes / self.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of KV transfers to a decode instance.")
    parser.add_argument("--tokens", type=int, default=4096, help="per prompt; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--transport", default="tcp", choices=["tcp", "nixl"])
    options = parse(parser)
    tokens, rounds, warm_ups = (1100, 1, 1) if options.small else (options.tokens, options.rounds, WARM_UPS)
    chosen = Options(tokens=tokens, vllm_arguments=KV_MEMORY)
    with (
        work_folder(chosen) as work,
        serving(
            chosen,
            work,
            Steps(Console(stderr=True)),
            prompts=2 * rounds + warm_ups,
            new_tokens=NEW_TOKENS,
            transport=options.transport,
            memory=MEMORY,
        ) as stack,
    ):
        for prompt in stack.prompts[2 * rounds :]:
            stack.proxy.complete(prompt, NEW_TOKENS)
            stack.decoder.complete(prompt, NEW_TOKENS, salt=SALT)
        measure_hidden(stack, stack.prompts[:rounds])
        measure_added(stack, stack.prompts[rounds : 2 * rounds])


def measure_hidden(stack: Serving, prompts: Sequence[Sequence[int]]) -> None:
    """Measure how much of a KV transfer is complete when the prompt has been computed."""
    (to,) = [engine["peer"] for engine in stack.proxy.get("/engines") if engine["role"] == "decode"]
    transfers = [transfer_kv(stack, prompt, to) for prompt in prompts]
    megabytes = statistics.median(transfer.bytes for transfer in transfers) / 1e6
    show(
        f"hidden: {len(transfers)} prompts of {len(prompts[0]):,} tokens, {megabytes:.0f} MB each",
        ("what", "median", "lowest", "highest"),
        [
            _row("prefill, ms", [transfer.prefill_seconds * 1e3 for transfer in transfers]),
            _row("transfer, ms", [transfer.pushing_seconds * 1e3 for transfer in transfers]),
            _row("GB/s", [transfer.bytes / transfer.pushing_seconds / 1e9 for transfer in transfers]),
            _row("hidden behind computation, %", [transfer.share * 100 for transfer in transfers]),
            _row("late, ms", [transfer.late_seconds * 1e3 for transfer in transfers]),
        ],
    )


def transfer_kv(stack: Serving, prompt: Sequence[int], to: str) -> Transfer:
    """Have a prompt computed by the prefill instance and transferred to ``to``."""
    before = _kv_transfers(stack)
    model = stack.prefiller.get("/v1/models")["data"][0]["id"]
    request = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "kv_transfer_params": {"kvtier": {"kv_transfer": {"to": to}}},
    }
    started = time.perf_counter()
    answer = httpx.post(
        f"{stack.prefiller.url}/v1/completions", json=request, timeout=ANSWER_SECONDS, trust_env=False
    )
    answered = time.perf_counter()
    at_answer = _kv_transfers(stack)
    answer.raise_for_status()
    assert answer.json()["kv_transfer_params"]["kvtier"]["transferred"]["tokens"] == len(prompt)
    while (after := _kv_transfers(stack))["open"]:
        assert time.perf_counter() - answered < END_SECONDS, "the KV transfer did not end"
        time.sleep(POLL_SECONDS)
    ended = time.perf_counter()
    assert after["pushed_bytes"] > before["pushed_bytes"], "nothing was transferred"
    return Transfer(
        prefill_seconds=answered - started,
        late_seconds=ended - answered,
        bytes=after["pushed_bytes"] - before["pushed_bytes"],
        early_bytes=at_answer["pushed_bytes"] - before["pushed_bytes"],
        pushing_seconds=after["pushing_seconds"] - before["pushing_seconds"],
    )


def measure_added(stack: Serving, prompts: Sequence[Sequence[int]]) -> None:
    """Compare the time to first token through the proxy with that of a single engine."""
    single, disaggregated = [], []
    for turn, prompt in enumerate(prompts):
        # Alternate which one goes first.
        for use_proxy in (turn % 2 == 0, turn % 2 == 1):
            if use_proxy:
                disaggregated.append(stack.proxy.complete(prompt, NEW_TOKENS))
            else:
                single.append(stack.decoder.complete(prompt, NEW_TOKENS, salt=SALT))
    pairs = list(zip(single, disaggregated, strict=True))
    for base, split in pairs:
        assert base.tokens == split.tokens, "tokens differ"
        assert not base.cached_tokens, "the single engine had a hit"
        assert split.cached_tokens >= split.prompt_tokens - 1, "the decode instance had no full hit"
    show(
        f"time to first token: {len(prompts)} prompts of {len(prompts[0]):,} tokens",
        ("what", "median", "lowest", "highest"),
        [
            _row("single engine, ms", [answer.ttft * 1e3 for answer in single]),
            _row("disaggregated, ms", [answer.ttft * 1e3 for answer in disaggregated]),
            _row("added, ms", [(split.ttft - base.ttft) * 1e3 for base, split in pairs]),
            _row("ratio", [split.ttft / base.ttft for base, split in pairs]),
        ],
    )


def _kv_transfers(stack: Serving) -> dict[str, Any]:
    status: dict[str, Any] = stack.status("prefiller")["kv_transfers"]
    return status


def _row(what: str, values: Sequence[float]) -> tuple[str, float, float, float]:
    return what, statistics.median(values), min(values), max(values)


if __name__ == "__main__":
    main()
