"""The last requests of this host's engines: where each token came from, or why it was computed."""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

import msgspec

from kvtier.catalog.misses import Miss
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


class WhyReport(msgspec.Struct, frozen=True):
    """What `kvtier why` shows."""

    requests: list[RequestReport]
    """The newest first."""
    breakers: list[Breaker]
    """Where prompts part, the most expensive place first."""


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
        return WhyReport(list(islice(found, last)), list(self.breakers.report()))
