"""Batches of reads or writes, split into parts of one request each, and the queue of unfinished parts.

Used from the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio

from kvtier import native
from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import Connection
from kvtier.transports.base import Access, RemoteSpan
from kvtier.transports.tcp.wire import MAX_REQUEST_BYTES, MAX_SPANS, is_encodable

if TYPE_CHECKING:
    import kvtier._native as _native

PART_BYTES = 16 << 20
"""Maximum size of one request, unless it is for a single item."""
MIN_PART_BYTES = 4 << 20
"""Minimum size of a part: smaller ones are not worth a further connection."""


class Piece(NamedTuple):
    """A range of bytes of one item."""

    item: int
    span: RemoteSpan
    view: memoryview


class Part:
    """The outstanding pieces of one request of a batch."""

    __slots__ = ("_hashed", "_hashes", "batch", "pieces")

    def __init__(self, batch: Batch, pieces: Iterable[Piece]) -> None:
        self.batch = batch
        self.pieces = deque(pieces)
        self._hashed: list[int] = []
        self._hashes: _native.Hashes | None = None

    def hashes(self) -> _native.Hashes | None:
        """Return what hashes the items that are whole in this part. Call it for each attempt to move them."""
        if self.batch.hashes:
            self._hashed, self._hashes = [], native.core.Hashes()
            for item, _, view in self.pieces:
                if len(view) == self.batch.lengths[item]:
                    self._hashed.append(item)
                    self._hashes.add(view, self.batch.access is Access.READ)
        return self._hashes

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Record the outcome of each piece. The part is done."""
        if self._hashes is not None:
            for item, checksum in zip(self._hashed, self._hashes.digests(), strict=True):
                self.batch.checksums[item] = checksum
        self.batch.settle(zip([piece.item for piece in self.pieces], outcomes, strict=True))
        self.pieces.clear()

    def drop_misses(self, outcomes: Sequence[Outcome]) -> None:
        """Settle and remove the pieces that are not granted. The remaining ones are in flight."""
        missed = [
            piece for piece, outcome in zip(self.pieces, outcomes, strict=True) if outcome is not Outcome.OK
        ]
        if missed:
            self.pieces = deque(
                piece for piece, outcome in zip(self.pieces, outcomes, strict=True) if outcome is Outcome.OK
            )
            self.batch.settle((piece.item, Outcome.MISS) for piece in missed)

    def views(self) -> list[memoryview]:
        """Return the memory of all pieces."""
        return [piece.view for piece in self.pieces]

    def advance(self, received: int) -> None:
        """Record that ``received`` further bytes have arrived."""
        whole: list[tuple[int, Outcome]] = []
        while self.pieces and received >= len(self.pieces[0].view):
            piece = self.pieces.popleft()
            received -= len(piece.view)
            whole.append((piece.item, Outcome.OK))
        if received:
            item, span, view = self.pieces[0]
            rest = RemoteSpan(span.grant, span.offset + received, span.length - received)
            self.pieces[0] = Piece(item, rest, view[received:])
        if whole:
            self.batch.settle(whole)


