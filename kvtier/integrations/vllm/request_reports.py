"""What became of each request, in vLLM's log and metrics: what was loaded, and why the rest was not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvtier.bounded import remember
from kvtier.bridge.protocol import Explanation, Outcome
from kvtier.catalog.misses import text_of

if TYPE_CHECKING:
    from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")

MAX_AWAITED = 1024
"""Requests whose misses may still be explained, and explanations of requests whose outcome is not known."""


class RequestReports:
    """Logs and counts a request once both its outcome and the cache process's explanation are here."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._outcomes: dict[int, Outcome] = {}
        self._explanations: dict[int, Explanation] = {}

    def add(self, outcome: Outcome) -> None:
        """Report a request, once its misses are explained if that may come."""
        explanation = self._explanations.pop(outcome.ticket, None)
        if outcome.reason is not None or explanation is not None:
            self._report(outcome, explanation)
            return
        self._outcomes[outcome.ticket] = outcome
        if len(self._outcomes) > MAX_AWAITED:
            self._report(self._outcomes.pop(next(iter(self._outcomes))), None)

    def explain(self, explanation: Explanation) -> None:
        """Report the request that an explanation is for."""
        if (awaited := self._outcomes.pop(explanation.ticket, None)) is not None:
            self._report(awaited, explanation)
            return
        remember(self._explanations, explanation.ticket, explanation, MAX_AWAITED)

    def lost(self) -> None:
        """Report all requests that wait for an explanation, as those who could give it are gone."""
        for awaited in self._outcomes.values():
            self._report(awaited, None)
        self._outcomes.clear()

    def _report(self, outcome: Outcome, explanation: Explanation | None) -> None:
        misses = outcome.misses(explanation)
        for miss in misses:
            self._stats.add("miss_tokens", miss.tokens, miss.reason)
        loaded = ", ".join(f"{tier} {tokens}" for tier, tokens in outcome.hits.items())
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
