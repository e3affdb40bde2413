"""Circuit breaker of a tier, so that an unavailable medium costs a miss instead of a wait.

=========  ================================================  ========================================
state      result of a call                                  left
=========  ================================================  ========================================
closed     the medium's result                               after ``failures`` consecutive failures
open       at once: the default                              after the cooldown
probing    one call reaches the medium, others as in open    with the result of the probe
=========  ================================================  ========================================

Deadlines are enforced in :mod:`kvtier.tiers.tier`, because a call past its deadline keeps its memory until it
ends. The tier reports each of them with :meth:`CircuitBreaker.record_failure`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from kvtier.backends.base import Outcome
from kvtier.concurrency.breaker import Backoff, Breaker
from kvtier.logs import RateLimitedLog

logger = logging.getLogger("kvtier")

_CALLS = "calls fail"

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BreakerState(Enum):
    """Whether calls reach the medium."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class CircuitBreaker:
    """Decides from the results of past calls whether a call reaches the medium. Converts exceptions.

    A call fails if one of its results is ``FAILED``, it raises, or it returns a wrong number of results.
    After ``failures`` consecutive failures, no call reaches the medium for ``cooldown`` seconds. Then one
    call does, as a probe; each failed probe doubles the cooldown, up to ``max_cooldown``.
    """

    def __init__(
        self,
        name: str,
        failures: int = 5,
        cooldown: float = 1.0,
        max_cooldown: float = 30.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = BreakerState.CLOSED
        self.outages = 0
        """How often the breaker opened. A failed probe belongs to the current outage."""
        self.error: str | None = None
        """Why the medium last failed; ``None`` once a call has succeeded."""
        self._name = name
        self._breaker = Breaker(failures, Backoff(cooldown, max_cooldown, jitter=0.0), clock)
        self._warn = RateLimitedLog(logger)
        self._warn_open = RateLimitedLog(logger)
        # Calls that began in an earlier epoch do not show the state of the medium now.
        self._epoch = 0

    @property
    def available(self) -> bool:
        """Whether a call would reach the medium."""
        return self.state is BreakerState.CLOSED or self._probe_is_due()

    def record_failure(self, reason: str = "out of time") -> None:
        """Count a call past its deadline as failed. Its later result is ignored."""
        if self.state is not BreakerState.OPEN:
            self._epoch += 1
            self._count_failure(reason)

    async def call(
        self,
        operation: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT]]],
        batch: Sequence[ItemT],
        *,
        default: ResultT,
    ) -> Sequence[ResultT]:
        """Return the results of ``operation(batch)``, or ``default`` for each item of the batch."""
        defaults = [default] * len(batch)
        if not batch or not self._admits():
            return defaults
        epoch = self._epoch
        reason = ""
        try:
            results = await operation(batch)
        except Exception as error:
            self._warn("tier %s: a batch failed: %r", self._name, error)
            results, reason = [], repr(error)
        except BaseException:
            self._on_cancelled(epoch)
            raise
        complete = len(results) == len(batch)
        if epoch == self._epoch:
            if complete and Outcome.FAILED not in results:
                self._count_success()
            else:
                self._count_failure(reason or self._log_failure(results, len(batch)))
        return results if complete else defaults

    def _log_failure(self, results: Sequence[object], count: int) -> str:
        """Log and return what is wrong with the results of a call that did not raise."""
        failure = f"{results.count(Outcome.FAILED)} of {count} chunks failed"
        if len(results) != count:
            failure = f"{len(results)} results for {count} chunks"
        self._warn("tier %s: %s", self._name, failure)
        return failure

    def _probe_is_due(self) -> bool:
        return self.state is BreakerState.OPEN and self._breaker.probe_is_due

    def _admits(self) -> bool:
        if self._probe_is_due():
            self.state = BreakerState.PROBING
            logger.info("tier %s: circuit breaker half-open, probing with one batch", self._name)
            return True
        return self.state is BreakerState.CLOSED

    def _count_success(self) -> None:
        self._breaker.record_success(_CALLS)
        self.error = None
        if self.state is BreakerState.PROBING:
            self._breaker.close()
            self.state = BreakerState.CLOSED
            # Ignore results of calls that started before the outage.
            self._epoch += 1
            logger.info("tier %s: circuit breaker closed", self._name)

    def _count_failure(self, reason: str) -> None:
        self.error = reason
        opened = self._breaker.record_failure(_CALLS)
        if self.state is BreakerState.PROBING:
            self._breaker.open(_CALLS)
        elif not opened:
            return
        self.outages += opened
        self._reopen()
        self._warn_open(
            "tier %s: circuit breaker open for %g s after %d consecutive failures (last: %s)",
            self._name,
            self._breaker.pause,
            self._breaker.failures[_CALLS],
            reason,
        )

    def _on_cancelled(self, epoch: int) -> None:
        """Count a cancelled call neither as success nor as failure. After a cancelled probe, probe again."""
        if self.state is BreakerState.PROBING and epoch == self._epoch:
            self._reopen()

    def _reopen(self) -> None:
        self.state = BreakerState.OPEN
        self._epoch += 1