class Batch:
    """The items of one call. Their memory is in use until :attr:`released`. Used from the event loop."""

    def __init__(
        self,
        access: Access,
        items: Sequence[tuple[RemoteSpan, memoryview]],
        spread: int,
        *,
        hashes: bool = False,
    ) -> None:
        self.access = access
        self.hashes = hashes and native.available()
        self.outcomes = [Outcome.OK] * len(items)
        self.checksums: list[bytes | None] = [None] * len(items)
        """Of what was hashed while it was moved: see :class:`Hashes` of the native core."""
        self.lengths = [len(view) for _, view in items]
        self.released = anyio.Event()
        """Set when the memory is not in use any more: all parts are done, or the batch has ended."""
        self.ended = False
        """Whether the remaining transfers are abandoned: the caller does not wait for them."""
        self._users = 0
        self._left = [0] * len(items)
        share = -(-sum(self.lengths) // spread)
        size = min(max(share, MIN_PART_BYTES), PART_BYTES)
        # An item is not cut if all connections have work nevertheless: only whole ones are hashed.
        size = max(size, min(max(self.lengths, default=0), share, MAX_REQUEST_BYTES))
        self.parts = [Part(self, pieces) for pieces in self._cut(items, size)]
        self._unsettled = sum(self._left)

    def _cut(self, items: Sequence[tuple[RemoteSpan, memoryview]], size: int) -> Iterator[list[Piece]]:
        pieces: list[Piece] = []
        size_so_far = 0
        for item, (span, view) in enumerate(items):
            if span.length != len(view):
                raise ValueError(f"a span has {span.length} bytes and its view {len(view)}")
            if not is_encodable(span):
                self.outcomes[item] = Outcome.MISS
                continue
            start = 0
            if pieces and size_so_far + len(view) > size >= len(view):
                yield pieces
                pieces, size_so_far = [], 0
            while True:
                length = min(len(view) - start, size - size_so_far)
                cut = RemoteSpan(span.grant, span.offset + start, length)
                pieces.append(Piece(item, cut, view[start : start + length]))
                self._left[item] += 1
                start += length
                size_so_far += length
                if size_so_far >= size or len(pieces) == MAX_SPANS:
                    yield pieces
                    pieces, size_so_far = [], 0
                if start == len(view):
                    break
        if pieces:
            yield pieces

    def settle(self, settled: Iterable[tuple[int, Outcome]]) -> None:
        """Record outcomes of pieces, each with the index of its item."""
        for item, outcome in settled:
            self._left[item] -= 1
            self._unsettled -= 1
            if outcome is not Outcome.OK and self.outcomes[item] is not Outcome.FAILED:
                self.outcomes[item] = outcome
        self._release_if_unused()

    def forget(self) -> None:
        """Drop all references to the memory. Call after :attr:`released`."""
        for part in self.parts:
            part.pieces.clear()

    def acquire(self) -> None:
        """Mark the memory of a part as in use."""
        self._users += 1

    def release(self) -> None:
        """Undo one :meth:`acquire`."""
        self._users -= 1
        self._release_if_unused()

    def end(self) -> None:
        """Abandon the batch. Items without an outcome become ``FAILED``."""
        self.ended = True
        for item, left in enumerate(self._left):
            if left and self.outcomes[item] is Outcome.OK:
                self.outcomes[item] = Outcome.FAILED
        self._release_if_unused()

    def _release_if_unused(self) -> None:
        if not self._users and (self.ended or not self._unsettled):
            self.released.set()


class PartQueue:
    """A FIFO queue of parts, and which of them connections are using."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self._in_use: dict[Connection, Sequence[Part]] = {}
        """The parts whose memory a connection is using now."""
        self._interrupted: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, parts: Sequence[Part]) -> None:
        """Append parts."""
        self._parts.extend(parts)

    def requeue(self, parts: Sequence[Part]) -> None:
        """Put unfinished parts back at the front."""
        self._parts.extendleft(part for part in reversed(parts) if part.pieces and not part.batch.ended)

    def next(self, access: Access | None = None) -> Part | None:
        """Remove and return the first part; with ``access``, only if the part has that access."""
        if not self._parts or (access is not None and self._parts[0].batch.access is not access):
            return None
        return self._parts.popleft()

    def clear(self) -> None:
        """Remove all parts."""
        self._parts.clear()

    def fail(self) -> None:
        """Fail all queued parts."""
        batches = {part.batch for part in self._parts}
        self._parts.clear()
        for batch in batches:
            batch.end()

    def abandon(self, batch: Batch) -> None:
        """End a batch, and interrupt the connections that use its memory."""
        batch.end()
        self._parts = deque(part for part in self._parts if part.batch is not batch)
        in_use: set[Part] = set()
        for connection, parts in self._in_use.items():
            if any(part.batch is batch for part in parts):
                in_use.update(parts)
                self._interrupted.add(connection)
                connection.interrupt()
        for part in batch.parts:
            if part not in in_use:
                part.pieces.clear()

    def acquire(self, connection: Connection, parts: Sequence[Part]) -> None:
        """Mark the memory of these parts as in use by a connection. Their batches must not have ended."""
        for part in parts:
            part.batch.acquire()
        self._in_use[connection] = parts

    def release(self, connection: Connection) -> None:
        """Undo :meth:`acquire`."""
        for part in self._in_use.pop(connection):
            part.batch.release()

    def was_interrupted(self, connection: Connection) -> bool:
        """Return whether a connection broke only because of :meth:`abandon`, and reset that."""
        was = connection in self._interrupted
        self._interrupted.discard(connection)
        return was
