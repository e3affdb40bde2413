"""A Mooncake client that connects lazily, reconnects, and registers memory."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from kvtier.backends.mooncake.library import Code, load_library, set_timeouts
from kvtier.backends.mooncake.settings import MooncakeSettings
from kvtier.memory.arena import address_of

logger = logging.getLogger("kvtier")

Store: TypeAlias = Any
"""``mooncake.store.MooncakeDistributedStore``, which is untyped."""

TRUSTED_SECONDS = 1.0
"""For this long after its last reply, the master is assumed to be reachable."""

KEYS_PER_CALL = 8
"""Larger calls are no faster, and each key of a call may cost a timeout."""


class Unreachable(ConnectionError):
    """The pool does not answer. The message describes what failed."""


class MooncakeClient:
    """The library's client. All methods block and may be called from any thread, :meth:`close` last.

    Methods return the library's codes unchanged, one per key: see :class:`Code`. They raise
    :class:`Unreachable` if the master is unreachable.

    Memory is registered with the library only for RDMA, which requires it. For TCP it is not needed, and
    the library would let any client that reaches its port, which listens on all interfaces, read and write
    registered memory.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        host, _, port = settings.master.rpartition(":")
        self._master = (host.strip("[]"), int(port))
        self._connecting = threading.Lock()
        self._store: Store = None
        self._arena: tuple[int, int] | None = None
        self._registers = settings.protocol == "rdma"
        self._answered = float("-inf")

    def load(self) -> None:
        """Load the library. Raises :class:`kvtier.errors.TierError` if that fails."""
        set_timeouts(self._settings.deadline)
        library = load_library()
        self._new_store = library.MooncakeDistributedStore
        self._placement = library.ReplicateConfig()
        self._placement.replica_num = self._settings.replicas
        if self._settings.soft_pin:
            self._placement.soft_pin_action = library.SoftPinAction.ENABLE

    def close(self) -> None:
        """Leave the pool, after every other call has returned: the library crashes if it is used later."""
        if self._store is not None:
            if self._registers and self._arena is not None:
                self._store.unregister_buffer(self._arena[0])
            self._store.close()
            self._store = None

    def register(self, address: int, length: int) -> None:
        """Register the arena, now and whenever the client rejoins the pool."""
        with self._connecting:
            self._arena = (address, length)
            if self._store is not None:
                self._register_arena(self._store)

    def join(self) -> str:
        """Join the pool, if not done yet, and return this client's name there."""
        name: str = self._joined().get_hostname()
        return name

    def contains(self, names: Sequence[str]) -> list[int]:
        """Return 1 for each name that is held, 0 for each that is not."""
        return self._track(self._joined().batch_is_exist(list(names)))

    def put(self, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        """Store each view, replacing any previous value. Returns 0 on success. Names must be unique."""

        def put(store: Store, names: list[str], addresses: list[int], lengths: list[int]) -> list[int]:
            codes: list[int] = store.batch_upsert_from(names, addresses, lengths, self._placement)
            return codes

        # Python cannot take the address of read-only memory without a copy.
        views = [memoryview(bytearray(view)) if view.readonly else view for view in views]
        return self._move(put, names, views)

    def get(self, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        """Fill each view. Returns the length of each value, even if it is longer than the view."""

        def get(store: Store, names: list[str], addresses: list[int], lengths: list[int]) -> list[int]:
            codes: list[int] = store.batch_get_into(names, addresses, lengths)
            for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
                if codes[index] == Code.BAD_ARGUMENTS and (held := store.get_size(name)) != length:
                    codes[index] = held
            return codes

        return self._move(get, names, views)

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove each name, even one read recently, which the pool would otherwise keep for some seconds."""
        return self._track(self._joined().batch_remove(list(names), True))

    def _move(
        self,
        call: Callable[[Store, list[str], list[int], list[int]], list[int]],
        names: Sequence[str],
        views: Sequence[memoryview],
    ) -> list[int]:
        """Transfer in calls of a few keys each. Starts no further call once the deadline has passed."""
        codes: list[int] = []
        deadline = time.monotonic() + self._settings.deadline
        for part in _parts(names):
            if time.monotonic() > deadline:
                codes += [Code.TRANSFER_FAILED] * (len(names) - len(codes))
                break
            addresses = [address_of(view) for view in views[part]]
            lengths = [len(view) for view in views[part]]
            with self._registered(zip(addresses, lengths, strict=True)) as store:
                codes += self._track(call(store, list(names[part]), addresses, lengths))
        return codes

    def _track(self, codes: list[int]) -> list[int]:
        """Record from the codes whether the master has answered."""
        lost = not {Code.MASTER_LOST, Code.MASTER_LATE}.isdisjoint(codes)
        self._answered = float("-inf") if lost else time.monotonic()
        return codes

    @contextmanager
    def _registered(self, spans: Iterator[tuple[int, int]]) -> Iterator[Store]:
        """Yield the store, with the memory of a call registered.

        Memory outside the arena is registered for this call only. The library refuses to register memory
        that overlaps a registered buffer, and the transfer then fails.
        """
        store = self._joined()
        start, length = self._arena or (0, 0)
        outside = [span for span in spans if self._registers and not start <= span[0] < start + length]
        registered = [address for address, size in outside if store.register_buffer(address, size) == 0]
        try:
            yield store
        finally:
            for address in registered:
                store.unregister_buffer(address)

    def _joined(self) -> Store:
        """Return the library's client, joining the pool if needed. It rejoins by itself after an outage."""
        # Without a master, the library retries for more than four seconds, regardless of its timeouts.
        if time.monotonic() - self._answered > TRUSTED_SECONDS:
            self._connect().close()
        if self._store is not None:
            return self._store
        if not self._connecting.acquire(timeout=self._settings.deadline):
            raise Unreachable("another call is still joining the pool")
        try:
            if self._store is None:
                self._store = self._join_pool()
        finally:
            self._connecting.release()
        return self._store

    def _join_pool(self) -> Store:
        settings = self._settings
        store = self._new_store()
        code = store.setup(
            settings.local_hostname or self._own_address(),
            settings.metadata_server,
            settings.segment_size,
            0,  # No bounce buffer: transfers use the caller's memory.
            settings.protocol,
            settings.device,
            settings.master,
        )
        if code:
            raise Unreachable(f"the master at {settings.master} rejects this client (code {code})")
        self._register_arena(store)
        return store

    def _register_arena(self, store: Store) -> None:
        if not self._registers or self._arena is None:
            return
        if code := store.register_buffer(*self._arena):
            logger.warning(
                "tier %r: the library cannot register the arena (code %d), so all transfers will fail: "
                "check the limit on locked memory (`ulimit -l`)",
                self._settings.name,
                code,
            )

    def _own_address(self) -> str:
        """Return the local address of a connection to the master."""
        with self._connect() as connection:
            address: str = connection.getsockname()[0]
        return address

    def _connect(self) -> socket.socket:
        try:
            return socket.create_connection(self._master, timeout=self._settings.deadline)
        except OSError as error:
            raise Unreachable(
                f"cannot reach the master at {self._settings.master}: {error.strerror or error}"
            ) from error


def _parts(names: Sequence[str]) -> Iterator[slice]:
    """Yield one slice per call. If a call contains a name twice, the library fills only one of the views."""
    start = 0
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen or index - start == KEYS_PER_CALL:
            yield slice(start, index)
            start = index
            seen.clear()
        seen.add(name)
    yield slice(start, len(names))
