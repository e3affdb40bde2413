"""Host memory, the first tier: engines write and read it directly, so it leases and adopts chunks.

The catalog is the only index: a chunk's lease is stored under its row there. A chunk is PENDING while an
engine, a peer or a read fills its slice, whose lease the filling code holds, and READY once it is adopted.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import IncomingPrompt, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.rings import cover
from kvtier.catalog.tenants import EvictionScope
from kvtier.memory.arena import Arena, address_of
from kvtier.memory.header import ChunkHeader, parent_and_block_tags, write_headers
from kvtier.memory.keys import ChunkKey
from kvtier.memory.slices import Lease, Leases
from kvtier.settings import TierSettings
from kvtier.tiers.level import ChunkBytes, Level
from kvtier.tiers.planner import FIRST
from kvtier.tiers.sealer import Sealer


@dataclass(slots=True)
class Reservation:
    """Memory for one chunk that an engine, a peer or a program fills, and the lease that keeps it.

    An engine's is complete once all of its ranks have filled their slices.
    """

    in_arena: ClassVar[bool] = True
    """Whether the memory is in the first tier, not in a staging buffer."""
    in_catalog: ClassVar[bool] = True
    """Whether the chunk is PENDING in the first tier until it is complete, or void."""

    header: ChunkHeader
    lease: Lease
    generation: int = 0
    """The chunk's generation in the catalog; see :class:`ChunkBytes`."""
    ranks: int = 0
    """Bit mask of the engine's ranks that have stopped writing to it."""
    void: bool = False
    """Whether a rank did not fill its slice. If it is in the arena, it is not in the catalog then."""
    extends: bytes = b""
    """See :class:`~kvtier.bridge.protocol.Run`."""

    @property
    def key(self) -> ChunkKey:
        """The key of the chunk."""
        return self.header.key

    def complete(self) -> bool:
        """Process that it is filled. Return whether the first tier is to commit it."""
        return True

    def give_up(self) -> None:
        """Release the memory: it will not be filled, and nobody writes to it."""
        self.lease.release()


