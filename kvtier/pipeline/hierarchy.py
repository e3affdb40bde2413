"""What all pipeline stages share: the tiers, the catalog, the planner, the counters and the observers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from anyio.abc import TaskGroup

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import ALL_TIERS, Catalog
from kvtier.events import Event, Observer, Report
from kvtier.logs import Findings, RateLimitedLogs
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.usage import Usage
from kvtier.tiers.encoded_seal import Layouts
from kvtier.tiers.host_memory import HostMemory
from kvtier.tiers.level import Level
from kvtier.tiers.planner import FIRST, Transfer, TransferPlanner
from kvtier.tiers.tier import Tier

logger = logging.getLogger("kvtier")


@dataclass
class Hierarchy:
    """The state of an open cache. Stages change it; only the event loop uses it."""

    memory: HostMemory
    lower: Sequence[Tier]
    """The tiers below host memory, fastest first."""
    catalog: Catalog
    planner: TransferPlanner
    tasks: TaskGroup
    observers: list[Observer]
    layouts: Layouts
    """The layouts of the models in use, for codecs."""
    usage: Usage
    """Tokens looked up and hit, by model and tenant."""
    counts: Counter[str] = field(default_factory=Counter)
    """Outcomes since the start, for the status report."""
    quarantined: dict[bytes, int] = field(default_factory=dict)
    """A bit mask of the tiers in which a namespace is in quarantine, see :mod:`kvtier.pipeline.verify`."""

    def __post_init__(self) -> None:
        self.tiers: Sequence[Level] = [self.memory, *self.lower]
        self.warn = RateLimitedLogs(logger)
        """Logs an unexpected miss, at most once a minute per kind, with the number of suppressed ones."""
        self.findings = Findings(logger)

    def tier(self, index: int) -> Tier:
        """Return a tier below host memory."""
        return self.lower[index - 1]

    def length(self, key: ChunkKey) -> int:
        """Return the size of a chunk object; 0 if no tier holds it any more."""
        return self.catalog.length(key) if key in self.catalog else 0

    def usable(self, namespace: bytes) -> int:
        """Return a bit mask of the tiers in which chunks of a namespace may be read and written."""
        mask = self.quarantined.get(namespace, 0)
        return 0 if mask >> FIRST & 1 else ALL_TIERS & ~mask  # All chunks pass through the first tier.

    def usable_of(self, keys: Sequence[ChunkKey]) -> int:
        """Return :meth:`usable` of the namespace of chunks in the catalog. They are of the same one."""
        return self.usable(self.catalog.namespace(keys[0])) if self.quarantined and keys else ALL_TIERS

    def changed(
        self, tier: int, *, stored: Sequence[ChunkKey] = (), removed: Sequence[ChunkKey] = ()
    ) -> None:
        """Notify the observers of chunks that a tier has gained or lost."""
        if stored or removed:
            for observer in self.observers:
                observer.changed(tier, stored, removed)

    def queried(self, tier: Tier, asked: int, found: int, began: float) -> None:
        """Notify the observers of a query of a shared pool that ``began`` at this monotonic time."""
        for observer in self.observers:
            observer.queried(tier.name, asked, found, time.monotonic() - began)

    @contextmanager
    def reporting(self, event: Event, transfer: Transfer) -> Iterator[list[Outcome]]:
        """Time a transfer, and report it with the outcomes that the caller appends to the list."""
        started = time.monotonic()
        outcomes: list[Outcome] = []
        yield outcomes
        report = Report(
            event=event,
            source=self.tiers[transfer.source].name,
            target=None if transfer.target is None else self.tiers[transfer.target].name,
            keys=transfer.keys,
            outcomes=outcomes,
            transferred_bytes=sum(
                self.length(key)
                for key, outcome in zip(transfer.keys, outcomes, strict=True)
                if outcome is Outcome.OK
            ),
            seconds=time.monotonic() - started,
        )
        for observer in self.observers:
            observer.observe(report)
