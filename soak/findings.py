"""The findings and counts of a run."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import ChannelError
from soak.schedule import Fault
from tests.rigs.cache_process import CacheProcess


@dataclass(frozen=True)
class Finding:
    """A detected defect."""

    kind: str
    what: str
    phase: str
    at: float
    """Seconds since the start of the phase."""
    faults: list[str] = field(default_factory=list)
    """The faults that were active, or had just ended."""


@dataclass
class Applied:
    """An injected fault, with its actual times."""

    fault: Fault
    phase: str
    started: float
    ended: float | None = None
    note: str = ""
    hit: int | None = None
    """How many files, connections or processes were hit; ``None`` for kinds that do not count."""

    def end(self, result: str | int | None) -> None:
        """Record the result: a number that was hit, or a note."""
        self.hit = result if isinstance(result, int) else None
        self.note = "" if result is None else f"{result} hit" if isinstance(result, int) else result

    def __str__(self) -> str:
        until = "…" if self.ended is None else f"{self.ended:7.2f}"
        return f"{self.started:7.2f} to {until:>7} {self.fault}{f' ({self.note})' if self.note else ''}"


RECENT_SECONDS = 5.0
"""How long after its end a fault counts as a possible cause."""
MAX_OF_A_KIND = 50
"""Maximum number of findings of a kind that are kept; all are counted."""


TRIES = 3
"""A fault may find no file or connection at one moment, but not in that many tries."""


class Record:
    """Findings, faults and counts of a run. Thread-safe."""

    def __init__(self) -> None:
        self.log: Path | None = None
        """The file to append each finding to, as a line of JSON."""
        self.findings: list[Finding] = []
        self.found: Counter[str] = Counter()
        self.applied: list[Applied] = []
        self.counts: Counter[str] = Counter()
        self.instances: Counter[str] = Counter()
        """The counts of all cache processes, summed."""
        self.notes: dict[str, Any] = {}
        """Further entries of the report, by name."""
        self._phase = ""
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, phase: str) -> None:
        """Start a phase. Times count from here."""
        self._phase = phase
        self._began = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the start of the phase."""
        return time.monotonic() - self._began

    def seconds(self, monotonic: float) -> float:
        """Convert a time of ``time.monotonic`` to seconds since the start of the phase."""
        return monotonic - self._began

    def find(self, kind: str, what: str, at: float | None = None) -> None:
        """Record a finding."""
        when = self.now if at is None else at
        with self._lock:
            finding = Finding(kind, what, self._phase, round(when, 3), self._in_force(when))
            self.found[kind] += 1
            if self.found[kind] <= MAX_OF_A_KIND:
                self.findings.append(finding)
            if self.log is not None:
                with self.log.open("a") as log:
                    log.write(json.dumps(asdict(finding)) + "\n")

    def _in_force(self, at: float) -> list[str]:
        return [
            str(applied)
            for applied in self.applied
            if applied.phase == self._phase
            and applied.started <= at
            and (applied.ended is None or at <= applied.ended + RECENT_SECONDS)
        ]

    def apply(self, fault: Fault) -> Applied:
        """Record the start of a fault."""
        applied = Applied(fault, self._phase, self.now)
        with self._lock:
            self.applied.append(applied)
        return applied

    def find_without_effect(self) -> None:
        """Report the kinds of faults that were injected some times, and have never hit anything."""
        hits: dict[str, list[int]] = {}
        for applied in self.applied:
            if applied.hit is not None:
                hits.setdefault(applied.fault.kind, []).append(applied.hit)
        for kind, numbers in hits.items():
            if len(numbers) >= TRIES and not any(numbers):
                self.find("fault without effect", f"{kind} has hit nothing in {len(numbers)} times")

    def count(self, what: str, number: int = 1) -> None:
        """Add to a count."""
        with self._lock:
            self.counts[what] += number

    def add_instance(self, cache: CacheProcess) -> None:
        """Add the counts of a cache process before it is stopped, unless it does not answer."""
        with suppress(ChannelError):
            self.instances.update(cache.status()["counts"])

    def timeline(self) -> list[str]:
        """Return all faults, in order of their start."""
        ordered = sorted(self.applied, key=lambda applied: applied.started)
        return [
            f"{phase}: {applied}"
            for phase in dict.fromkeys(each.phase for each in self.applied)
            for applied in ordered
            if applied.phase == phase
        ]

    def write(self, path: Path, **about: Any) -> None:  # noqa: ANN401 - JSON
        """Write the report as JSON."""
        report: Mapping[str, Any] = {
            **about,
            "passed": not self.found,
            "found": dict(self.found),
            "findings": [asdict(finding) for finding in self.findings],
            "counts": dict(self.counts),
            "instances": dict(sorted(self.instances.items())),
            "timeline": self.timeline(),
            **self.notes,
        }
        path.write_text(json.dumps(report, indent=2) + "\n")
