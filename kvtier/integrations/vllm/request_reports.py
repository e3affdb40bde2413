"""What became of each request, in vLLM's log and metrics: what was loaded, and why the rest was not."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.bridge.protocol import Explained, Outcome
from kvtier.catalog.misses import Miss, misses_behind, text_of

if TYPE_CHECKING:
    from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")

MAX_AWAITED = 1024
"""Requests whose misses may still be explained, and explanations of requests whose outcome is not known."""


class RequestReports:
    """Logs and counts a request once both its outcome and the cache process's explanation are here."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._outcomes: dict[int, tuple[Outcome, Mapping[str, int]]] = {}
        self._explained: dict[int, Explained] = {}

    def add(self, outcome: Outcome, hits: Mapping[str, int], *, awaited: bool) -> None:
        """Report a request. ``hits``: loaded tokens by tier. ``awaited``: whether an explanation may come."""
        if not awaited:
            reason, missed = outcome.reason, outcome.tokens - outcome.used_tokens
            self._report(outcome, hits, [Miss(reason, missed)] if reason is not None and missed else [])
        elif (explained := self._explained.pop(outcome.ticket, None)) is not None:
            self._report(outcome, hits, behind(outcome, explained))
        else:
            self._outcomes[outcome.ticket] = outcome, hits
            if len(self._outcomes) > MAX_AWAITED:
                self._report(*self._outcomes.pop(next(iter(self._outcomes))), [])

    def explain(self, explained: Explained) -> None:
        """Report the request that an explanation is for."""
        if (awaited := self._outcomes.pop(explained.ticket, None)) is not None:
            self._report(*awaited, behind(awaited[0], explained))
            return
        self._explained[explained.ticket] = explained
        if len(self._explained) > MAX_AWAITED:
            del self._explained[next(iter(self._explained))]

    def lost(self) -> None:
        """Report all requests that wait for an explanation, as those who could give it are gone."""
        for awaited in self._outcomes.values():
            self._report(*awaited, [])
        self._outcomes.clear()
        self._explained.clear()

    def _report(self, outcome: Outcome, hits: Mapping[str, int], misses: Sequence[Miss]) -> None:
        for miss in misses:
            self._stats.add("miss_tokens", miss.tokens, miss.reason)
        loaded = ", ".join(f"{tier} {tokens}" for tier, tokens in hits.items())
        missed = ", ".join(text_of(miss) for miss in misses)
        logger.info(
            "request %s: %d of %d tokens hit%s, %d more in vLLM's own cache%s",
            outcome.request,
            outcome.used_tokens - outcome.engine_tokens,
            outcome.tokens,
            f" ({loaded})" if loaded else "",
            outcome.engine_tokens,
            f"; missed: {missed}" if missed else "",
        )


def behind(outcome: Outcome, explained: Explained) -> list[Miss]:
    """Return the misses of the tokens that a request has computed."""
    return misses_behind(explained.misses, explained.begins, outcome.used_tokens, outcome.tokens)
