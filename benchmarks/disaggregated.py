"""What handing KV over costs: how much of it is hidden, and what it adds to the time to the first token.

::

    python -m benchmarks.disaggregated                    # five minutes
    python -m benchmarks.disaggregated --transport nixl
    python -m benchmarks.disaggregated --quick

A prefiller, a decoder and a proxy, as ``kvtier demo --disaggregated`` starts them. *Hidden*: a prompt is sent
to the prefiller as the proxy does it; of its bytes those count as hidden that are at the decoder when the
prefiller answers, and the rest takes *late* milliseconds. *Added*: the same prompt through the proxy and,
with a salt, to one engine alone, in turns.

Memory is small, and all of it has been used before anything is measured: taking new pages costs a virtual
machine up to 2 ms a MiB, which engines and caches that have run for a while do not pay.
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

from benchmarks.common import show
from kvtier.demo.disaggregated_serving import Serving, serving
from kvtier.demo.report import Steps
from kvtier.demo.work import Options, work_folder

NEW_TOKENS = 8
SALT = "one engine"
ANSWER_SECONDS = 600.0
END_SECONDS = 60.0
POLL_SECONDS = 0.001
WARM_UPS = 4
"""Prompts that have all memory used once."""
MEMORY = "320MiB"
KV_MEMORY = ("--kv-cache-memory-bytes", "256M")


@dataclass(frozen=True)
class Hidden:
    """One hand-over, as it was seen from the prefiller's side."""

    prefill_seconds: float
    """From the request to the prefiller's answer."""
    late_seconds: float
    """From there to the last byte's being served by the decoder."""
    bytes: int
    early_bytes: int
    """Of these, those that were there when the prefiller answered."""
    pushing_seconds: float

    @property
    def share(self) -> float:
        return self.early_bytes / self.bytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What handing KV over to a decoder costs.")
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--transport", default="tcp", choices=["tcp", "nixl"])
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    options = parser.parse_args(arguments)
    tokens, rounds, warm_ups = (1100, 1, 1) if options.quick else (options.tokens, options.rounds, WARM_UPS)
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
        ) as running,
    ):
        for prompt in running.prompts[2 * rounds :]:
            running.proxy.complete(prompt, NEW_TOKENS)
            running.decoder.complete(prompt, NEW_TOKENS, salt=SALT)
        hidden(running, running.prompts[:rounds])
        added(running, running.prompts[rounds : 2 * rounds])


def hidden(running: Serving, prompts: Sequence[Sequence[int]]) -> None:
    """How much of a push is over when the prompt has been computed."""
    (to,) = [engine["peer"] for engine in running.proxy.get("/engines") if engine["role"] == "decode"]
    seen = [hand_over(running, prompt, to) for prompt in prompts]
    megabytes = statistics.median(one.bytes for one in seen) / 1e6
    show(
        f"hidden: {len(seen)} prompts of {len(prompts[0]):,} tokens, {megabytes:.0f} MB each",
        ("what", "median", "lowest", "highest"),
        [
            _row("prefill, ms", [one.prefill_seconds * 1e3 for one in seen]),
            _row("pushing, ms", [one.pushing_seconds * 1e3 for one in seen]),
            _row("GB/s", [one.bytes / one.pushing_seconds / 1e9 for one in seen]),
            _row("share hidden behind the computation, %", [one.share * 100 for one in seen]),
            _row("late, ms", [one.late_seconds * 1e3 for one in seen]),
        ],
    )


def hand_over(running: Serving, prompt: Sequence[int], to: str) -> Hidden:
    """Have a prompt computed and pushed."""
    before = _pushed(running)
    model = running.prefiller.get("/v1/models")["data"][0]["id"]
    request = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "kv_transfer_params": {"kvtier": {"hand_over": {"to": to}}},
    }
    started = time.perf_counter()
    answer = httpx.post(
        f"{running.prefiller.url}/v1/completions", json=request, timeout=ANSWER_SECONDS, trust_env=False
    )
    answered = time.perf_counter()
    early = _pushed(running)
    answer.raise_for_status()
    assert answer.json()["kv_transfer_params"]["kvtier"]["handed_over"]["tokens"] == len(prompt)
    while (after := _pushed(running))["open"]:
        assert time.perf_counter() - answered < END_SECONDS, "the hand-over does not end"
        time.sleep(POLL_SECONDS)
    ended = time.perf_counter()
    assert after["pushed_bytes"] > before["pushed_bytes"], "nothing was pushed"
    return Hidden(
        prefill_seconds=answered - started,
        late_seconds=ended - answered,
        bytes=after["pushed_bytes"] - before["pushed_bytes"],
        early_bytes=early["pushed_bytes"] - before["pushed_bytes"],
        pushing_seconds=after["pushing_seconds"] - before["pushing_seconds"],
    )


def added(running: Serving, prompts: Sequence[Sequence[int]]) -> None:
    """The time to the first token, through the proxy against one engine."""
    alone, together = [], []
    for turn, prompt in enumerate(prompts):
        # Each goes first every other time.
        for both in (turn % 2 == 0, turn % 2 == 1):
            if both:
                together.append(running.proxy.complete(prompt, NEW_TOKENS))
            else:
                alone.append(running.decoder.complete(prompt, NEW_TOKENS, salt=SALT))
    for one, two in zip(alone, together, strict=True):
        assert one.tokens == two.tokens, "tokens differ"
        assert not one.cached_tokens, "one engine found what it should have computed"
        assert two.cached_tokens >= two.prompt_tokens - 1, "not all was hit at the decoder"
    show(
        f"time to the first token: {len(prompts)} prompts of {len(prompts[0]):,} tokens",
        ("what", "median", "lowest", "highest"),
        [
            _row("one engine, ms", [one.ttft * 1e3 for one in alone]),
            _row("prefiller and decoder, ms", [one.ttft * 1e3 for one in together]),
            _row(
                "added, ms", [(two.ttft - one.ttft) * 1e3 for one, two in zip(alone, together, strict=True)]
            ),
            _row("ratio", [two.ttft / one.ttft for one, two in zip(alone, together, strict=True)]),
        ],
    )


def _pushed(running: Serving) -> dict[str, Any]:
    status: dict[str, Any] = running.status("prefiller")["hand_overs"]
    return status


def _row(what: str, values: Sequence[float]) -> tuple[str, float, float, float]:
    return what, statistics.median(values), min(values), max(values)


if __name__ == "__main__":
    main()