class HostMemory(Level):
    """The arena and the chunks in it. Synchronous; all methods must be called from the event loop."""

    def __init__(self, settings: TierSettings, arena: Arena, catalog: Catalog, sealer: Sealer) -> None:
        """Takes ownership of ``arena``. ``sealer`` seals its chunks for all users."""
        super().__init__(FIRST, settings, catalog)
        self.arena = arena
        self.sealer = sealer
        self._leases: dict[int, Lease] = {}
        """The lease of each READY chunk, by its row in the catalog."""
        self._places = array("i")
        """The number of its slice plus 1, or 0: see :meth:`Leases.sharing`."""

    @property
    def corrupt(self) -> int:
        """Number of chunks whose header was found corrupt, and dropped."""
        return self.sealer.corrupt

    def close(self) -> None:
        """Release every chunk and the arena."""
        Leases.of(list(self._leases.values())).release_all()
        self._leases.clear()
        self._places = array("i")
        self.arena.close()

    @property
    def free_bytes(self) -> int:
        """Bytes that can be allocated without evicting anything: now, or later in the background."""
        assert self._local is not None
        limit = int(self.arena.capacity * self._local.high_watermark)
        return limit - max(self.arena.used, self.used_bytes)

    # Chunks on their way in.

    def state(self, key: ChunkKey) -> State:
        """Return the state of a chunk here."""
        return self._catalog.state(key, self.index)

    def absent(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the indexes of the keys that are neither READY nor PENDING here."""
        places = self._catalog.places(keys)
        return [at for at, (ready, pending) in enumerate(places) if not (ready | pending) >> self.index & 1]

    def begin(
        self,
        headers: Sequence[ChunkHeader],
        leases: Sequence[Lease],
        hints: Sequence[ChunkHints | None] = (),
    ) -> list[Reservation]:
        """Write the headers of ABSENT chunks of one namespace, and make them PENDING, parents first.

        ``hints``: those of each chunk, or none at all.
        """
        if not headers:
            return []
        view = self.arena.view(0, self.arena.capacity)
        write_headers(view, [(lease.offset, header) for lease, header in zip(leases, headers, strict=True)])
        keys = [header.key for header in headers]
        parents = [header.parent for header in headers]
        lengths = [lease.length for lease in leases]
        namespace, catalog = headers[0].namespace, self._catalog
        of_chunk, rows = hints or [None] * len(keys), []
        for start, stop in chains_of(keys, parents, of_chunk):
            place, run = (State.PENDING, parents[start], namespace, of_chunk[start]), slice(start, stop)
            if stop - start == 1:  # Takes a third of the time, and is the usual case during decode.
                rows.append(catalog.add(keys[start], self.index, lengths[start], *place))
            else:
                rows += catalog.add_chain(keys[run], self.index, lengths[run], *place)
        return list(map(Reservation, headers, leases, catalog.generations(rows)))

    def begin_copies(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Make chunks PENDING that other tiers hold, and that will be read with their headers.

        Return their generations.
        """
        return self._catalog.generations(self._catalog.add_copies(keys, self.index))

    def adopt(self, chunks: Sequence[ChunkBytes] | Sequence[Reservation]) -> list[ChunkKey]:
        """Make filled chunks READY unless they were cleared meanwhile; return them. Takes over the leases."""
        catalog, stored = self._catalog, []
        for chunk in chunks:
            key, lease = chunk.key, chunk.lease
            if catalog.generation(key) != chunk.generation:
                self.abort([key])
                lease.release()
                continue
            if not catalog.partial_matches.knows(key):
                catalog.partial_matches.set(key, *parent_and_block_tags(lease.view))
            row = catalog.set_ready(key, self.index)
            cover(row, self._places)
            self._leases[row], self._places[row] = lease, lease.number + 1
            stored.append(key)
        return stored

    def abort(self, keys: Sequence[ChunkKey]) -> None:
        """Remove PENDING chunks that did not arrive. Their leases belong to the caller."""
        self._catalog.remove_all(keys, self.index, RemovalReason.ABORTED)

    # READY chunks.

    def lease(self, key: ChunkKey) -> Lease | None:
        """Return another lease on a READY chunk, or ``None``; the caller releases it."""
        held = self._held(key)
        return None if held is None else held.share()

    def lease_rows(self, rows: Sequence[int]) -> Leases:
        """Return further leases on the chunks in these catalog rows, up to the first not READY."""
        return Leases.sharing(self.arena, self._places, rows)

    def lease_ready(self, keys: Sequence[ChunkKey]) -> list[ChunkBytes]:
        """Return leases on those of ``keys`` that are READY."""
        rows = ((key, self._catalog.row(key)) for key in keys)
        held = [(key, row, self._leases[row]) for key, row in rows if row is not None and row in self._leases]
        generations = self._catalog.generations([row for _, row, _ in held])
        return [
            ChunkBytes(key, lease.share(), generation)
            for (key, _, lease), generation in zip(held, generations, strict=True)
        ]

    def holds_at(self, key: ChunkKey, chunk: memoryview) -> bool:
        """Whether the READY chunk of a key is at the address of ``chunk``."""
        held = self._held(key)
        return held is not None and address_of(held.view) == address_of(chunk)

    def victims(
        self,
        limit: int,
        needed_bytes: int = sys.maxsize,
        scope: EvictionScope = EvictionScope.ALL,
        prompt: IncomingPrompt | None = None,
    ) -> list[ChunkKey]:
        """Return chunks without other leases, among the ``limit`` first in the order of eviction.

        ``prompt``: see :meth:`Catalog.victims`.
        """
        return self._catalog.victims(self.index, needed_bytes, self._is_leased, limit, scope, prompt)

    def _is_leased(self, row: int) -> bool:
        held = self._leases.get(row)
        return held is None or not held.is_exclusive

    def is_idle(self, key: ChunkKey) -> bool:
        """Whether a chunk is READY, and has no other lease."""
        held = self._held(key)
        return held is not None and held.is_exclusive

    def drop(self, keys: Sequence[ChunkKey], reason: RemovalReason = RemovalReason.EVICTED) -> None:
        """Remove READY chunks. Their memory is freed with the last lease."""
        rows = [row for key in keys if (row := self._catalog.row(key)) is not None]
        self._catalog.remove_all(keys, self.index, reason)
        for row in rows:
            self._places[row] = 0
        Leases.of([self._leases.pop(row) for row in rows]).release_all()

    def _held(self, key: ChunkKey) -> Lease | None:
        row = self._catalog.row(key)
        return None if row is None else self._leases.get(row)


def chains_of(
    keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None], hints: Sequence[ChunkHints | None] = ()
) -> Iterable[tuple[int, int]]:
    """Return the (start, stop) of each run of chunks with equal hints, each the parent of the next one.

    ``hints``: those of each chunk, or none at all.
    """
    starts = [
        at
        for at in range(len(keys))
        if not at or parents[at] != keys[at - 1] or (hints and hints[at] is not hints[at - 1])
    ]
    return pairwise([*starts, len(keys)])
