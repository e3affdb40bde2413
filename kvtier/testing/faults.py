"""Backend wrappers that inject faults and delays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import anyio

from kvtier.backends.base import Backend, Capabilities, GetItem, Outcome, PutItem
from kvtier.memory.keys import ChunkKey

AnswerT = TypeVar("AnswerT")


class Fault(Enum):
    """A fault of a key, or of the batch that contains it."""

    FAIL = "fail"
    """The key is ``FAILED`` and not found; deleting it has no effect."""
    FULL = "full"
    """``put`` returns ``FULL`` for the key."""
    RAISE = "raise"
    """The whole call raises ``ConnectionError``."""
    SHORT = "short"
    """The call returns one outcome too few."""
    FLIP = "flip"
    """``get`` returns ``OK``, with one bit of the view flipped."""
    FORGET = "forget"
    """``put`` returns ``OK`` but stores nothing."""


class WrapperBackend(Backend):
    """Forwards all calls to the wrapped backend, and has its optional capabilities. Subclass it."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    @property
    def inner(self) -> Backend:
        """The wrapped backend."""
        return self._inner

    async def before_call(self) -> None:
        """Run before each of the four calls below is forwarded. Override it, to do something."""

    async def open(self) -> None:
        """See :meth:`Backend.open`."""
        await self._inner.open()

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        await self._inner.close()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        await self.before_call()
        return await self._inner.contains(keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        await self.before_call()
        return await self._inner.put(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`."""
        await self.before_call()
        return await self._inner.get(items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Backend.delete`."""
        await self.before_call()
        await self._inner.delete(keys)

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the wrapped backend, whose methods are called directly.

        Without ``sealing``, with which objects would be stored without a :meth:`put` of this wrapper.
        """
        return self._inner.capabilities()._replace(sealing=None)


class FaultyBackend(WrapperBackend):
    """A wrapper of ``inner`` that injects :attr:`fault`, which may be changed at any time."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.fault: Fault | None = None
        """The fault to inject, if any."""
        self.only: frozenset[ChunkKey] | None = None
        """The keys affected by the fault; ``None`` for all."""
        self.calls: Counter[str] = Counter()
        """Number of calls per method, without empty batches."""

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        self._on_call("contains", keys)
        held = await self._inner.contains(keys)
        failing = self._affected(keys) if self.fault is Fault.FAIL else frozenset()
        return self._shorten([found and key not in failing for key, found in zip(keys, held, strict=True)])

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.put`."""
        keys = [key for key, _ in items]
        self._on_call("put", keys)
        replacements = {Fault.FAIL: Outcome.FAILED, Fault.FULL: Outcome.FULL, Fault.FORGET: Outcome.OK}
        return await self._replace(self._inner.put, items, replacements)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """See :meth:`Backend.get`."""
        keys = [key for key, _ in items]
        self._on_call("get", keys)
        outcomes = list(await self._replace(self._inner.get, items, {Fault.FAIL: Outcome.FAILED}))
        if self.fault is Fault.FLIP:
            affected = self._affected(keys)
            for at, ((key, view), outcome) in enumerate(zip(items, outcomes, strict=True)):
                if key in affected and outcome in (Outcome.OK, Outcome.VERIFIED):
                    view[len(view) // 2] ^= 1
                    outcomes[at] = Outcome.OK
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """See :meth:`Backend.delete`."""
        self._on_call("delete", keys)
        failing = self._affected(keys) if self.fault is Fault.FAIL else frozenset()
        await self._inner.delete([key for key in keys if key not in failing])

    def _on_call(self, method: str, keys: Sequence[ChunkKey]) -> None:
        self.calls[method] += bool(keys)
        if self.fault is Fault.RAISE and self._affected(keys):
            raise ConnectionError("injected fault")

    def _affected(self, keys: Sequence[ChunkKey]) -> frozenset[ChunkKey]:
        return frozenset(keys) if self.only is None else self.only.intersection(keys)

    async def _replace(
        self,
        operation: Callable[[Sequence[PutItem]], Awaitable[Sequence[Outcome]]],
        items: Sequence[PutItem],
        replacements: Mapping[Fault, Outcome],
    ) -> Sequence[Outcome]:
        outcome = replacements.get(self.fault) if self.fault is not None else None
        affected = self._affected([key for key, _ in items]) if outcome is not None else frozenset()
        answers = iter(await operation([item for item in items if item[0] not in affected]))
        return self._shorten([outcome if outcome and key in affected else next(answers) for key, _ in items])

    def _shorten(self, answers: Sequence[AnswerT]) -> Sequence[AnswerT]:
        return answers[:-1] if self.fault is Fault.SHORT else answers


class SlowBackend(WrapperBackend):
    """A wrapper of ``inner`` whose calls are delayed, or wait for :meth:`resume`.

    Cancellation does not end ``stubborn`` calls early, like calls that wait for a blocked worker thread.
    """

    def __init__(self, inner: Backend, delay: float = 0.0, *, stubborn: bool = False) -> None:
        super().__init__(inner)
        self.delay = delay
        """Added latency of each call, in seconds."""
        self.waiting = 0
        """Number of calls that are being delayed."""
        self._stubborn = stubborn
        self._resumed = anyio.Event()
        self._resumed.set()

    def hang(self) -> None:
        """Make new calls wait for :meth:`resume`."""
        if self._resumed.is_set():
            self._resumed = anyio.Event()

    def resume(self) -> None:
        """Continue waiting calls."""
        self._resumed.set()

    async def before_call(self) -> None:
        """Wait for :meth:`resume`, and for the delay."""
        self.waiting += 1
        try:
            with anyio.CancelScope(shield=self._stubborn):
                await self._resumed.wait()
                await anyio.sleep(self.delay)
        finally:
            self.waiting -= 1
