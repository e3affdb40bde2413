"""``kvtier why``: what became of the last requests, and why their tokens were not hits."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import convert, to_builtins
from rich.markup import escape
from rich.table import Table

from kvtier.cli.cache_process import Socket, cache_process
from kvtier.cli.controller_commands import CONTROLLER_OPTIONS, PROMPT_OPTIONS, controller_client, prompt_of
from kvtier.cli.options import epilog, make_command, own_parameters
from kvtier.cli.terminal import messages, output, print_json, table
from kvtier.observability.breakers import Breaker
from kvtier.observability.requests import readable

EXAMPLES = epilog(
    "kvtier why",
    "kvtier why cmpl-7f3a",
    "kvtier why --messages chat.json",
    "kvtier why --all --url http://controller:9000",
    "kvtier why --recording /var/log/kvtier/traffic.rec",
)
SHARED = [*PROMPT_OPTIONS, *CONTROLLER_OPTIONS]
"""Options of the commands that ask a controller."""
SHOWN_BREAKERS = 3
SHOWN_REASONS = 3
"""Reasons that are explained below the table, the most frequent first."""
SHOWN_PROMPTS = 10
TRACE_CHUNK_TOKENS = 512
"""Of a trace that is no recording: those have their own."""

Answer = dict[str, Any]
"""As with ``--json``: requests and breakers, or prompts; of a controller, who has not answered as well."""


def why(
    given: dict[str, Any],
    request: Annotated[
        str,
        typer.Argument(help="Only requests whose id contains this, such as the `id` of vLLM's answer."),
    ] = "",
    last: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the last requests to show.")] = 20,
    everywhere: Annotated[
        bool,
        typer.Option("--all", help="Ask all instances, through the controller of the settings or `--url`."),
    ] = False,
    recording: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show instead where the prompts of a recording part, or of any trace of `kvtier simulate`.",
        ),
    ] = None,
    prefill: Annotated[
        float,
        typer.Option(
            "--prefill-tokens-per-second",
            min=0,
            help="With --recording: how fast the engine computes a prompt.",
        ),
    ] = 0,
    socket: Socket = None,
) -> None:
    """Show why tokens of the last requests, or of a prompt, were not hits, and what to do about it.

    Asks the cache process of this host, which keeps the last `why.requests` requests. See docs/why.md for all
    reasons. Exit status 1 if it does not answer, or has seen no such request.
    """
    prompt = prompt_of(given)
    seen = f"seen no request whose id contains {request!r}" if request else "seen no request"
    empty = f"The cache process has {seen} since it started."
    if recording is not None:
        answer = _of_recording(recording, prefill)
        empty = "No prompts that begin alike part often."
    elif everywhere or given["url"] is not None:
        with controller_client(given["url"], given["token_file"], given["config"]) as controller:
            found: Any = controller.why_prompt(prompt) if prompt else controller.why(request, last)
        answer = found.model_dump(mode="json")
        empty = f"The instances have {seen} since they started."
    else:
        with cache_process(given["config"], socket) as address:
            answer = _of_host(address, request, last, prompt)
    if given["as_json"]:
        print_json(answer)
    else:
        _show(answer, empty)
    if recording is None and not (answer.get("requests") or answer.get("prompts")):
        raise typer.Exit(1)


def _run(values: dict[str, Any]) -> None:
    given = {parameter.name: values.pop(parameter.name) for parameter in SHARED}
    why(given, **values)


command = make_command(why, [*own_parameters(why), *SHARED], _run)


def _of_recording(recording: Path, tokens_per_second: float) -> Answer:
    from kvtier.lab.simulation.breakers import breakers_of
    from kvtier.lab.simulation.trace import Trace

    with messages().status(f"reading {escape(str(recording))}"):
        trace = Trace.read(recording, TRACE_CHUNK_TOKENS)
        return {"requests": [], "breakers": to_builtins(breakers_of(trace, tokens_per_second))}


def _of_host(address: Path, request: str, last: int, prompt: Answer) -> Answer:
    from kvtier.bridge import client

    if prompt:
        model, salt = prompt.get("model", ""), prompt.get("salt", "")
        tokens = prompt["tokens"] if "tokens" in prompt else _tokens(address, prompt, model)
        return {"prompts": [readable(each) for each in client.why_prompt(address, tokens, model, salt)]}
    found = client.why(address, request, last)
    return {
        "requests": [readable(each) for each in found.requests],
        "breakers": to_builtins(found.breakers),
    }


def _tokens(address: Path, prompt: Answer, model: str) -> list[int]:
    """Return the tokens of a prompt that is text or chat messages. Raises: typer.BadParameter."""
    from kvtier.bridge import client
    from kvtier.fleet.member.tokenizer import load, token_ids

    sources = [
        served.tokenizer
        for served in client.models(address)
        if served.tokenizer is not None and (not model or model in served.names)
    ]
    if not sources:
        raise typer.BadParameter("no connected engine has reported a tokenizer for it: use --token-ids")
    # It says that it has no PyTorch, which tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    chat = "messages" in prompt
    try:
        text = json.dumps(prompt["messages"]) if chat else prompt["prompt"]
        return token_ids(load(sources[0]), text, chat=chat)
    except Exception as error:  # A third-party tokenizer or template may raise anything.
        raise typer.BadParameter(f"the prompt cannot be tokenized: {error}") from error


def _show(answer: Answer, empty: str) -> None:
    requests, breakers = answer.get("requests", []), answer.get("breakers", [])
    for instance, reason in answer.get("unanswered", {}).items():
        messages().print(f"{instance} has not answered: {reason}", markup=False)
    if "prompts" in answer:
        _show_prompts(answer["prompts"])
    elif requests:
        _show_requests(requests)
    elif "unanswered" in answer or not breakers:
        _print(empty)
    if requests and breakers:
        _print("")
    for breaker in convert(breakers[:SHOWN_BREAKERS], list[Breaker]):
        _print(sentence_of(breaker))
        _show_text(breaker.text)


def _print(text: str) -> None:
    output().print(text, markup=False)


def _show_prompts(prompts: Sequence[Answer]) -> None:
    if not prompts:
        _print("No engine has served such a model.")
    for prompt in prompts[:SHOWN_PROMPTS]:
        held = sum(tokens for _, tokens in prompt["hits"])
        where = f"{prompt['instance']}: " if "instance" in prompt else ""
        _print(f"{where}{prompt['model']}: {held:,} of {prompt['tokens']:,} tokens are held")
        for tier, tokens in prompt["hits"]:
            _print(f"  {tokens:,} in {tier}")
        for miss in prompt["misses"]:
            _print(f"  {miss['text']}: {miss['advice']}")
        _show_text(prompt["text"])
    if len(prompts) > SHOWN_PROMPTS:
        _print(f"… and {len(prompts) - SHOWN_PROMPTS} more instances, which hold no more of it")


def _show_text(text: str) -> None:
    if text:
        _print(f"  …{json.dumps(text, ensure_ascii=False)[1:-1]}…")


def _show_requests(requests: Sequence[Answer]) -> None:
    output().print(_table(requests))
    tokens = sum(report["tokens"] for report in requests)
    missed, advice = Counter[str](), {}
    for miss in (miss for report in requests for miss in report["misses"]):
        missed[miss["reason"]] += miss["tokens"]
        advice[miss["reason"]] = miss["advice"]
    computed = f"{missed.total():,} were computed:" if missed else "none was computed."
    _print(f"\nOf {tokens:,} tokens of {len(requests)} requests, {computed}")
    for reason, count in missed.most_common(SHOWN_REASONS):
        _print(f"{count:,} {reason}: {advice[reason]}")


def sentence_of(breaker: Breaker) -> str:
    """Return what a prefix breaker costs, in a sentence."""
    parted = breaker.parted / breaker.passed
    again = f"; {breaker.again / breaker.parted:.0%} of these go on with the same text" * (breaker.again > 0)
    costs = f"{breaker.tokens_per_day:,.0f} tokens a day"
    if breaker.seconds_per_day:
        costs += f", {breaker.seconds_per_day / 60:,.0f} minutes of prefill"
    alike = f"{breaker.passed:,} prompts that begin alike"
    return f"{parted:.0%} of {alike} part at token {breaker.position:,}{again}: {costs}."


def _table(requests: Sequence[Answer]) -> Table:
    """Return the requests as a table, with their instances if a controller has answered."""
    where = ["instance"] if "instance" in requests[0] else []
    rows = table("time", *where, "request", "tokens", "in vLLM", "loaded", "missed")
    for report in requests:
        time = datetime.fromtimestamp(report["at"]).astimezone().strftime("%H:%M:%S")
        hits = ", ".join(f"{tier} {tokens:,}" for tier, tokens in report["hits"].items())
        missed = "\n".join(miss["text"] for miss in report["misses"])
        cells = (f"{report['tokens']:,}", f"{report['engine_tokens']:,}", hits or "0", missed)
        names = [report[name] for name in (*where, "request")]
        rows.add_row(time, *map(escape, (*names, *cells)))
    return rows
