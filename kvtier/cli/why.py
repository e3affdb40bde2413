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
from kvtier.cli.controller_commands import CONTROLLER_PANEL, content, controller_client, json_content
from kvtier.cli.options import epilog
from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table
from kvtier.observability.breakers import Breaker
from kvtier.observability.requests import readable

EXAMPLES = epilog(
    "kvtier why",
    "kvtier why cmpl-7f3a",
    "kvtier why --messages chat.json",
    "kvtier why --all --url http://controller:9000",
    "kvtier why --recording /var/log/kvtier/traffic.rec",
)
PROMPT_PANEL = "Prompt"
SHOWN_BREAKERS = 3
SHOWN_REASONS = 3
"""Reasons that are explained below the table, the most frequent first."""
SHOWN_PROMPTS = 10
TRACE_CHUNK_TOKENS = 512
"""Of a trace that is no recording: those have their own."""

Answer = dict[str, Any]
"""As with ``--json``: requests and breakers, or prompts; of a controller, who has not answered as well."""


def why(
    request: Annotated[
        str,
        typer.Argument(help="Only requests whose id contains this, such as the `id` of vLLM's answer."),
    ] = "",
    last: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the last requests to show.")] = 20,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show instead what is held of the prompt in this file now; `-` is stdin.",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = None,
    messages_file: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            metavar="FILE.json",
            help="The same of chat messages: a JSON list, as sent to vLLM.",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,3", help="The same of token ids, separated by commas.", rich_help_panel=PROMPT_PANEL
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Of a prompt: a name of its model. Default: all of this host, or the only one.",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = "",
    salt: Annotated[
        str,
        typer.Option(help="Of a prompt: the `cache_salt` of its requests.", rich_help_panel=PROMPT_PANEL),
    ] = "",
    everywhere: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Ask all instances, through the controller of the settings.",
            rich_help_panel=CONTROLLER_PANEL,
        ),
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The same through this controller. Default: `controller.url`.",
            rich_help_panel=CONTROLLER_PANEL,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with its token. Default: `controller.token`.",
            rich_help_panel=CONTROLLER_PANEL,
        ),
    ] = None,
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
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show why tokens of the last requests, or of a prompt, were not hits, and what to do about it.

    Asks the cache process of this host, which keeps the last `why.requests` requests. See docs/why.md for all
    reasons. Exit status 1 if it does not answer, or has seen no such request.
    """
    given = {"--prompt-file": prompt_file, "--messages": messages_file, "--token-ids": token_ids}
    options = [name for name, value in given.items() if value is not None]
    if len(options) > 1:
        raise typer.BadParameter(f"{' and '.join(options)} exclude each other: use one of them")
    option = options[0] if options else ""
    seen = f"seen no request whose id contains {request!r}" if request else "seen no request"
    empty = f"The cache process has {seen} since it started."
    if recording is not None:
        answer = _of_recording(recording, prefill)
        empty = "No prompts that begin alike part often."
    elif everywhere or url is not None:
        with controller_client(url, token_file, config) as controller:
            if option:
                about = {"model": model or None, "salt": salt or None}
                found: Any = controller.why_prompt({**_prompt(option, given[option]), **about})
            else:
                found = controller.why(request, last)
            answer = found.model_dump(mode="json")
            empty = f"The instances have {seen} since they started."
    else:
        with cache_process(config, socket) as address:
            answer = _of_host(address, request, last, option, given.get(option), model, salt)
    if as_json:
        print_json(answer)
    else:
        _show(answer, empty)
    if recording is None and not (answer.get("requests") or answer.get("prompts")):
        raise typer.Exit(1)


def _of_recording(recording: Path, tokens_per_second: float) -> Answer:
    from kvtier.lab.simulation.breakers import breakers_of
    from kvtier.lab.simulation.trace import Trace

    with messages().status(f"reading {escape(str(recording))}"):
        trace = Trace.read(recording, TRACE_CHUNK_TOKENS)
        return {"requests": [], "breakers": to_builtins(breakers_of(trace, tokens_per_second))}


def _of_host(
    address: Path, request: str, last: int, option: str, prompt: Path | str | None, model: str, salt: str
) -> Answer:
    from kvtier.bridge import client

    if option:
        tokens = _tokens(address, option, prompt, model)
        return {"prompts": [readable(each) for each in client.why_prompt(address, tokens, model, salt)]}
    found = client.why(address, request, last)
    return {
        "requests": [readable(each) for each in found.requests],
        "breakers": to_builtins(found.breakers),
    }


def _prompt(option: str, value: Path | str | None) -> dict[str, Any]:
    """Return the prompt that an option gives, as a field of a request. Raises: typer.BadParameter."""
    if option == "--prompt-file":
        return {"prompt": content(str(value), option)}
    if option == "--messages":
        return {"messages": json_content(str(value), option)}
    try:
        return {"tokens": [int(token) for token in str(value).replace(",", " ").split()]}
    except ValueError as error:
        raise typer.BadParameter("token ids are integers", param_hint=option) from error


def _tokens(address: Path, option: str, value: Path | str | None, model: str) -> list[int]:
    """Return the tokens of the prompt that an option gives. Raises: typer.BadParameter."""
    given = _prompt(option, value)
    if "tokens" in given:
        tokens: list[int] = given["tokens"]
        return tokens
    from kvtier.bridge import client
    from kvtier.fleet.member.tokenizer import load
    from kvtier.fleet.member.tokenizer import token_ids as ids_of

    sources = [
        served.tokenizer
        for served in client.models(address)
        if served.tokenizer is not None and (not model or model in served.names)
    ]
    if not sources:
        raise typer.BadParameter(
            "no connected engine has reported a tokenizer for it: use --token-ids", param_hint=option
        )
    # It says that it has no PyTorch, which tokenizers do not need.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    chat = "messages" in given
    try:
        return ids_of(load(sources[0]), json.dumps(given["messages"]) if chat else given["prompt"], chat=chat)
    except Exception as error:  # A third-party tokenizer or template may raise anything.
        raise typer.BadParameter(f"{value}: {error}", param_hint=option) from error


def _show(answer: Answer, empty: str) -> None:
    requests, breakers = answer.get("requests", []), answer.get("breakers", [])
    for instance, reason in answer.get("unanswered", {}).items():
        messages().print(f"{instance} has not answered: {reason}", markup=False)
    if "prompts" in answer:
        _show_prompts(answer["prompts"])
    elif requests:
        _show_requests(requests)
    elif "unanswered" in answer or not breakers:
        output().print(empty, markup=False)
    for number, each in enumerate(breakers[:SHOWN_BREAKERS]):
        breaker = convert(each, Breaker)
        output().print("" if number or not requests else "\n", sentence_of(breaker), sep="", markup=False)
        _show_text(breaker.text)


def _show_prompts(prompts: Sequence[Answer]) -> None:
    if not prompts:
        output().print("No engine has served such a model.", markup=False)
    for prompt in prompts[:SHOWN_PROMPTS]:
        held = sum(tokens for _, tokens in prompt["hits"])
        where = f"{prompt['instance']}: " if "instance" in prompt else ""
        output().print(
            f"{where}{prompt['model']}: {held:,} of {prompt['tokens']:,} tokens are held", markup=False
        )
        for tier, tokens in prompt["hits"]:
            output().print(f"  {tokens:,} in {tier}", markup=False)
        for miss in prompt["misses"]:
            output().print(f"  {miss['text']}: {miss['advice']}", markup=False)
        _show_text(prompt["text"])
    if len(prompts) > SHOWN_PROMPTS:
        output().print(f"… and {len(prompts) - SHOWN_PROMPTS} more instances, which hold no more of it")


def _show_text(text: str) -> None:
    if text:
        output().print(f"  …{json.dumps(text, ensure_ascii=False)[1:-1]}…", markup=False)


def _show_requests(requests: Sequence[Answer]) -> None:
    output().print(_table(requests))
    tokens = sum(report["tokens"] for report in requests)
    missed, advice = Counter[str](), {}
    for miss in (miss for report in requests for miss in report["misses"]):
        missed[miss["reason"]] += miss["tokens"]
        advice[miss["reason"]] = miss["advice"]
    computed = sum(missed.values())
    output().print(
        f"\nOf {tokens:,} tokens of {len(requests)} requests, {computed:,} were computed:", markup=False
    )
    for reason, count in missed.most_common(SHOWN_REASONS):
        output().print(f"{count:,} {reason}: {advice[reason]}", markup=False)


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
