"""Interface of eviction policies, which order the chunks of a tier.

:meth:`kvtier.catalog.catalog.Catalog.victims` chooses among them, for :mod:`kvtier.pipeline.allocate` and
:mod:`kvtier.pipeline.evict` in memory, and for :mod:`kvtier.pipeline.write` in lower tiers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from struct import Struct
from typing import ClassVar, Self, cast

from pydantic import Field

from kvtier import native
from kvtier.catalog.hints import NO_HINTS, ChunkHints, HintColumns
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from kvtier.settings.values import SettingsModel
from kvtier.units import Number

_KEY = Struct(f"{KEY_BYTES}s")
NO_PARENT = -1
"""In place of a row: the chunk has no parent, or the catalog does not know it."""


class RemovalReason(Enum):
    """Why a chunk is removed from a tier."""

    EVICTED = "evicted"
    CLEARED = "cleared"
    REPLACED = "replaced"
    """A longer chunk begins with it, or a later state of its prompt was stored."""
    MOVED = "moved"
    EXPIRED = "expired"
    """The pool's time to live has passed, or a temporary entry has ended."""
    LOST = "lost"
    """The medium does not hold it, or it is corrupt."""
    ABORTED = "aborted"
    """It has never arrived."""


class ChunkColumns:
    """The chunks of all tiers as flat columns, indexed by row. Policies only read them.

    A row identifies a chunk from its addition to the first tier until its removal from the last one. It is
    then reused for another chunk, but not before every chunk that names it as its parent is removed.
    """

    def __init__(self) -> None:
        self.keys = bytearray()
        """The keys, one after the other; see :meth:`key`."""
        self.parents = array("i")
        """The row of each chunk's parent, or :data:`NO_PARENT`. The parent may be in no tier."""
        self.lengths = array("Q")
        """The size of each chunk object in bytes, as it is stored in the tier."""
        self.since = array("I")
        """The second in which each chunk was added to its first tier (``GoneChunks.now``)."""
        self.hints = HintColumns()

    def with_own_lengths(self) -> ChunkColumns:
        """Return the same columns, except that lengths differ, for a tier that stores chunks encoded."""
        columns = copy(self)
        columns.lengths = array("Q")
        return columns

    def key(self, row: int) -> ChunkKey:
        """Return the key of the chunk in a row."""
        key: ChunkKey = _KEY.unpack_from(self.keys, row * KEY_BYTES)[0]
        return key

    def keys_of(self, rows: Iterable[int]) -> list[ChunkKey]:
        """Return the keys of the chunks in these rows, in a fraction of the time of :meth:`key` for each."""
        if native.available():
            return cast("list[ChunkKey]", native.core.keys_at(self.keys, rows))
        unpack, keys = _KEY.unpack_from, self.keys
        return [unpack(keys, row * KEY_BYTES)[0] for row in rows]


@dataclass(frozen=True, slots=True)
class IncomingPrompt:
    """Consecutive chunks of one prompt that are not in the tier, and for which there is no room yet."""

    keys: Sequence[ChunkKey]
    lengths: Sequence[int]
    parent: int
    """The row of the chunk before the first, or :data:`NO_PARENT`."""
    parent_key: ChunkKey | None
    """Its key, even if it is not in the catalog; ``None`` at the beginning of a prompt."""
    now: float
    hints: ChunkHints = NO_HINTS


class PolicySettings(SettingsModel):
    """Settings of an eviction policy. Subclass it for more; they are written next to ``type``."""

    type: str = Field(description="Name of the policy.", examples=["lru"])

    def of_sample(self, rate: float) -> Self:
        """Return the settings for a cache that gets ``rate`` of the chunks. By default, the same."""
        return self


class DepthSettings(PolicySettings):
    """Settings of a policy that values chunks by the time to compute them."""

    depth: Number = Field(
        default=0,
        ge=0,
        allow_inf_nan=False,
        description=(
            "Depth in chunks at which a chunk takes twice as long to compute as the first one, since "
            "attention reads all before it: about 128 for a dense model of 8 billion parameters and chunks "
            "of 256 tokens. Deep ones are then worth more, up to 8 times: fewer are found, but more time is "
            "saved. 0: all are worth the same."
        ),
    )

    def of_sample(self, rate: float) -> Self:
        """See :meth:`PolicySettings.of_sample`."""
        return self.model_copy(update={"depth": self.depth * rate})


