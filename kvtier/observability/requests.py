"""The last requests of this host's engines: where each token came from, or why it was computed."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import Any

import msgspec
from msgspec import to_builtins
from msgspec.structs import asdict

from kvtier.catalog.misses import ADVICE, Miss, text_of
from kvtier.observability.breakers import Breaker, Breakers


class RequestReport(msgspec.Struct, frozen=True):
    """What became of one request. Without token ids, text and salts."""

    at: float
    """Seconds since the epoch."""
    request: str
    engine: str
    tokens: int
    engine_tokens: int
    """Tokens that the engine's own cache held."""
    hits: dict[str, int]
    """Tokens that were loaded, by tier."""
    misses: list[Miss]
    """The tokens that were computed, in prefix order."""
    waited: float
    """Seconds from the lookup to its outcome."""


class PromptReport(msgspec.Struct, frozen=True):
    """What is held of a prompt now, and why the rest is not."""

    model: str
    tokens: int
    hits: list[tuple[str, int]]
    """The tier and number of tokens of each run of its prefix, in prefix order."""
    misses: list[Miss]
    text: str = ""
    """The text around the position at which it parts from others, if ``why.show_text`` is set."""


class WhyReport(msgspec.Struct, frozen=True):
    """What `kvtier why` shows."""

    requests: list[RequestReport]
    """The newest first."""
    breakers: list[Breaker]
    """Where prompts part, the most expensive place first."""


def readable(report: RequestReport | PromptReport) -> dict[str, Any]:
    """Return a report as JSON has it: its misses have names, a text and what to do."""
    misses = [
        {**asdict(miss), "text": text_of(miss), "advice": ADVICE[miss.reason]} for miss in report.misses
    ]
    return {**to_builtins(report), "misses": misses}


class RequestLog:
    """Keeps the last reports, and counts the tokens of all. Confined to one event loop."""

    def __init__(self, requests: int, counts: Counter[str]) -> None:
        """``counts``: the counters of the status report."""
        self._last: deque[RequestReport] = deque(maxlen=requests)
        self._counts = counts
        self.breakers = Breakers()
        """Where prompts part."""

    def add(self, report: RequestReport) -> None:
        """Keep a report, and count its misses."""
        for miss in report.misses:
            self._counts[f"miss_tokens_{miss.reason}"] += miss.tokens
        self._last.append(report)

    def report(self, request: str, last: int) -> WhyReport:
        """Return the ``last`` reports of requests whose id contains ``request``, and where prompts part.

        vLLM's id of a request is longer than the one that its client knows.
        """
        found = (report for report in reversed(self._last) if request in report.request)
        return WhyReport(list(islice(found, last)), [breaker for breaker, _ in self.breakers.report()])
