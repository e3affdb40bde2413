"""The four events that move chunks, and what is told of them.

An event is one batch of keys with an id, a priority and a deadline. It is handed to the
:class:`~kvtier.router.Router` to be planned and to a stage of the pipeline to be carried out. What
became of each transfer goes to the observers as one :class:`Report`, never one per chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from kvtier.backends.base import Outcome
from kvtier.catalog import ALL_TIERS
from kvtier.keys import ChunkKey

_ids = itertools.count(1)


class Priority(IntEnum):
    """Which of two events goes first."""

    REQUESTED = 0
    """A request waits for it."""
    AHEAD = 1
    """Somebody will ask for it."""
    BACKGROUND = 2
    """Housekeeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One batch of keys to be moved; in prefix order where they belong to one prompt."""

    keys: Sequence[ChunkKey]
    priority: Priority = Priority.BACKGROUND
    deadline: float | None = None
    """Seconds that whoever asked will wait; the transfer itself may take longer."""
    id: int = field(default_factory=lambda: next(_ids))


class Store(Event):
    """Chunks have become READY in the first tier: write them on to the tiers below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(Event):
    """Bring chunks that only lower tiers hold into the first."""

    among: int = ALL_TIERS
    """A bit for each tier that they may be read from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Event):
    """Take chunks out of tier number ``tier``, demoting those that would otherwise be lost."""

    tier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Event):
    """Bring chunks from tier ``source`` to tier ``target``; with ``copy`` the source keeps them."""

    source: int
    target: int
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one transfer of an event: one batch between two tiers.

    ``source`` is ``None`` for bytes that came from an engine, ``target`` is ``None`` for bytes that
    were dropped. ``seconds`` is the time from the start of the transfer until its outcome was known.
    """

    event: Event
    source: str | None
    target: str | None
    keys: Sequence[ChunkKey]
    outcomes: Sequence[Outcome]
    transferred_bytes: int
    seconds: float


class Observer(Protocol):
    """Sees every transfer and every change of what is held. Called in the event loop: it must not block."""

    def observe(self, report: Report) -> None:
        """One batch has been carried out, whatever its outcomes."""
        ...

    def changed(self, tier: int, stored: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """Chunks became READY in a tier or left it."""
        ...
