"""``kvtier why``: what became of the last requests of this host, and why their tokens were not hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated

import typer
from msgspec import to_builtins
from rich.markup import escape
from rich.table import Table

from kvtier.cli.cache_process import Socket, cache_process
from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json, table
from kvtier.observability.breakers import Breaker
from kvtier.observability.requests import RequestReport

EXAMPLES = ("kvtier why", "kvtier why cmpl-7f3a", "kvtier why --last 1000")
SHOWN_BREAKERS = 3
SHOWN_REASONS = 3
"""Reasons that are explained below the table, the most frequent first."""


def why(
    request: Annotated[
        str,
        typer.Argument(help="Only requests whose id contains this, such as the `id` of vLLM's answer."),
    ] = "",
    last: Annotated[int, typer.Option(min=1, help="How many of the last requests to show.")] = 20,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show why tokens of the last requests were not hits, and what to do about it.

    Asks the cache process of this host, which keeps the last `why.requests` requests. See docs/why.md for all
    reasons. Exit status 1 if it does not answer, or has seen no such request.
    """
    from kvtier.bridge import client

    with cache_process(config, socket) as address:
        found = client.why(address, request, last)
    reports = found.requests
    if as_json:
        print_json(to_builtins(found))
    elif reports:
        _show(reports)
        for number, breaker in enumerate(found.breakers[:SHOWN_BREAKERS]):
            output().print("" if number else "\n", sentence_of(breaker), sep="", markup=False)
    else:
        what = f"no request whose id contains {request!r}" if request else "no request"
        output().print(f"The cache process has seen {what} since it started.", markup=False)
    if not reports:
        raise typer.Exit(1)


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


def sentence_of(breaker: Breaker) -> str:
    """Return what a prefix breaker costs, in a sentence."""
    parted, again = breaker.parted / breaker.passed, breaker.again / breaker.parted
    costs = f"{breaker.tokens_per_day:,.0f} tokens a day"
    if breaker.seconds_per_day:
        costs += f", {breaker.seconds_per_day / 60:,.0f} minutes of prefill"
    return (
        f"{parted:.0%} of {breaker.passed:,} prompts that begin alike part at token {breaker.position:,}; "
        f"{again:.0%} of these go on with the same text: {costs}."
    )


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