class EvictionPolicy(ABC):
    """Eviction order of the chunks of one tier. Provided through the hook ``kvtier_eviction_policies``.

    Keep the state in flat arrays or dictionaries of integers: a tier may have ten million chunks, and an
    object per chunk would cost seconds in every full garbage collection. All calls come from the event loop
    and must not block. Each takes time proportional to its arguments.

    Whether a chunk may be evicted is decided by the catalog: a policy knows nothing of pins and leases, and
    need not order chunks of one prompt. The catalog evicts them from the end, each before its parent.
    """

    settings_type: ClassVar[type[PolicySettings]] = PolicySettings

    def __init__(  # noqa: B027 - has a default on purpose
        self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns
    ) -> None:
        """Take validated settings, the tier's capacity (0 for a shared pool) and the catalog's columns."""

    @classmethod
    def factory(
        cls, settings: PolicySettings | None = None, capacity_bytes: int = 0
    ) -> Callable[[ChunkColumns], EvictionPolicy]:
        """Return a function that creates the policy for a catalog."""
        return partial(cls, settings or cls.settings_type(type=""), capacity_bytes)

    @abstractmethod
    def added(self, rows: Sequence[int], now: float) -> None:
        """Called when chunks are added to the tier, each the parent of the next. None of them was in it.

        ``now`` is the time of ``time.monotonic``, here and below.
        """

    @abstractmethod
    def used(self, rows: Sequence[int], now: float) -> None:
        """Called when a prefix is used, with its rows from the root. Some of them may not be in this tier."""

    def missed(self, keys: Sequence[ChunkKey], now: float) -> None:  # noqa: B027 - has a default on purpose
        """Called after :meth:`used` with the chunks of the prompt behind those: they were not found.

        Most are added soon, a long prompt in several parts. A policy can value it as a whole from the first.
        """

    def answer_ended(  # noqa: B027 - has a default on purpose
        self, rows: Sequence[int], keys: Sequence[ChunkKey], now: float, signature: Sequence[int]
    ) -> None:
        """Called when the answer to a prompt has ended: only now can it come back.

        ``keys``: its last two chunks, or its only one, and behind them the last two of the answer, if that
        has any. ``rows``: of those of them that are in the catalog.
        ``signature``: how it ended, see :func:`kvtier.catalog.endings.signature`; empty if unknown.
        """

    def returning(self, now: float) -> Sequence[int]:
        """Return the last rows of prompts that are about to come back, each once. Called twice a second.

        They are brought up to the first tier, unless that declines them. By default, none is known.
        """
        return ()

    @abstractmethod
    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Called when chunks are removed from the tier. Their columns are valid until this returns."""

    def resized(self, row: int, change: int) -> None:  # noqa: B027 - has a default on purpose
        """Called when the length of a chunk of the tier has changed, by ``change`` bytes: it was encoded."""

    def expects(self, row: int) -> bool:
        """Whether a chunk of the tier is likely to be used again. Then a lower tier may keep it, too.

        Asked about new chunks, and about those that leave the tier. By default, nothing is known.
        """
        return False

    def evictable(self, rows: Sequence[int]) -> None:  # noqa: B027 - has a default on purpose
        """Called after a search, with those of its chunks that may leave. They need not, or not yet.

        So a policy that offers last what could not leave knows what could.
        """

    @property
    def declines(self) -> bool:
        """Whether it may prefer what the tier holds to new chunks: see :meth:`victims_for`."""
        return False

    def victims_for(self, prompt: IncomingPrompt) -> Iterator[int]:
        """Yield the rows to evict for new chunks, which no other tier will hold.

        A policy that :attr:`declines` ends where all other rows are worth more than the new chunks. The last
        ones of these may have no room then, and are not stored.
        """
        return self.victims()

    def declined(self, prompt: IncomingPrompt) -> None:  # noqa: B027 - has a default on purpose
        """Called with new chunks that were not stored, because there was no room or it has declined them.

        ``prompt.parent`` is the last chunk of their prompt that is stored.
        """

    @property
    def follows(self) -> str:
        """The policy in whose order it evicts now, if it chooses among several; otherwise empty."""
        return ""

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """Yield the rows of the tier in the order of eviction, each once.

        The catalog stops when it has enough, so compute no more of the order than it asks for. It skips
        chunks that are in use. It calls nothing else until it has stopped, then :meth:`evictable`, and
        :meth:`removed` for those that leave: the others are still in the tier. May reorder the policy's own
        state.
        """


MakePolicy = Callable[[ChunkColumns], EvictionPolicy]
"""Creates a tier's policy for the columns of a catalog."""
