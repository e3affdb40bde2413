"""A Mooncake client that connects lazily, reconnects, and registers memory.

The library takes its timeouts from environment variables only: those of calls to the master whenever a
client is created, those of transfers with the first client. Variables set by the user take precedence.

Names and codes: https://kvcache-ai.github.io/Mooncake, ``mooncake-store/include/types.h`` of Mooncake 0.3.13.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, TypeAlias

from kvtier.backends.mooncake.settings import MooncakeSettings
from kvtier.errors import TierError
from kvtier.memory.arena import address_of

logger = logging.getLogger("kvtier")

Store: TypeAlias = Any
"""``mooncake.store.MooncakeDistributedStore``, which is untyped."""

TIMEOUT_SHARE = 0.9
"""The library's timeout as a share of the tier's deadline, so that its error arrives in time."""
LANES = "16"
"""Maximum connections of the library to one peer. A hanging transfer occupies one."""
TRUSTED_SECONDS = 1.0
"""For this long after its last reply, the master is assumed to be reachable."""
KEYS_PER_CALL = 8
"""Larger calls are no faster, and each key of a call may cost a timeout."""

_set_here: dict[str, str] = {}
"""The environment variables that this process has set."""


class Code(IntEnum):
    """Error codes that the library returns instead of success or a length."""

    NO_ROOM = -200
    BAD_ARGUMENTS = -600
    """Includes a buffer that is too small."""
    TAKEN_OVER = -601
    """Another client has started to replace the value that this one was writing."""
    BEING_WRITTEN = -703
    NOT_HELD = -704
    TRANSFER_FAILED = -800
    MASTER_LOST = -900
    MASTER_LATE = -901


UNREACHED = frozenset({Code.TRANSFER_FAILED, Code.MASTER_LOST, Code.MASTER_LATE})
"""Codes that mean that the pool is unreachable, and do not concern the key."""


class Unreachable(ConnectionError):
    """The pool does not answer. The message describes what failed."""


def load_library() -> Any:  # noqa: ANN401 - a module without types
    """Import ``mooncake.store``. Blocks. Raises :class:`TierError` if that fails."""
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise TierError("the Mooncake client is missing", "pip install 'kvtier[mooncake]'") from error
    except ImportError as error:
        raise TierError(
            f"the Mooncake client cannot be loaded ({error})",
            "install its system libraries, on Debian libibverbs1, librdmacm1 and libnuma1",
        ) from error


def set_timeouts(deadline: float) -> None:
    """Make clients that are created later time out within ``deadline`` seconds, and log errors only.

    If two tiers have different deadlines, the last one set applies to both, for values that the library
    reads only once.
    """
    seconds = str(max(1, int(TIMEOUT_SHARE * deadline)))
    milliseconds = str(max(1, int(1000 * TIMEOUT_SHARE * deadline)))
    values = {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": seconds,
        "MC_TCP_LANES_PER_PEER": LANES,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    for name, value in values.items():
        # Not set, or set here: a value that the user has set stays.
        if os.environ.get(name) == _set_here.get(name) != value:
            os.environ[name] = _set_here[name] = value


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

    def lengths(self, names: Sequence[str]) -> list[int]:
        """Return the length of each value, or a negative code."""
        store, found = self._joined(), []
        for name in names:
            found.append(store.get_size(name))
            if found[-1] in UNREACHED:  # Each further one would wait as long.
                found += found[-1:] * (len(names) - len(found))
                break
        return self._track(found)

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
