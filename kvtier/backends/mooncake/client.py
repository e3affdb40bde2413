"""A Mooncake client that connects when it is first asked, and again; and memory that it may move."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from kvtier.arena import address_of
from kvtier.backends.mooncake.library import Code, limit_waits, load_library
from kvtier.backends.mooncake.settings import MooncakeSettings

logger = logging.getLogger("kvtier")

Store: TypeAlias = Any
"""``mooncake.store.MooncakeDistributedStore``, which has no types."""

TRUSTED_SECONDS = 1.0
"""So long after its last answer the master is not asked whether it is there."""

KEYS_PER_CALL = 8
"""Larger calls are no faster, and each key of a call may cost a time-out."""


class Unreachable(ConnectionError):
    """The pool does not answer; the message says in words what was tried."""


class MooncakeClient:
    """The library's client. All methods block, and may be called from any thread, :meth:`close` last.

    The library's answers come as they are, one for each key: see :class:`Code`. Each call raises
    :class:`Unreachable` where the master is not there.

    Memory is registered with the library only over RDMA, which needs that. TCP does not, and the library
    would let everybody who reaches its port, which is open on all interfaces, read and write the memory.
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
        """Load the library. Raises :class:`kvtier.errors.TierError` where it cannot be."""
        limit_waits(self._settings.deadline)
        library = load_library()
        self._new_store = library.MooncakeDistributedStore
        self._placement = library.ReplicateConfig()
        self._placement.replica_num = self._settings.replicas
        if self._settings.soft_pin:
            self._placement.soft_pin_action = library.SoftPinAction.ENABLE

    def close(self) -> None:
        """Leave the pool, after the last other call: the library crashes where it is asked further."""
        if self._store is not None:
            if self._registers and self._arena is not None:
                self._store.unregister_buffer(self._arena[0])
            self._store.close()
            self._store = None

    def register(self, address: int, length: int) -> None:
        """Name the memory that most chunks come from and go to, now and whenever the pool is joined."""
        with self._connecting:
            self._arena = (address, length)
            if self._store is not None:
                self._register_arena(self._store)

    def join(self) -> str:
        """Be a client of the pool, and tell under which name."""
        name: str = self._joined().get_hostname()
        return name

    def contains(self, names: Sequence[str]) -> list[int]:
        """1 for each name that is held, 0 for each that is not."""
        return self._noted(self._joined().batch_is_exist(list(names)))

    def put(self, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        """Store each view in the place of what is held. 0 where it was done. No name may be there twice."""

        def put(store: Store, names: list[str], addresses: list[int], lengths: list[int]) -> list[int]:
            codes: list[int] = store.batch_upsert_from(names, addresses, lengths, self._placement)
            return codes

        # Memory that cannot be written has no address to be had in Python, but through a copy.
        views = [memoryview(bytearray(view)) if view.readonly else view for view in views]
        return self._move(put, names, views)

    def get(self, names: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        """Fill each view. The length of what is held, also where it is longer than the view."""

        def get(store: Store, names: list[str], addresses: list[int], lengths: list[int]) -> list[int]:
            codes: list[int] = store.batch_get_into(names, addresses, lengths)
            for index, (name, length) in enumerate(zip(names, lengths, strict=True)):
                if codes[index] == Code.BAD_ARGUMENTS and (held := store.get_size(name)) != length:
                    codes[index] = held
            return codes

        return self._move(get, names, views)

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove each name, also one that was just read, which the pool would else keep for some seconds."""
        return self._noted(self._joined().batch_remove(list(names), True))

    def _move(
        self,
        call: Callable[[Store, list[str], list[int], list[int]], list[int]],
        names: Sequence[str],
        views: Sequence[memoryview],
    ) -> list[int]:
        """Some keys a call; once a call has taken as long as all may take, nothing further is begun."""
        codes: list[int] = []
        deadline = time.monotonic() + self._settings.deadline
        for part in _parts(names):
            if time.monotonic() > deadline:
                codes += [Code.TRANSFER_FAILED] * (len(names) - len(codes))
                break
            addresses = [address_of(view) for view in views[part]]
            lengths = [len(view) for view in views[part]]
            with self._registered(zip(addresses, lengths, strict=True)) as store:
                codes += self._noted(call(store, list(names[part]), addresses, lengths))
        return codes

    def _noted(self, codes: list[int]) -> list[int]:
        lost = not {Code.MASTER_LOST, Code.MASTER_LATE}.isdisjoint(codes)
        self._answered = float("-inf") if lost else time.monotonic()
        return codes

    @contextmanager
    def _registered(self, spans: Iterator[tuple[int, int]]) -> Iterator[Store]:
        """The store, which knows the memory of a call while that lasts.

        Memory outside the arena is registered for the call alone. Of memory that overlaps what the library
        knows it takes none, and the transfer fails.
        """
        store = self._joined()
        start, length = self._arena or (0, 0)
        strange = [span for span in spans if self._registers and not start <= span[0] < start + length]
        known = [address for address, size in strange if store.register_buffer(address, size) == 0]
        try:
            yield store
        finally:
            for address in known:
                store.unregister_buffer(address)

    def _joined(self) -> Store:
        """The library's client, which joins anew by itself after the master was away."""
        # Without a master, the library tries for four seconds and more whatever it is told.
        if time.monotonic() - self._answered > TRUSTED_SECONDS:
            self._knock()
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
            0,  # No memory for copies: everything moves from and to the caller's.
            settings.protocol,
            settings.device,
            settings.master,
        )
        if code:
            raise Unreachable(f"the master at {settings.master} does not let this client in (code {code})")
        self._register_arena(store)
        return store

    def _register_arena(self, store: Store) -> None:
        if not self._registers or self._arena is None:
            return
        if code := store.register_buffer(*self._arena):
            logger.warning(
                "tier %r: the library does not take the arena (code %d), and nothing will move: "
                "see how much memory this user may lock (`ulimit -l`)",
                self._settings.name,
                code,
            )

    def _own_address(self) -> str:
        """The address from which this host reaches the master."""
        with self._connected() as connection:
            address: str = connection.getsockname()[0]
        return address

    def _knock(self) -> None:
        self._connected().close()

    def _connected(self) -> socket.socket:
        try:
            return socket.create_connection(self._master, timeout=self._settings.deadline)
        except OSError as error:
            raise Unreachable(
                f"the master at {self._settings.master} is not reached: {error.strerror or error}"
            ) from error


def _parts(names: Sequence[str]) -> Iterator[slice]:
    """Runs of names for one call each. Of a name that is in a call twice the library fills one view only."""
    start = 0
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen or index - start == KEYS_PER_CALL:
            yield slice(start, index)
            start = index
            seen.clear()
        seen.add(name)
    yield slice(start, len(names))
