"""A circuit breaker around any medium: one that is down costs a miss, not a wait.

=========  =====================================================  ==============================
state      what a call gets                                       left when
=========  =====================================================  ==============================
closed     the medium's answer                                    ``failures`` batches failed in a row
open       an answer at once: not held, ``FAILED``                the cooldown is over
probing    one call the medium's answer, the others as in open    the probe has its answer
=========  =====================================================  ==============================

Deadlines are not here: :mod:`kvtier.tier` owns them, since a call that is out of time keeps its memory
until it ends. It tells of each by :meth:`GuardedBackend.record_failure`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem, StoredObject
from kvtier.backends.logs import RareWarning
from kvtier.backends.wrapper import WrapperBackend
from kvtier.keys import ChunkKey

logger = logging.getLogger("kvtier")

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")


class BreakerState(Enum):
    """Whether calls reach the medium."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class GuardedBackend(WrapperBackend):
    """Answers in the place of ``inner`` while that only fails, and translates what it raises.

    A batch failed where an outcome is ``FAILED``, where the medium raised, or where it answered with
    another number of outcomes than there were questions. After ``failures`` of them in a row nothing
    reaches the medium for ``cooldown`` seconds; then one call does, as a probe, and each probe that
    fails doubles the time to the next, up to ``max_cooldown``. Keys whose deletion did not reach the
    medium are deleted before anything else is asked of it, so that it does not come to hold more than its
    tier accounts for; a medium that will not delete is asked again every ``max_cooldown`` seconds.
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
        """How often the breaker has opened; a probe that failed is part of the outage that it was made in."""
        self._name = name or type(inner).__name__
        self._failures = failures
        self._first_cooldown = cooldown
        self._max_cooldown = max_cooldown
        self._clock = clock
        self._warn = RareWarning(logger)
        self._warn_open = RareWarning(logger)
        self._failed_in_a_row = 0
        self._last_failure = ""
        self._cooldown = cooldown
        self._open_until = 0.0
        self._epoch = 0
        self._undeleted: set[ChunkKey] = set()
        self._catch_up_at = 0.0

    @property
    def available(self) -> bool:
        """Whether a call would reach the medium now."""
        return self.state is BreakerState.CLOSED or self._probe_is_due()

    def record_failure(self, reason: str = "out of time") -> None:
        """A call is out of time. It counts as failed, and what it may yet answer counts for nothing."""
        if self.state is not BreakerState.OPEN:
            self._epoch += 1
            self._count_failure(reason)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Whether each key is held; ``False`` where the medium cannot tell."""
        return await self._ask(self._inner.contains, keys, refusal=False)

    async def held_prefix_inner(self, keys: Sequence[ChunkKey]) -> int:
        """How many leading keys are held; 0 where the medium cannot tell."""

        async def ask(batch: Sequence[ChunkKey]) -> Sequence[bool]:
            held = await super(GuardedBackend, self).held_prefix_inner(batch)
            return [index < held for index in range(len(batch))]

        return sum(await self._ask(ask, keys, refusal=False))

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`. ``FAILED`` at once while the medium is down."""
        return await self._ask(self._inner.put, items, refusal=Outcome.FAILED)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`. ``FAILED`` at once while the medium is down."""
        return await self._ask(self._inner.get, items, refusal=Outcome.FAILED)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Remove each key, now or before the next call that reaches the medium."""
        self._undeleted.update(keys)
        await self._ask(self._delete_all, keys, refusal=False)

    async def scan_inner(self) -> AsyncIterator[Sequence[StoredObject]]:
        """What the medium held, as far as it could tell."""
        try:
            async for batch in super().scan_inner():
                yield batch
        except Exception as error:
            self._warn("tier %s: stopped listing what it holds: %r", self._name, error)
            self.record_failure(repr(error))

    async def _ask(
        self,
        operation: Callable[[Sequence[QuestionT]], Awaitable[Sequence[AnswerT]]],
        batch: Sequence[QuestionT],
        *,
        refusal: AnswerT,
    ) -> Sequence[AnswerT]:
        """The medium's answers, or ``refusal`` for each question of the batch."""
        refused = [refusal] * len(batch)
        if not batch or not self._admits():
            return refused
        epoch = self._epoch
        reason = ""
        try:
            if operation != self._delete_all:
                await self._catch_up()
            answers = await operation(batch)
        except Exception as error:
            self._warn("tier %s: a batch failed: %r", self._name, error)
            answers, reason = [], repr(error)
        except BaseException:
            self._call_gave_up(epoch)
            raise
        complete = len(answers) == len(batch)
        if epoch == self._epoch:
            if complete and Outcome.FAILED not in answers:
                self._count_success()
            else:
                self._count_failure(reason or self._fault_of(answers, len(batch)))
        return answers if complete else refused

    def _fault_of(self, answers: Sequence[object], count: int) -> str:
        """Log what is wrong with answers of a medium that has not raised."""
        fault = f"{answers.count(Outcome.FAILED)} of {count} chunks failed"
        if len(answers) != count:
            fault = f"{len(answers)} answers for {count} chunks"
        self._warn("tier %s: %s", self._name, fault)
        return fault

    async def _catch_up(self) -> None:
        """Delete what could not be deleted when it was asked for."""
        if not self._undeleted or self._clock() < self._catch_up_at:
            return
        try:
            await self._delete_all(())
        except Exception as error:
            # No reason to do without what the medium would still answer.
            self._catch_up_at = self._clock() + self._max_cooldown
            self._warn("tier %s: %d chunks are not deleted: %r", self._name, len(self._undeleted), error)

    async def _delete_all(self, batch: Sequence[ChunkKey]) -> Sequence[bool]:
        """Delete every key that should be gone, those of ``batch`` among them."""
        keys, self._undeleted = self._undeleted, set()
        try:
            await self._inner.delete(list(keys))
        except BaseException:
            self._undeleted.update(keys)
            raise
        return [True] * len(batch)

    def _probe_is_due(self) -> bool:
        return self.state is BreakerState.OPEN and self._clock() >= self._open_until

    def _admits(self) -> bool:
        if self._probe_is_due():
            self.state = BreakerState.PROBING
            logger.info("tier %s: circuit breaker lets one batch through", self._name)
            return True
        return self.state is BreakerState.CLOSED

    def _count_success(self) -> None:
        self._failed_in_a_row = 0
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.CLOSED
            self._cooldown = self._first_cooldown
            # Answers of calls that began before the outage say nothing of what comes after it.
            self._epoch += 1
            logger.info("tier %s: circuit breaker closed", self._name)

    def _count_failure(self, reason: str) -> None:
        self._failed_in_a_row += 1
        self._last_failure = reason
        if self.state is BreakerState.PROBING:
            self._cooldown = min(2 * self._cooldown, self._max_cooldown)
            self._break(self._cooldown)
        elif self._failed_in_a_row >= self._failures:
            self._break(self._cooldown)

    def _call_gave_up(self, epoch: int) -> None:
        """A cancelled call says nothing of the medium. If it was the probe, the next call is one."""
        if self.state is BreakerState.PROBING and epoch == self._epoch:
            self._break(0.0)

    def _break(self, seconds: float) -> None:
        self.outages += self.state is BreakerState.CLOSED
        self.state = BreakerState.OPEN
        self._epoch += 1
        self._open_until = self._clock() + seconds
        self._warn_open(
            "tier %s: circuit breaker open for %g s after %d consecutive failures (last: %s)",
            self._name,
            seconds,
            self._failed_in_a_row,
            self._last_failure or "a probe was cancelled",
        )
