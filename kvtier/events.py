"""The four events that move chunks, and the reports that observers receive.

The :class:`~kvtier.tiers.planner.TransferPlanner` plans an event and a pipeline stage executes it. Observers
receive one :class:`Report` per transfer, not per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvtier.backends.base import Outcome
from kvtier.catalog.catalog import ALL_TIERS
from kvtier.catalog.hints import ChunkHints
from kvtier.memory.keys import ChunkKey


class Priority(IntEnum):
    """Priority of an event; lower values run first."""

    REQUESTED = 0
    """A request is waiting for it."""
    AHEAD = 1
    """A request is expected to need it."""
    BACKGROUND = 2
    """Maintenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What the pipeline is asked to do with a batch of keys, in prefix order if they are of one prompt."""

    keys: Sequence[ChunkKey]
    priority: Priority = Priority.BACKGROUND


class Store(Event):
    """Write chunks that became READY in the first tier to the tiers below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Event):
    """Promote chunks that only lower tiers hold into the first tier."""

    among: int = ALL_TIERS
    """Bit mask of the tiers to read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Event):
    """Evict chunks from tier number ``tier``, demoting those that no other tier holds."""

    tier: int


class Encode(Event):
    """Encode chunks that a tier holds as they are, while the machine is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Event):
    """Move chunks from tier ``source`` to tier ``target``; with ``copy`` the source keeps them."""

    source: int
    target: int
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one transfer of an event: one batch between two tiers.

    ``source`` is ``None`` for chunks from an engine, ``target`` is ``None`` for dropped chunks. ``seconds``
    is the time from the start of the transfer until its outcomes were known.
    """

    event: Event
    source: str | None
    target: str | None
    keys: Sequence[ChunkKey]
    outcomes: Sequence[Outcome]
    transferred_bytes: int
    seconds: float


class PromptLookup(NamedTuple):
    """A lookup of a prompt by an engine or a program of this host, when it was made."""

    time: float
    """Of ``time.monotonic``."""
    keys: Sequence[ChunkKey]
    chunk_bytes: int
    """Size of a whole chunk object."""
    chunk_tokens: int
    """Tokens of a whole chunk; 0 if unknown."""
    found: int
    """How many leading chunks this host held."""
    compute_seconds: float = 0.0
    """In which the engine computes a chunk; 0 if unknown."""
    hints: ChunkHints | None = None


class AnswerEnd(NamedTuple):
    """The end of the answer to a prompt that an engine of this host has looked up."""

    time: float
    """Of ``time.monotonic``."""
    key: ChunkKey
    """That of the last chunk of the prompt."""
    signature: Sequence[int]
    """See :meth:`kvtier.catalog.eviction.EvictionPolicy.answer_ended`."""


class Observer(Protocol):
    """Receives every transfer and every change of the catalog. Called in the event loop; must not block.

    Subclass it and implement what is needed: by default, all are ignored.
    """

    def observe(self, report: Report) -> None:
        """Called after each batch, whatever its outcomes."""
        return

    def queried(self, tier: str, asked: int, found: int, seconds: float) -> None:
        """Called when a shared pool has told how many of ``asked`` chunks it holds, or has not answered."""
        return

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Called when chunks became READY in a tier or were removed from it."""
        return
