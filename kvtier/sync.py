"""The caches for programs without an event loop: the same names and arguments, and methods that block.

::

    from kvtier.sync import TieredCache

    with TieredCache.open() as cache:
        model = cache.model("my-model", token_bytes=4096)
        model.store(tokens, kv)

Each open cache has an event loop in a thread of its own. Any thread may call the methods. The end of the
``with`` block waits for calls in other threads, and later ones raise :class:`kvtier.KVTierError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from kvtier import cache, instance
from kvtier.catalog.hints import ChunkHints
from kvtier.errors import KVTierError
from kvtier.memory.keys import ChunkKey
from kvtier.memory.rows import Rows
from kvtier.pipeline.clear import Cleared
from kvtier.plugins import Plugins
from kvtier.settings import Settings

if TYPE_CHECKING:
    from kvtier.observability.whatif.report import Report

__all__ = ["Instance", "ModelCache", "TieredCache"]

P = ParamSpec("P")
T = TypeVar("T")


class _Loop:
    """The event loop of an open cache."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._calls: set[Future[Any]] = set()
        self._closed = False
        self._lock = Lock()

    @overload
    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T: ...

    @overload
    def call(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T: ...

    def call(self, function: Callable[..., object], *args: object, **named: object) -> object:
        """Call a function or coroutine function there, and wait for its result."""
        with self._lock:  # So that close() knows of every call that has begun.
            if self._closed:
                raise KVTierError(cache.CLOSED)
            call: Future[Any] = self._portal.start_task_soon(partial(function, *args, **named))
            self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call.result()

    def close(self) -> None:
        """Refuse new calls, and wait for those of other threads, and for one that Ctrl-C has interrupted."""
        with self._lock:
            self._closed = True
        # Of a copy, because each call removes itself when it ends.
        wait(self._calls.copy())


@contextmanager
def _open(opening: AbstractAsyncContextManager[T]) -> Iterator[tuple[_Loop, T]]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opening) as opened:
        loop = _Loop(portal)
        try:
            yield loop, opened
        finally:
            loop.close()


class ModelCache:
    """Access to one model's chunks, as :class:`kvtier.ModelCache`. Created with :meth:`TieredCache.model`."""

    def __init__(self, loop: _Loop, wrapped: cache.ModelCache) -> None:
        self._call = loop.call
        self._model = wrapped

    def keys(self, tokens: Sequence[int] | bytes) -> list[ChunkKey]:
        """See :meth:`kvtier.ModelCache.keys`."""
        return self._call(self._model.keys, tokens)

    def store(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """See :meth:`kvtier.ModelCache.store`."""
        return self._call(self._model.store, tokens, rows, hints)

    def retrieve(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """See :meth:`kvtier.ModelCache.retrieve`."""
        return self._call(self._model.retrieve, tokens, rows, hints)

    def held_tokens(self, tokens: Sequence[int]) -> int:
        """See :meth:`kvtier.ModelCache.held_tokens`."""
        return self._call(self._model.held_tokens, tokens)

    def prefetch(self, tokens: Sequence[int]) -> int:
        """See :meth:`kvtier.ModelCache.prefetch`."""
        return self._call(self._model.prefetch, tokens)

    def move(self, tokens: Sequence[int], source: str, target: str, *, copy: bool = False) -> int:
        """See :meth:`kvtier.ModelCache.move`."""
        return self._call(self._model.move, tokens, source, target, copy=copy)

    def pin(self, tokens: Sequence[int], seconds: float | None = None) -> int:
        """See :meth:`kvtier.ModelCache.pin`."""
        return self._call(self._model.pin, tokens, seconds)

    def unpin(self, tokens: Sequence[int]) -> None:
        """See :meth:`kvtier.ModelCache.unpin`."""
        self._call(self._model.unpin, tokens)

    def clear(self, tokens: Sequence[int] | None = None) -> int:
        """See :meth:`kvtier.ModelCache.clear`."""
        return self._call(self._model.clear, tokens)


class TieredCache:
    """A cache of chunks over several tiers, as :class:`kvtier.TieredCache`. Created with :meth:`open`.

    Without the methods for engines, which take keys.
    """

    def __init__(self, loop: _Loop, wrapped: cache.TieredCache) -> None:
        self._loop = loop
        self._call = loop.call
        self._cache = wrapped

    @classmethod
    @contextmanager
    def open(
        cls, settings: Settings | None = None, *, plugins: Plugins | None = None
    ) -> Iterator[TieredCache]:
        """See :meth:`kvtier.TieredCache.open`."""
        with _open(cache.TieredCache.open(settings, plugins=plugins)) as (loop, opened):
            yield cls(loop, opened)

    def model(self, name: str, *, token_bytes: int, salt: str = "") -> ModelCache:
        """See :meth:`kvtier.TieredCache.model`."""
        found = self._call(self._cache.model, name, token_bytes=token_bytes, salt=salt)
        return ModelCache(self._loop, found)

    def clear(self, *, tiers: Sequence[str] | None = None) -> Cleared:
        """Remove all chunks from ``tiers`` or all tiers. See :meth:`kvtier.TieredCache.clear`."""
        return self._call(self._cache.clear, tiers=tiers)

    def drain(self, seconds: float) -> bool:
        """See :meth:`kvtier.TieredCache.drain`."""
        return self._call(self._cache.drain, seconds)

    def status(self) -> dict[str, object]:
        """See :meth:`kvtier.TieredCache.status`."""
        return self._call(self._cache.status)


class Instance:
    """The tiers, peers and controller of a host, as :class:`kvtier.Instance`. Created with :meth:`open`."""

    def __init__(self, loop: _Loop, wrapped: instance.Instance) -> None:
        self._call = loop.call
        self._instance = wrapped
        self.name = wrapped.name
        self.cache = TieredCache(loop, wrapped.cache)

    @classmethod
    @contextmanager
    def open(cls, settings: Settings | None = None, *, plugins: Plugins | None = None) -> Iterator[Instance]:
        """See :meth:`kvtier.Instance.open`."""
        with _open(instance.Instance.open(settings, plugins=plugins)) as (loop, opened):
            yield cls(loop, opened)

    def what_if(self) -> Report | None:
        """See :meth:`kvtier.Instance.what_if`."""
        return self._call(self._instance.what_if)

    def status(self) -> dict[str, object]:
        """See :meth:`kvtier.Instance.status`."""
        return self._call(self._instance.status)
