"""The last requests of this host's engines: where each token came from, or why it was computed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvtier.catalog.misses import Miss, MissReason, misses_behind
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


@dataclass(slots=True)
class Asked:
    """A lookup whose outcome is not known yet."""

    request: str
    chunk_tokens: int
    began_at: float
    sources: list[str] = field(default_factory=list)
    """The tier of each chunk that was found, in prefix order."""
    begins: int = 0
    misses: Sequence[Miss] = ()


class RequestLog:
    """Keeps the last reports, and counts the tokens of all. Confined to one event loop."""

    def __init__(self, requests: int, counts: Counter[str]) -> None:
        """``counts``: the counters of the status report."""
        self._last: deque[RequestReport] = deque(maxlen=requests)
        self._counts = counts
        self.breakers = Breakers()
        """Where prompts part."""

    def add(
        self,
        engine: str,
        asked: Asked,
        tokens: int,
        engine_tokens: int,
        used: int,
        reason: MissReason | None,
    ) -> None:
        """Report a request, of whose ``tokens`` the first ``used`` were not computed."""
        hits: dict[str, int] = {}
        for chunk, tier in enumerate(asked.sources):
            start = max(chunk * asked.chunk_tokens, engine_tokens)
            if (count := min((chunk + 1) * asked.chunk_tokens, used) - start) > 0:
                hits[tier] = hits.get(tier, 0) + count
        if reason is not None:
            misses = [Miss(reason, tokens - used)] if tokens > used else []
        else:
            misses = misses_behind(asked.misses, asked.begins, used, tokens)
        for miss in misses:
            self._counts[f"miss_tokens_{miss.reason}"] += miss.tokens
        waited = time.monotonic() - asked.began_at
        self._last.append(
            RequestReport(time.time(), asked.request, engine, tokens, engine_tokens, hits, misses, waited)
        )

    def report(self, request: str, last: int) -> WhyReport:
        """Return the ``last`` reports of requests whose id contains ``request``, and where prompts part.

        vLLM's id of a request is longer than the one that its client knows.
        """
        found = (report for report in reversed(self._last) if request in report.request)
        return WhyReport(list(islice(found, last)), list(self.breakers.report()))
