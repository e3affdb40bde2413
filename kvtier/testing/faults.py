"""Wrappers that make any backend fail, lie or wait as a test tells them to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import anyio

from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.backends.wrapper import WrapperBackend
from kvtier.keys import ChunkKey

AnswerT = TypeVar("AnswerT")


class Fault(Enum):
    """What goes wrong with a key, or with the batch that it is in."""

    FAIL = "fail"
    """The key is ``FAILED`` and not held; deleting it does nothing."""
    FULL = "full"
    """There is no room to put the key."""
    RAISE = "raise"
    """The whole call raises ``ConnectionError``."""
    SHORT = "short"
    """The call answers one outcome too few."""
    FLIP = "flip"
    """``get`` fills the view with one bit flipped and says ``OK``."""
    FORGET = "forget"
    """``put`` says ``OK`` and stores nothing."""


class FaultyBackend(WrapperBackend):
    """Does what ``inner`` does, except where :attr:`fault` is set; it may be set and unset at any time."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.fault: Fault | None = None
        self.only: frozenset[ChunkKey] | None = None
        """The keys that the fault befalls; ``None`` for all."""
        self.calls: Counter[str] = Counter()
        """How many calls there were of each method, the empty ones not counted."""

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        self._begin("contains", keys)
        held = await self._inner.contains(keys)
        failing = self._befallen(keys) if self.fault is Fault.FAIL else frozenset()
        return self._cut([there and key not in failing for key, there in zip(keys, held, strict=True)])

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        keys = [key for key, _ in items]
        self._begin("put", keys)
        instead = {Fault.FAIL: Outcome.FAILED, Fault.FULL: Outcome.FULL, Fault.FORGET: Outcome.OK}
        return await self._replace(self._inner.put, items, instead)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`."""
        keys = [key for key, _ in items]
        self._begin("get", keys)
        outcomes = await self._replace(self._inner.get, items, {Fault.FAIL: Outcome.FAILED})
        if self.fault is Fault.FLIP:
            befallen = self._befallen(keys)
            for (key, view), outcome in zip(items, outcomes, strict=True):
                if key in befallen and outcome is Outcome.OK:
                    view[len(view) // 2] ^= 1
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Backend.delete`."""
        self._begin("delete", keys)
        failing = self._befallen(keys) if self.fault is Fault.FAIL else frozenset()
        await self._inner.delete([key for key in keys if key not in failing])

    def _begin(self, method: str, keys: Sequence[ChunkKey]) -> None:
        self.calls[method] += bool(keys)
        if self.fault is Fault.RAISE and self._befallen(keys):
            raise ConnectionError("a fault that a test has asked for")

    def _befallen(self, keys: Sequence[ChunkKey]) -> frozenset[ChunkKey]:
        return frozenset(keys) if self.only is None else self.only.intersection(keys)

    async def _replace(
        self,
        operation: Callable[[Sequence[PutItem]], Awaitable[Sequence[Outcome]]],
        items: Sequence[PutItem],
        instead: Mapping[Fault, Outcome],
    ) -> Sequence[Outcome]:
        outcome = instead.get(self.fault) if self.fault is not None else None
        befallen = self._befallen([key for key, _ in items]) if outcome is not None else frozenset()
        answers = iter(await operation([item for item in items if item[0] not in befallen]))
        return self._cut([outcome if outcome and key in befallen else next(answers) for key, _ in items])

    def _cut(self, answers: Sequence[AnswerT]) -> Sequence[AnswerT]:
        return answers[:-1] if self.fault is Fault.SHORT else answers


class SlowBackend(WrapperBackend):
    """Does what ``inner`` does, but later, or not before it is told to.

    ``stubborn`` calls do not end when they are cancelled, but when they would have ended: as a call does
    whose worker thread hangs.
    """

    def __init__(self, inner: Backend, delay: float = 0.0, *, stubborn: bool = False) -> None:
        super().__init__(inner)
        self.delay = delay
        """Seconds that each call takes longer."""
        self.waiting = 0
        """Calls that are being delayed now."""
        self._stubborn = stubborn
        self._go_on = anyio.Event()
        self._go_on.set()

    def hang(self) -> None:
        """Let calls from now on wait for :meth:`resume`."""
        if self._go_on.is_set():
            self._go_on = anyio.Event()

    def resume(self) -> None:
        """Let calls go on."""
        self._go_on.set()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        await self._wait()
        return await self._inner.contains(keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        await self._wait()
        return await self._inner.put(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`."""
        await self._wait()
        return await self._inner.get(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self._wait()
        await self._inner.delete(keys)

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            with anyio.CancelScope(shield=self._stubborn):
                await self._go_on.wait()
                await anyio.sleep(self.delay)
        finally:
            self.waiting -= 1
