"""Hints of a request about its chunks, for eviction policies. They never affect what is a hit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

MAX_TENANTS = 65_535
"""Limit of distinct tenants. Further ones count as no tenant."""
NEVER = 0.0
"""A point in time that is not set."""


MAX_TENANT_CHARACTERS = 64
MAX_SECONDS = 10 * 365 * 86_400

CacheMode = Literal["both", "off", "read", "write"]
"""What a request may use the cache for: to load from it, to store in it, both or neither."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]


class CacheHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hint ``cache`` of a request, which is input of a client: :class:`ChunkHints`, and the mode."""

    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT_CHARACTERS)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    retention: Seconds | None = None
    resume: Seconds | None = None
    recompute: Seconds | None = None
    mode: CacheMode = "both"


class ChunkHints(msgspec.Struct, frozen=True, array_like=True):
    """What a request knows about the future of its chunks. Durations are in seconds from now."""

    tenant: str = ""
    priority: int = 0
    """-100 to 100; chunks with a higher priority are worth more."""
    retention: float | None = None
    """How long the chunks should be kept."""
    resume: float | None = None
    """When the request is expected to continue, for example after a tool call."""
    recompute: float | None = None
    """How long it takes to compute one of the chunks."""


class HintColumns:
    """The hints of chunks as flat columns, indexed by row. Without hints they take no memory.

    Rows beyond the last chunk with a hint have the defaults. Times are those of ``time.monotonic``.
    """

    def __init__(self) -> None:
        self._tenant_numbers: dict[str, int] = {"": 0}
        self.tenant_names = [""]
        """By number."""
        self._tenants = array("I")
        self._priorities = array("b")
        self._retain_until = array("d")
        self._resume_at = array("d")
        self._recompute = array("f")

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, row: int) -> int:
        """Return the number of a chunk's tenant; 0 without one."""
        return self._tenants[row] if row < len(self._tenants) else 0

    def priority(self, row: int) -> int:
        """Return a chunk's priority, by default 0."""
        return self._priorities[row] if row < len(self._priorities) else 0

    def retain_until(self, row: int) -> float:
        """Return until when a chunk should be kept, or :data:`NEVER`."""
        return self._retain_until[row] if row < len(self._retain_until) else NEVER

    def resume_at(self, row: int) -> float:
        """Return when a chunk is expected to be used again, or :data:`NEVER`."""
        return self._resume_at[row] if row < len(self._resume_at) else NEVER

    def recompute_seconds(self, row: int) -> float:
        """Return how long it takes to compute a chunk, or 0 if unknown."""
        return self._recompute[row] if row < len(self._recompute) else 0.0

    def set(self, rows: Sequence[int], hints: ChunkHints, now: float) -> None:
        """Replace the hints of chunks. Hints that only name the tenant replace only the tenant."""
        if not rows:
            return
        columns: tuple[array[Any], ...] = (
            self._tenants,
            self._priorities,
            self._retain_until,
            self._resume_at,
            self._recompute,
        )
        missing = max(rows) + 1 - len(self._tenants)
        if missing > 0:
            for column in columns:
                column.frombytes(bytes(missing * column.itemsize))
        values = (
            self.number(hints.tenant),
            max(-100, min(hints.priority, 100)),
            NEVER if hints.retention is None else now + hints.retention,
            NEVER if hints.resume is None else now + hints.resume,
            hints.recompute or 0.0,
        )
        changed = 1 if hints.tenant and hints == ChunkHints(hints.tenant) else len(columns)
        for column, value in zip(columns[:changed], values, strict=False):
            for row in rows:
                column[row] = value

    def reset(self, row: int) -> None:
        """Forget the hints of a row that is about to be reused."""
        if row < len(self._tenants):
            self.set((row,), NO_HINTS, 0.0)

    def number(self, tenant: str) -> int:
        """Return the number of a tenant, and give it one if there are not too many."""
        numbers = self._tenant_numbers
        if tenant not in numbers and len(numbers) <= MAX_TENANTS:
            numbers[tenant] = len(numbers)
            self.tenant_names.append(tenant)
        return numbers.get(tenant, 0)


NO_HINTS = ChunkHints()
