"""Estimates what other settings would hit while a cache serves, without delaying it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from kvtier.cache import TieredCache
from kvtier.concurrency.tasks import open_background_tasks
from kvtier.concurrency.threads import WorkerThreads, let_others_run
from kvtier.events import AnswerEnd, Observer, PromptLookup
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.observability.whatif.answers import report_of
from kvtier.observability.whatif.estimate import Estimate
from kvtier.observability.whatif.report import Report
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings
from kvtier.tiers.planner import FIRST

logger = logging.getLogger("kvtier")

FLUSH_SECONDS = 0.5
"""How long a lookup waits, so that many are processed at once."""
REPORT_SECONDS = 10.0
"""How old the answers may become while there are lookups. They take a millisecond for each two tiers."""
BUDGET = 0.005
"""What the estimate may take of a core."""
BURST_SECONDS = 0.05
"""CPU time that it may take in advance, when it starts or has had nothing to do."""
SLICE_SECONDS = 0.005
"""CPU time of one turn of the thread."""
PAUSE_AFTER_SECONDS = 0.0003
"""For how long the thread keeps the interpreter from the event loop, except for a prompt of many chunks."""
HALVINGS = 4
"""How often the sample is halved at once at most, and if lookups were dropped."""
MAX_BEHIND_SECONDS = 10.0
"""How long a lookup may wait before the sample is lowered."""
MAX_PENDING_BYTES = 4 << 20
"""Limit of what is not processed yet. Further lookups are dropped."""
KEY_OBJECT_BYTES = KEY_BYTES + 41
"""What a key takes in memory, with its place in a sequence."""
LOOKUP_BYTES = 512
"""What a lookup takes besides its keys."""


Observed = PromptLookup | AnswerEnd | Sequence[ChunkKey]
"""A lookup, the end of an answer, or chunks that were stored."""


class Estimator(Observer):
    """Passes lookups to a thread. A failure there ends the estimate, and nothing else."""

    def __init__(self, estimate: Estimate) -> None:
        self._estimate = estimate
        self._began = self._paced = time.monotonic()
        self._pending: deque[tuple[float, int, Observed]] = deque()
        """In their order, with the time at which they came, and their size in bytes."""
        self._looked_up = 0
        """Chunks of all lookups."""
        self._taken_bytes = self._processed_bytes = 0
        """Of what was ever pending. Each is changed in one thread only."""
        self._lower_after = 0
        """How many bytes must be processed before the sample may be lowered again."""
        self._dropped_before = self._taken_before = self._processed_before = 0
        """Lookups that were dropped, and bytes, before it was lowered last."""
        self._threads = WorkerThreads(1)
        self._dropped = 0
        self._cpu_seconds = 0.0
        self._owed = 0.0
        """CPU time that it has taken above its budget."""
        self._stopped = ""
        self._report, self._reported = report_of(estimate, self._began, 0.0, 0), self._began
        self._changed = False
        """Whether something was observed after the report."""

    def observe_lookup(self, lookup: PromptLookup) -> None:
        """Observe a lookup of a prompt. Takes a microsecond, and never raises."""
        self._looked_up += len(lookup.keys)
        if not self._take(lookup, lookup.keys):
            self._dropped += 1

    def observe_answer_end(self, end: AnswerEnd) -> None:
        """Observe the end of an answer. Takes a microsecond, and never raises."""
        self._take(end, (end.key,))

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Observe chunks that were stored."""
        if tier == FIRST and stored:
            self._take(stored, stored)

    def _take(self, item: Observed, keys: Sequence[ChunkKey]) -> bool:
        """Let an item wait for the thread, if there is room."""
        size = len(keys) * KEY_OBJECT_BYTES + LOOKUP_BYTES
        if self._stopped or self._taken_bytes - self._processed_bytes + size > MAX_PENDING_BYTES:
            return False
        # First, so that the thread never finds more processed than taken.
        self._taken_bytes += size
        self._pending.append((time.monotonic(), size, item))
        return True

    async def run(self) -> None:
        """Process what is pending, until it fails or is cancelled."""
        try:
            while not self._stopped:
                await anyio.sleep(FLUSH_SECONDS)
                while (self._pending or self._report_is_due()) and not self._stopped:
                    before = self._cpu_seconds
                    await self._threads(self._process)
                    await self._pace(self._cpu_seconds - before)
        finally:
            self._threads.close()

    async def _pace(self, taken: float) -> None:
        """Wait until the CPU time is within the budget again, except for a burst."""
        now = time.monotonic()
        self._owed = max(0.0, self._owed - BUDGET * (now - self._paced)) + taken
        self._paced = now
        await anyio.sleep(max(0.0, self._owed - BURST_SECONDS) / BUDGET)

    def _process(self) -> None:
        """Process pending lookups for a turn. Runs in the thread."""
        began = paused = time.thread_time()
        estimate, pending = self._estimate, self._pending
        try:
            self._lower_if_behind()
            while pending and (now := time.thread_time()) - began < SLICE_SECONDS:
                if now - paused > PAUSE_AFTER_SECONDS:
                    let_others_run()
                    paused = now
                _, size, item = pending.popleft()
                self._processed_bytes += size
                if isinstance(item, PromptLookup):
                    estimate.observe(item)
                elif isinstance(item, AnswerEnd):
                    estimate.answer_ended(item)
                else:
                    estimate.stored(item)
                self._changed = True
            if self._report_is_due():
                self._make_report()
        except Exception as error:
            logger.debug("the estimate of other settings has failed", exc_info=True)
            self._stopped = f"{type(error).__name__}: {error}"
            logger.warning("whatif: the estimate has stopped, serving goes on: %s", self._stopped)
            pending.clear()
        self._cpu_seconds += time.thread_time() - began

    def _lower_if_behind(self) -> None:
        """Lower the sample if what waits is much or old, and has not become less since it was lowered."""
        waiting = self._taken_bytes - self._processed_bytes
        is_behind = waiting > MAX_PENDING_BYTES // 2 or self._behind_seconds > MAX_BEHIND_SECONDS
        if not is_behind or self._processed_bytes < self._lower_after:
            return
        # Lookups that are dropped distort the distances, a smaller sample only makes them less exact.
        halvings = HALVINGS
        if self._dropped == self._dropped_before:
            taken = self._taken_bytes - self._taken_before
            processed = max(1, self._processed_bytes - self._processed_before)
            # One more than the rates suggest: half the sample takes more than half the time.
            halvings = min(HALVINGS, 1 + (taken // processed).bit_length())
        self._estimate.lower(halvings)
        self._dropped_before = self._dropped
        self._taken_before, self._processed_before = self._taken_bytes, self._processed_bytes
        # What waits now arrived while the sample was larger. A quarter of it shows whether that was enough.
        self._lower_after = self._processed_bytes + waiting // 4

    @property
    def _behind_seconds(self) -> float:
        try:
            return time.monotonic() - self._pending[0][0]
        except IndexError:  # The thread may have taken the last one.
            return 0.0

    def _report_is_due(self) -> bool:
        age = time.monotonic() - self._reported
        return self._changed and (age >= REPORT_SECONDS or not self._report.chunks)

    def _make_report(self) -> None:
        """Answer what is known now, in the thread."""
        self._changed, self._reported = False, time.monotonic()
        share = self._cpu_seconds / max(self._reported - self._began, FLUSH_SECONDS)
        self._report = report_of(self._estimate, self._reported, share, self._dropped)

    def report(self) -> Report:
        """Return what was known :data:`REPORT_SECONDS` ago at most, and what is observed now."""
        looked_up = self._looked_up
        return replace(
            self._report,
            looked_up=looked_up,
            observed=min(1.0, self._estimate.chunks / looked_up) if looked_up else 1.0,
            behind_seconds=self._behind_seconds,
            dropped=self._dropped,
            stopped=self._stopped,
        )


@asynccontextmanager
async def estimating(cache: TieredCache, plugins: Plugins) -> AsyncIterator[Estimator]:
    """Observe the lookups and stores of a cache while the context is open."""
    tiers = [tier.settings for tier in cache.tiers]
    local = [tier for tier in tiers if isinstance(tier, LocalTierSettings)]
    estimator = Estimator(Estimate(plugins, cache.settings, local))
    cache.observe_lookup = estimator.observe_lookup
    cache.observe_answer_end = estimator.observe_answer_end
    cache.add_observer(estimator)
    try:
        async with open_background_tasks() as tasks:
            tasks.start_soon(estimator.run)
            yield estimator
    finally:
        cache.remove_observer(estimator)
        cache.observe_lookup = cache.observe_answer_end = None
