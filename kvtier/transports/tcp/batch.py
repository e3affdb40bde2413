"""A batch of reads or writes, cut into the parts that are asked for with one request each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.transports.base import Access, RemoteSpan
from kvtier.transports.tcp.wire import MAX_SPANS, can_be_asked

PART_BYTES = 16 << 20
"""The most of one request."""
LEAST_PART_BYTES = 1 << 20
"""Less is not worth a further connection."""


class Piece(NamedTuple):
    """Bytes of one item."""

    item: int
    span: RemoteSpan
    view: memoryview


class Part:
    """What is left to be done of some pieces of one batch."""

    __slots__ = ("batch", "pieces")

    def __init__(self, batch: Batch, pieces: Iterable[Piece]) -> None:
        self.batch = batch
        self.pieces = deque(pieces)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Note what became of each piece; nothing is left to be done."""
        self.batch.settle(zip([piece.item for piece in self.pieces], outcomes, strict=True))
        self.pieces.clear()

    def drop_misses(self, outcomes: Sequence[Outcome]) -> None:
        """Note which pieces are missing; those that are left are on their way."""
        missed = [
            piece for piece, outcome in zip(self.pieces, outcomes, strict=True) if outcome is not Outcome.OK
        ]
        if missed:
            self.pieces = deque(
                piece for piece, outcome in zip(self.pieces, outcomes, strict=True) if outcome is Outcome.OK
            )
            self.batch.settle((piece.item, Outcome.MISS) for piece in missed)

    def views(self) -> list[memoryview]:
        """The memory of all pieces."""
        return [piece.view for piece in self.pieces]

    def advance(self, received: int) -> None:
        """Note that so many bytes of it have come."""
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
    """One call. Its memory is others' until :attr:`let_go`. Used from the event loop."""

    def __init__(self, access: Access, items: Sequence[tuple[RemoteSpan, memoryview]], spread: int) -> None:
        self.access = access
        self.outcomes = [Outcome.OK] * len(items)
        self.let_go = asyncio.Event()
        """Nobody uses the memory any more: it is done, or over."""
        self.is_over = False
        """Nobody waits for it any longer."""
        self._gripped = 0
        self._left = [0] * len(items)
        total = sum(len(view) for _, view in items)
        size = min(max(-(-total // spread), LEAST_PART_BYTES), PART_BYTES)
        self.parts = [Part(self, pieces) for pieces in self._cut(items, size)]
        self._unsettled = sum(self._left)

    def _cut(self, items: Sequence[tuple[RemoteSpan, memoryview]], size: int) -> Iterator[list[Piece]]:
        pieces: list[Piece] = []
        held = 0
        for item, (span, view) in enumerate(items):
            if span.length != len(view):
                raise ValueError(f"a span of {span.length} bytes and a view of {len(view)}")
            if not can_be_asked(span):
                self.outcomes[item] = Outcome.MISS
                continue
            start = 0
            while True:
                length = min(len(view) - start, size - held)
                cut = RemoteSpan(span.grant, span.offset + start, length)
                pieces.append(Piece(item, cut, view[start : start + length]))
                self._left[item] += 1
                start += length
                held += length
                if held >= size or len(pieces) == MAX_SPANS:
                    yield pieces
                    pieces, held = [], 0
                if start == len(view):
                    break
        if pieces:
            yield pieces

    def settle(self, settled: Iterable[tuple[int, Outcome]]) -> None:
        """Note outcomes of pieces, by their items."""
        for item, outcome in settled:
            self._left[item] -= 1
            self._unsettled -= 1
            if outcome is not Outcome.OK and self.outcomes[item] is not Outcome.FAILED:
                self.outcomes[item] = outcome
        self._tell()

    def forget(self) -> None:
        """Hold no memory any longer. Once it has been let go of."""
        for part in self.parts:
            part.pieces.clear()

    def grip(self) -> None:
        """The memory of a part is about to be used."""
        self._gripped += 1

    def ungrip(self) -> None:
        """It is not any longer."""
        self._gripped -= 1
        self._tell()

    def end(self) -> None:
        """Nobody waits for it any longer: what has no outcome has failed."""
        self.is_over = True
        for item, left in enumerate(self._left):
            if left and self.outcomes[item] is Outcome.OK:
                self.outcomes[item] = Outcome.FAILED
        self._tell()

    def _tell(self) -> None:
        if not self._gripped and (self.is_over or not self._unsettled):
            self.let_go.set()
