"""The set of connected peers: configured ones for good, temporary ones while in use."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.bounded import remember
from kvtier.errors import PeerError
from kvtier.logs import printable
from kvtier.peers.client import PeerClient
from kvtier.settings.peer import join_address, split_address

MAX_TEMPORARY_PEERS = 64
"""Temporary peers at once, which the settings do not name."""
MAX_CLOSING = 16
"""Further temporary peers that may still be closing. Beyond that no new one is opened."""
IDLE_SECONDS = 30.0
"""Idle timeout of a temporary peer. It is also dropped when its connection is lost."""
UNUSABLE_SECONDS = 30.0
"""Negative cache of addresses without a peer. Commands bypass it."""
MAX_REMEMBERED = 1024
"""Entries per cache of addresses."""
MAX_ADDRESS_LENGTH = 300


def normal_address(address: str) -> str:
    """Return ``HOST:PORT`` in one form. Raises ``ValueError``, whose message names the mistake."""
    if len(address) > MAX_ADDRESS_LENGTH or not address.isprintable() or " " in address:
        raise ValueError(f"{printable(address)[:MAX_ADDRESS_LENGTH]!r} is not an address")
    host, port = split_address(address)
    return join_address(host.lower(), port)


@dataclass(eq=False)
class _Temporary:
    """One temporary peer: a single connection and its users."""

    client: PeerClient
    scope: CancelScope = field(default_factory=CancelScope)
    users: int = 0

    @property
    def busy(self) -> bool:
        """Whether it is checked out, or has reads in flight."""
        return self.users > 0 or self.client.throughput.in_flight > 0

    def idle_seconds(self, now: float) -> float:
        """Return the seconds since its last use; 0 while busy."""
        return 0.0 if self.busy else now - self.client.last_used


class Roster:
    """All peers. Bound to one event loop; its tasks run in :meth:`run`."""

    def __init__(
        self,
        configured: Sequence[PeerClient],
        make_temporary: Callable[[str], PeerClient],
        *,
        idle: float = IDLE_SECONDS,
    ) -> None:
        self.configured = tuple(configured)
        """Peers of the settings, which every lookup queries."""
        self._by_target = {normal_address(client.address): client for client in configured}
        self._make_temporary = make_temporary
        self._idle = idle
        self._temporary: dict[str, _Temporary] = {}
        self._open = 0
        """Temporary peers whose tasks run, including those that are closing."""
        self._unusable: dict[str, float] = {}
        """Until when an address is skipped, on the clock of :func:`time.monotonic`."""
        self._instances: dict[str, str] = {}
        """Instance names by address, to find addresses that lead to the same instance."""
        self._started = anyio.Event()
        self._tasks: TaskGroup | None = None

    @property
    def clients(self) -> list[PeerClient]:
        """All peers, configured ones first."""
        return [*self.configured, *(entry.client for entry in self._temporary.values())]

    async def run(self) -> None:
        """Run the configured peers, and allow temporary ones, until cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._started.set()
                for client in self.configured:
                    self._tasks.start_soon(client.run)
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    def is_candidate(self, address: str) -> bool:
        """Return whether to connect to an address that the directory names.

        False for configured peers, and for addresses that recently had no peer.
        """
        try:
            target = normal_address(address)
        except ValueError:
            return False
        if target in self._by_target or self._unusable.get(target, 0.0) > time.monotonic():
            return False
        return self._alias(target) not in self.configured

    @asynccontextmanager
    async def checkout(self, address: str, seconds: float) -> AsyncIterator[PeerClient]:
        """Yield an available peer, connecting within ``seconds``. It stays connected until idle for a while.

        Cancellation does not abort a connection attempt. Raises :class:`PeerError`.
        """
        try:
            target = normal_address(address)
        except ValueError as error:
            raise PeerError(str(error)) from error
        # A command or a lookup may come before the backend has connected.
        with anyio.move_on_after(seconds):
            await self._started.wait()
        with self._using(target, address) as client:
            await client.wait_connected(seconds)
            same = self._find_duplicate(target, client)
            if same is None:
                yield client
                return
        with self._in_use(same):
            yield same

    def status(self) -> list[dict[str, object]]:
        """Return the status of each peer."""
        now = time.monotonic()
        configured = [{**client.status(), "temporary": False} for client in self.configured]
        return configured + [
            {
                **entry.client.status(),
                "temporary": True,
                "users": entry.users,
                "idle_seconds": entry.idle_seconds(now),
            }
            for entry in self._temporary.values()
        ]

    # Bookkeeping: synchronous.

    @contextmanager
    def _using(self, target: str, address: str) -> Iterator[PeerClient]:
        client = self._by_target.get(target) or self._alias(target)
        if client is not None and (client.source is not None or client.connecting):
            with self._in_use(client):
                yield client
            return
        # A lost configured peer reconnects on its own schedule; this caller needs it now and connects itself.
        entry = self._temporary.get(target)
        if entry is None or entry.client.lost:
            entry = self._add_temporary(target, address)
        with self._in_use(entry.client):
            yield entry.client

    @contextmanager
    def _in_use(self, client: PeerClient) -> Iterator[None]:
        entry = next((entry for entry in self._temporary.values() if entry.client is client), None)
        if entry is None:
            yield  # Configured peers stay connected anyway.
            return
        entry.users += 1
        try:
            yield
        finally:
            entry.users -= 1
            client.last_used = time.monotonic()

    def _add_temporary(self, target: str, address: str) -> _Temporary:
        if self._tasks is None:
            raise PeerError("the cache is closed or closing")
        if len(self._temporary) >= MAX_TEMPORARY_PEERS:
            unused = [at for at, entry in self._temporary.items() if not entry.busy]
            if not unused:
                raise PeerError(
                    f"all {MAX_TEMPORARY_PEERS} temporary peer connections are in use: retry later"
                )
            oldest = min(unused, key=lambda at: self._temporary[at].client.last_used)
            self._close(oldest, self._temporary[oldest])
        if self._open >= MAX_TEMPORARY_PEERS + MAX_CLOSING:
            raise PeerError("too many peer connections are still closing: retry later")
        entry = self._temporary[target] = _Temporary(self._make_temporary(address))
        entry.client.last_used = time.monotonic()
        self._open += 1
        self._tasks.start_soon(self._serve, target, entry)
        return entry

    def _close(self, target: str, entry: _Temporary) -> None:
        """Cancel its task, and remove it at once so that no caller gets it."""
        entry.scope.cancel()
        self._remove(target, entry)

    def _remove(self, target: str, entry: _Temporary) -> None:
        if self._temporary.get(target) is entry:
            del self._temporary[target]

    def _alias(self, target: str) -> PeerClient | None:
        """Return the available peer that is the same instance as this address, if known."""
        instance = self._instances.get(target)
        if instance is None:
            return None
        return next(
            (client for client in self.clients if client.instance == instance and client.source is not None),
            None,
        )

    def _find_duplicate(self, target: str, client: PeerClient) -> PeerClient | None:
        """Return an existing connection to the same instance under another address, and drop this one."""
        entry = self._temporary.get(target)
        if entry is None or entry.client is not client:
            return None
        remember(self._instances, target, client.instance, MAX_REMEMBERED)
        for other in self.clients:
            if other is not client and other.instance == client.instance and other.source is not None:
                if entry.users == 1:
                    self._close(target, entry)
                return other
        return None

    # Task of one temporary peer.

    async def _serve(self, target: str, entry: _Temporary) -> None:
        try:
            with entry.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._close_when_idle, target, entry)
                    if not await entry.client.run_once():
                        until = time.monotonic() + UNUSABLE_SECONDS
                        remember(self._unusable, target, until, MAX_REMEMBERED)
                    tasks.cancel_scope.cancel()
        finally:
            self._open -= 1
            self._remove(target, entry)

    async def _close_when_idle(self, target: str, entry: _Temporary) -> None:
        while (left := self._idle - entry.idle_seconds(time.monotonic())) > 0:  # noqa: ASYNC110
            await anyio.sleep(left)
        self._close(target, entry)
