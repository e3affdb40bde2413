"""Circuit breaker around a backend, so that an unavailable medium costs a miss instead of a wait.

=========  ================================================  ========================================
state      result of a call                                  left
=========  ================================================  ========================================
closed     the medium's result                               after ``failures`` consecutive failures
open       at once: not held or ``FAILED``                   after the cooldown
probing    one call reaches the medium, others as in open    with the result of the probe
=========  ================================================  ========================================

Deadlines are enforced in :mod:`kvtier.tiers.tier`, because a call past its deadline keeps its memory until it
ends. The tier reports each of them with :meth:`GuardedBackend.record_failure`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject
from kvtier.logs import RateLimitedWarning
from kvtier.memory.keys import ChunkKey
from kvtier.tiers.wrapper import WrapperBackend

logger = logging.getLogger("kvtier")

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BreakerState(Enum):
    """Whether calls reach the medium."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class GuardedBackend(WrapperBackend):
    """Returns failures for ``inner`` while it is down, and converts its exceptions to outcomes.

    A batch counts as failed if an outcome is ``FAILED``, the medium raised, or it returned a wrong number of
    outcomes. After ``failures`` consecutive failed batches, no call reaches the medium for ``cooldown``
    seconds. Then one call does, as a probe; each failed probe doubles the cooldown, up to ``max_cooldown``.

    Deletions that did not reach the medium are repeated before any other call, so that the medium does not
    hold more than its tier accounts for. If a deletion fails, it is retried every ``max_cooldown`` seconds.
    """

    def __init__(
        self,
        inner: Backend,
        failures: int = 5,
        cooldown: float = 1.0,
        max_cooldown: float = 30.0,
        *,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.state = BreakerState.CLOSED
        self.outages = 0
        """How often the breaker opened. A failed probe belongs to the current outage."""
        self._name = name or type(inner).__name__
        self._failures = failures
        self._first_cooldown = cooldown
        self._max_cooldown = max_cooldown
        self._clock = clock
        self._warn = RateLimitedWarning(logger)
        self._warn_open = RateLimitedWarning(logger)
        self._consecutive_failures = 0
        self._last_failure = ""
        self._cooldown = cooldown
        self._open_until = 0.0
        self._epoch = 0
        self._pending_deletes: set[ChunkKey] = set()
        self._retry_deletes_at = 0.0

    @property
    def available(self) -> bool:
        """Whether a call would reach the medium."""
        return self.state is BreakerState.CLOSED or self._probe_is_due()

    def record_failure(self, reason: str = "out of time") -> None:
        """Count a call past its deadline as failed. Its later result is ignored."""
        if self.state is not BreakerState.OPEN:
            self._epoch += 1
            self._count_failure(reason)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key is held; ``False`` if the medium fails."""
        return await self._call(self._inner.contains, keys, default=False)

    async def held_prefix_inner(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading keys that are held; 0 if the medium fails."""

        async def held_prefix(batch: Sequence[ChunkKey]) -> Sequence[bool]:
            held = await super(GuardedBackend, self).held_prefix_inner(batch)
            return [index < held for index in range(len(batch))]

        return sum(await self._call(held_prefix, keys, default=False))

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`. Returns ``FAILED`` at once while the breaker is open."""
        return await self._call(self._inner.put, items, default=Outcome.FAILED)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`. Returns ``FAILED`` at once while the breaker is open."""
        return await self._call(self._inner.get, items, default=Outcome.FAILED)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each key, now or before the next call that reaches the medium."""
        self._pending_deletes.update(keys)
        await self._call(self._delete_all, keys, default=False)

    async def scan_inner(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield the objects in the medium, up to the first error."""
        try:
            async for batch in super().scan_inner():
                yield batch
        except Exception as error:
            self._warn("tier %s: scan aborted: %r", self._name, error)
            self.record_failure(repr(error))

    async def _call(
        self,
        operation: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT]]],
        batch: Sequence[ItemT],
        *,
        default: ResultT,
    ) -> Sequence[ResultT]:
        """Return the medium's results, or ``default`` for each item of the batch."""
        defaults = [default] * len(batch)
        if not batch or not self._admits():
            return defaults
        epoch = self._epoch
        reason = ""
        try:
            if operation != self._delete_all:
                await self._retry_deletes()
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

    async def _retry_deletes(self) -> None:
        """Repeat deletions that failed earlier."""
        if not self._pending_deletes or self._clock() < self._retry_deletes_at:
            return
        try:
            await self._delete_all(())
        except Exception as error:
            # Not a failure of the batch: the medium may still serve other calls.
            self._retry_deletes_at = self._clock() + self._max_cooldown
            self._warn("tier %s: cannot delete %d chunks: %r", self._name, len(self._pending_deletes), error)

    async def _delete_all(self, batch: Sequence[ChunkKey]) -> Sequence[bool]:
        """Delete all keys with a pending deletion, which include those of ``batch``."""
        keys, self._pending_deletes = self._pending_deletes, set()
        try:
            await self._inner.delete(list(keys))
        except BaseException:
            self._pending_deletes.update(keys)
            raise
        return [True] * len(batch)

    def _probe_is_due(self) -> bool:
        return self.state is BreakerState.OPEN and self._clock() >= self._open_until

    def _admits(self) -> bool:
        if self._probe_is_due():
            self.state = BreakerState.PROBING
            logger.info("tier %s: circuit breaker half-open, probing with one batch", self._name)
            return True
        return self.state is BreakerState.CLOSED

    def _count_success(self) -> None:
        self._consecutive_failures = 0
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.CLOSED
            self._cooldown = self._first_cooldown
            # Ignore results of calls that started before the outage.
            self._epoch += 1
            logger.info("tier %s: circuit breaker closed", self._name)

    def _count_failure(self, reason: str) -> None:
        self._consecutive_failures += 1
        self._last_failure = reason
        if self.state is BreakerState.PROBING:
            self._cooldown = min(2 * self._cooldown, self._max_cooldown)
            self._trip(self._cooldown)
        elif self._consecutive_failures >= self._failures:
            self._trip(self._cooldown)

    def _on_cancelled(self, epoch: int) -> None:
        """Count a cancelled call neither as success nor as failure. After a cancelled probe, probe again."""
        if self.state is BreakerState.PROBING and epoch == self._epoch:
            self._trip(0.0)

    def _trip(self, seconds: float) -> None:
        self.outages += self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._epoch += 1
        self._open_until = self._clock() + seconds
        self._warn_open(
            "tier %s: circuit breaker open for %g s after %d consecutive failures (last: %s)",
            self._name,
            seconds,
            self._consecutive_failures,
            self._last_failure or "probe cancelled",
        )
