"""Which peers there are: those of the settings for good, others for as long as somebody has use for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from kvtier.errors import PeerError
from kvtier.peers.client import PeerClient
from kvtier.peers.dialling import printable
from kvtier.settings_peer import split_address

MOST_BORROWED = 64
"""Peers at once that the settings do not name."""
MOST_CLOSING = 16
"""Of those that may be on their way out besides. Where a link is slow to close, no further one is opened."""
IDLE_SECONDS = 30.0
"""A borrowed peer is hung up on when nobody has used it for so long, or when its connection is lost."""
UNUSABLE_SECONDS = 30.0
"""For so long nobody but a command tries an address again at which there was no peer."""
MOST_REMEMBERED = 1024
"""Addresses of which something is remembered."""
LONGEST_ADDRESS = 300

Place = tuple[str, int]
NoteT = TypeVar("NoteT")


def _place(address: str) -> Place:
    """What an address says, however it is written. Raises ``ValueError``, which says what is wrong."""
    if len(address) > LONGEST_ADDRESS or not address.isprintable() or " " in address:
        raise ValueError(f"{printable(address)[:LONGEST_ADDRESS]!r} is no address")
    host, port = split_address(address)
    return host.lower(), port


class _Loan:
    """One borrowed peer: a single connection, and who has use for it."""

    def __init__(self, client: PeerClient) -> None:
        self.client = client
        self.scope = CancelScope()
        self.users = 0

    @property
    def busy(self) -> bool:
        """Whether somebody holds it, or reads from it."""
        return self.users > 0 or self.client.pace.under_way > 0

    def idle_seconds(self, now: float) -> float:
        """For how long nobody has used it."""
        return 0.0 if self.busy else now - self.client.used_at


class Roster:
    """All peers that are connected to. Belongs to one event loop; its tasks run in :meth:`run`."""

    def __init__(
        self,
        configured: Sequence[PeerClient],
        borrow: Callable[[str], PeerClient],
        *,
        idle: float = IDLE_SECONDS,
        most: int = MOST_BORROWED,
    ) -> None:
        self.configured = tuple(configured)
        """Those of the settings, which are always asked."""
        self._by_place = {_place(client.address): client for client in configured}
        self._borrow = borrow
        self._idle = idle
        self._most = most
        self._loans: dict[Place, _Loan] = {}
        self._open = 0
        """Loans whose tasks have not ended: those above, and those that are hung up on."""
        self._unusable: dict[Place, float] = {}
        """Until when nobody is to be looked for there."""
        self._instances: dict[Place, str] = {}
        """Whom a further address leads to that is known by another."""
        self._begun = anyio.Event()
        self._tasks: TaskGroup | None = None

    @property
    def clients(self) -> list[PeerClient]:
        """All of them, the configured ones first."""
        return [*self.configured, *(loan.client for loan in self._loans.values())]

    async def run(self) -> None:
        """Stay connected to the configured ones, and let others be borrowed, until cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._begun.set()
                for client in self.configured:
                    self._tasks.start_soon(client.keep)
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    def may_help(self, address: str) -> bool:
        """Whether a peer that somebody has named at an address is one to borrow.

        Not one that is configured, nor where no peer was of late.
        """
        try:
            place = _place(address)
        except ValueError:
            return False
        if place in self._by_place or self._unusable.get(place, 0.0) > time.monotonic():
            return False
        return self._alias(place) not in self.configured

    @asynccontextmanager
    async def lend(self, address: str, seconds: float) -> AsyncIterator[PeerClient]:
        """A peer that can be asked now, connected within so many seconds; it stays for a while afterwards.

        Cancelled while it is connected, that goes on. Raises :class:`PeerError`, in words.
        """
        try:
            place = _place(address)
        except ValueError as error:
            raise PeerError(str(error)) from error
        with anyio.move_on_after(seconds):
            await self._begun.wait()
        with self._used(place, address) as client:
            await client.ready(seconds)
            same = self._known_otherwise(place, client)
            if same is None:
                yield client
                return
        with self._in_use(same):
            yield same

    def status(self) -> list[dict[str, object]]:
        """Of each peer, for people and tests."""
        now = time.monotonic()
        configured = [{**client.status(), "borrowed": False} for client in self.configured]
        return configured + [
            {
                **loan.client.status(),
                "borrowed": True,
                "users": loan.users,
                "idle_seconds": loan.idle_seconds(now),
            }
            for loan in self._loans.values()
        ]

    # Deciding: synchronous.

    @contextmanager
    def _used(self, place: Place, address: str) -> Iterator[PeerClient]:
        client = self._by_place.get(place) or self._alias(place)
        if client is not None and (client.source is not None or client.connecting):
            with self._in_use(client):
                yield client
            return
        # A configured one that is lost is called at its own times; who needs it now calls it himself.
        loan = self._loans.get(place)
        if loan is None or loan.client.lost:
            loan = self._new_loan(place, address)
        with self._in_use(loan.client):
            yield loan.client

    @contextmanager
    def _in_use(self, client: PeerClient) -> Iterator[None]:
        loan = next((loan for loan in self._loans.values() if loan.client is client), None)
        if loan is None:
            yield  # Configured: it stays anyway.
            return
        loan.users += 1
        try:
            yield
        finally:
            loan.users -= 1
            client.used_at = time.monotonic()

    def _new_loan(self, place: Place, address: str) -> _Loan:
        if self._tasks is None:
            raise PeerError("the way to peers is closed, as the cache is or is about to be")
        if len(self._loans) >= self._most:
            unused = [at for at, loan in self._loans.items() if not loan.busy]
            if not unused:
                raise PeerError(f"{self._most} peers are borrowed and in use, which is the limit: try later")
            oldest = min(unused, key=lambda at: self._loans[at].client.used_at)
            self._hang_up(oldest, self._loans[oldest])
        if self._open >= self._most + MOST_CLOSING:
            raise PeerError("too many connections to peers are about to be closed: try later")
        loan = self._loans[place] = _Loan(self._borrow(address))
        loan.client.used_at = time.monotonic()
        self._open += 1
        self._tasks.start_soon(self._serve, place, loan)
        return loan

    def _hang_up(self, place: Place, loan: _Loan) -> None:
        """At once nobody gets it any longer."""
        loan.scope.cancel()
        self._strike_off(place, loan)

    def _strike_off(self, place: Place, loan: _Loan) -> None:
        if self._loans.get(place) is loan:
            del self._loans[place]

    def _alias(self, place: Place) -> PeerClient | None:
        """The peer that an address was found to lead to, where that can be asked under another one."""
        instance = self._instances.get(place)
        if instance is None:
            return None
        return next(
            (one for one in self.clients if one.instance == instance and one.source is not None), None
        )

    def _known_otherwise(self, place: Place, client: PeerClient) -> PeerClient | None:
        """The same instance, connected to under another address: one connection to each is enough."""
        loan = self._loans.get(place)
        if loan is None or loan.client is not client:
            return None
        _remember(self._instances, place, client.instance)
        for other in self.clients:
            if other is not client and other.instance == client.instance and other.source is not None:
                if loan.users == 1:
                    self._hang_up(place, loan)
                return other
        return None

    # One loan.

    async def _serve(self, place: Place, loan: _Loan) -> None:
        try:
            with loan.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._hang_up_when_idle, place, loan)
                    if not await loan.client.stay():
                        _remember(self._unusable, place, time.monotonic() + UNUSABLE_SECONDS)
                    tasks.cancel_scope.cancel()
        finally:
            self._open -= 1
            self._strike_off(place, loan)

    async def _hang_up_when_idle(self, place: Place, loan: _Loan) -> None:
        while (left := self._idle - loan.idle_seconds(time.monotonic())) > 0:  # noqa: ASYNC110
            await anyio.sleep(left)
        self._hang_up(place, loan)


def _remember(notes: dict[Place, NoteT], place: Place, note: NoteT) -> None:
    """The newest thing known of each address, of a bounded number."""
    notes.pop(place, None)
    notes[place] = note
    if len(notes) > MOST_REMEMBERED:
        del notes[next(iter(notes))]
