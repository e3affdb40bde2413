"""``kvtier why``: what became of the last requests of this host, and why their tokens were not hits."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs, to_builtins
from rich.markup import escape
from rich.table import Table

from kvtier.cli.cache_process import Socket, cache_process
from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json, table
from kvtier.observability.breakers import Breaker
from kvtier.observability.requests import PromptReport, RequestReport

EXAMPLES = ("kvtier why", "kvtier why cmpl-7f3a", "kvtier why --messages chat.json")
SHOWN_BREAKERS = 3
SHOWN_REASONS = 3
"""Reasons that are explained below the table, the most frequent first."""


def why(
    request: Annotated[
        str,
        typer.Argument(help="Only requests whose id contains this, such as the `id` of vLLM's answer."),
    ] = "",
    last: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the last requests to show.")] = 20,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show instead what is held of the prompt in this file now."),
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="The same of chat messages: a JSON list, as sent to vLLM."),
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The same of token ids, separated by commas.")
    ] = None,
    model: Annotated[str, typer.Option(help="Of a prompt: a name of its model. Default: all.")] = "",
    salt: Annotated[str, typer.Option(help="Of a prompt: the `cache_salt` of its requests.")] = "",
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show why tokens of the last requests, or of a prompt, were not hits, and what to do about it.

    Asks the cache process of this host, which keeps the last `why.requests` requests. See docs/why.md for all
    reasons. Exit status 1 if it does not answer, or has seen no such request.
    """
    from kvtier.bridge import client

    given = [prompt_file, messages, token_ids]
    if given.count(None) < len(given):
        with cache_process(config, socket) as address:
            tokens = _tokens(address, prompt_file, messages, token_ids, model)
            _show_prompts(client.why_prompt(address, tokens, model, salt), as_json=as_json)
        return
    with cache_process(config, socket) as address:
        found = client.why(address, request, last)
    reports = found.requests
    if as_json:
        named = [_named(report) for report in reports]
        print_json({"requests": named, "breakers": to_builtins(found.breakers)})
    elif reports:
        _show(reports)
        for number, breaker in enumerate(found.breakers[:SHOWN_BREAKERS]):
            output().print("" if number else "\n", sentence_of(breaker), sep="", markup=False)
    else:
        what = f"no request whose id contains {request!r}" if request else "no request"
        output().print(f"The cache process has seen {what} since it started.", markup=False)
    if not reports:
        raise typer.Exit(1)


def _tokens(
    address: Path, prompt_file: Path | None, messages: Path | None, token_ids: str | None, model: str
) -> list[int]:
    """Return the tokens of the prompt that the options name. Raises: typer.BadParameter."""
    if token_ids is not None:
        try:
            return [int(token) for token in token_ids.replace(",", " ").split()]
        except ValueError as error:
            raise typer.BadParameter("token ids are integers", param_hint="--token-ids") from error
    from kvtier.bridge import client
    from kvtier.fleet.member.tokenizer import load
    from kvtier.fleet.member.tokenizer import token_ids as ids_of

    file = prompt_file or messages
    assert file is not None
    option = "--prompt-file" if prompt_file is not None else "--messages"
    sources = [
        served.tokenizer
        for served in client.models(address)
        if served.tokenizer is not None and (not model or model in served.names)
    ]
    if not sources:
        raise typer.BadParameter(
            "no connected engine has reported a tokenizer for it: use --token-ids", param_hint=option
        )
    try:
        # It says that it has no PyTorch, which tokenizers do not need.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        text = file.read_text()
        tokenizer = load(sources[0])
        if prompt_file is not None:
            return ids_of(tokenizer, text)
        rendered = tokenizer.apply_chat_template(json.loads(text), add_generation_prompt=True, tokenize=False)
        return [int(token) for token in tokenizer(rendered, add_special_tokens=False).input_ids]
    except Exception as error:  # A third-party tokenizer or template may raise anything.
        raise typer.BadParameter(f"{file}: {error}", param_hint=option) from error


def _show_prompts(prompts: Sequence[PromptReport], *, as_json: bool) -> None:
    from kvtier.catalog.misses import ADVICE, text_of

    if as_json:
        print_json([_named(prompt) for prompt in prompts])
    if not prompts:
        output().print("No engine of this host has served such a model.", markup=False)
        raise typer.Exit(1)
    for prompt in () if as_json else prompts:
        held = sum(tokens for _, tokens in prompt.hits)
        output().print(f"{prompt.model}: {held:,} of {prompt.tokens:,} tokens are held", markup=False)
        for tier, tokens in prompt.hits:
            output().print(f"  {tokens:,} in {tier}", markup=False)
        for miss in prompt.misses:
            output().print(f"  {text_of(miss)}: {ADVICE[miss.reason]}", markup=False)


def _show(reports: Sequence[RequestReport]) -> None:
    from kvtier.catalog.misses import ADVICE

    output().print(_table(reports))
    tokens = sum(report.tokens for report in reports)
    missed = Counter[str]()
    for report in reports:
        for miss in report.misses:
            missed[miss.reason] += miss.tokens
    computed = sum(missed.values())
    output().print(
        f"\nOf {tokens:,} tokens of {len(reports)} requests, {computed:,} were computed:", markup=False
    )
    for reason, count in missed.most_common(SHOWN_REASONS):
        output().print(f"{count:,} {reason}: {ADVICE[reason]}", markup=False)


def _named(report: RequestReport | PromptReport) -> dict[str, object]:
    """Return a report for JSON, whose misses are arrays between processes."""
    misses = [to_builtins(structs.asdict(miss)) for miss in report.misses]
    return {**to_builtins(report), "misses": misses}


def sentence_of(breaker: Breaker) -> str:
    """Return what a prefix breaker costs, in a sentence."""
    parted = breaker.parted / breaker.passed
    again = f"; {breaker.again / breaker.parted:.0%} of these go on with the same text" * (breaker.again > 0)
    costs = f"{breaker.tokens_per_day:,.0f} tokens a day"
    if breaker.seconds_per_day:
        costs += f", {breaker.seconds_per_day / 60:,.0f} minutes of prefill"
    alike = f"{breaker.passed:,} prompts that begin alike"
    return f"{parted:.0%} of {alike} part at token {breaker.position:,}{again}: {costs}."


def _table(reports: Sequence[RequestReport]) -> Table:
    rows = table("time", "request", "tokens", "in vLLM", "loaded", "missed")
    for report in reports:
        time = datetime.fromtimestamp(report.at).astimezone().strftime("%H:%M:%S")
        hits = ", ".join(f"{tier} {tokens:,}" for tier, tokens in report.hits.items())
        cells = (f"{report.tokens:,}", f"{report.engine_tokens:,}", hits or "0", "\n".join(_missed(report)))
        rows.add_row(time, escape(report.request), *map(escape, cells))
    return rows


def _missed(report: RequestReport) -> Iterator[str]:
    from kvtier.catalog.misses import text_of

    yield from map(text_of, report.misses)
