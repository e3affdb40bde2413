"""One batch of chunks on its way from several peers: who is asked for which, and who instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from kvtier.backends.base import GetItem, Outcome
from kvtier.errors import ChannelError
from kvtier.keys import ChunkKey
from kvtier.peers.client import PeerClient
from kvtier.peers.pace import soonest
from kvtier.peers.promises import Promise
from kvtier.peers.source import Source

Ask = Callable[[Sequence[ChunkKey]], Awaitable[None]]
"""Asks every peer to promise these keys."""


class _Want:
    """One item of the batch."""

    __slots__ = ("asked", "key", "outcome", "tried", "view")

    def __init__(self, item: GetItem) -> None:
        self.key, self.view = item
        self.outcome = Outcome.MISS
        self.asked = False
        """Whether the peers have been asked for it within this batch."""
        self.tried: set[PeerClient] = set()


class _Taken:
    """A promise that is being made use of, and for what."""

    __slots__ = ("client", "promise", "source", "want")

    def __init__(self, want: _Want, client: PeerClient, source: Source, promise: Promise) -> None:
        self.want = want
        self.client = client
        self.source = source
        self.promise = promise


class Fetch:
    """Fills the views of one batch. Each chunk is read from the peer that would bring it soonest.

    What nobody has promised is asked for, once. What fails or misses at one peer is tried at another, for as
    long as the deadline lasts. When :meth:`run` has ended, no view is touched any longer and every promise
    that was taken is given back.
    """

    def __init__(self, clients: Sequence[PeerClient], items: Sequence[GetItem], ask: Ask) -> None:
        self._clients = clients
        self._wants = [_Want(item) for item in items]
        self._ask = ask
        self._taken: dict[_Taken, None] = {}
        self._tasks: TaskGroup

    async def run(self, seconds: float) -> list[Outcome]:
        """The outcomes, in the order of the items, after so many seconds at most."""
        try:
            with anyio.move_on_after(seconds) as scope:
                async with anyio.create_task_group() as self._tasks:
                    self._send_out(self._wants)
        finally:
            for taken in list(self._taken):
                self._give_back(taken)
        if scope.cancelled_caught:
            return [_finished(want.outcome) for want in self._wants]
        return [want.outcome for want in self._wants]

    def _send_out(self, wants: Sequence[_Want]) -> None:
        """Have each of these read by whoever has promised it, or asked for, or given up."""
        batches: dict[Source, list[_Taken]] = {}
        unpromised = []
        for want in wants:
            taken = self._choose(want)
            if taken is not None:
                batches.setdefault(taken.source, []).append(taken)
            elif not want.asked:
                unpromised.append(want)
        for batch in batches.values():
            ready = [taken for taken in batch if taken.promise.ready]
            later = [taken for taken in batch if not taken.promise.ready]
            if ready:
                self._tasks.start_soon(self._read, ready)
            if later:
                self._tasks.start_soon(self._read_later, later)
        if unpromised:
            self._tasks.start_soon(self._ask_for, unpromised)

    def _choose(self, want: _Want) -> _Taken | None:
        able: list[tuple[PeerClient, Source]] = []
        for client in self._clients:
            source = client.source
            if source is None or client in want.tried:
                continue
            promise = source.promises.find(want.key)
            if promise is None:
                continue
            if promise.length == len(want.view):
                able.append((client, source))
            else:
                source.promises.drop([want.key])
                want.tried.add(client)
        if not able:
            return None
        client, source = able[soonest([client.pace for client, _ in able], len(want.view))]
        promise = source.promises.take(want.key)
        if promise is None:
            return None
        taken = _Taken(want, client, source, promise)
        self._taken[taken] = None
        client.pace.choose(promise.length)
        return taken

    async def _ask_for(self, wants: Sequence[_Want]) -> None:
        for want in wants:
            want.asked = True
        await self._ask([want.key for want in wants])
        self._send_out(wants)

    async def _read_later(self, batch: Sequence[_Taken]) -> None:
        """Read what is still on its way into the peer's memory, when it is there."""
        source = batch[0].source
        try:
            arrived = await source.readable([taken.promise for taken in batch])
        except ChannelError:
            self._settle(batch, [Outcome.FAILED] * len(batch))
            return
        self._settle(
            gone := [taken for taken in batch if taken.promise not in arrived], [Outcome.MISS] * len(gone)
        )
        await self._read([taken for taken in batch if taken.promise in arrived])

    async def _read(self, batch: Sequence[_Taken]) -> None:
        if not batch:
            return
        source, pace = batch[0].source, batch[0].client.pace
        moved = 0
        pace.begin()
        try:
            outcomes = await self._outcomes(source, batch)
            moved = sum(
                taken.promise.length
                for taken, outcome in zip(batch, outcomes, strict=True)
                if outcome is Outcome.OK
            )
        finally:
            pace.end(moved)
        if not source.over and not source.silent:
            batch[0].client.note_reads(failed=Outcome.FAILED in outcomes)
        self._settle(batch, outcomes)

    async def _outcomes(self, source: Source, batch: Sequence[_Taken]) -> Sequence[Outcome]:
        try:
            outcomes = await source.read([(taken.promise, taken.want.view) for taken in batch])
            if len(outcomes) != len(batch):
                return [Outcome.FAILED] * len(batch)
            return await self._confirmed(source, batch, outcomes) if source.one_sided else outcomes
        except (OSError, ChannelError) as error:
            batch[0].client.note_error(error)
            return [Outcome.FAILED] * len(batch)

    async def _confirmed(
        self, source: Source, batch: Sequence[_Taken], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Without what was not granted all the while that it was read."""
        done = [taken for taken, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.OK]
        for taken in done:
            self._forget(taken)
        stood = await source.confirm([taken.promise for taken in done])
        return [
            Outcome.MISS if outcome is Outcome.OK and taken.promise not in stood else outcome
            for taken, outcome in zip(batch, outcomes, strict=True)
        ]

    def _settle(self, batch: Sequence[_Taken], outcomes: Sequence[Outcome]) -> None:
        """Enter what became of these, and send out again what another peer may bring."""
        again = []
        for taken, outcome in zip(batch, outcomes, strict=True):
            self._give_back(taken)
            want = taken.want
            want.outcome = outcome
            if outcome is Outcome.OK:
                self._drop_other_promises(want.key)
                continue
            # A promise from before may have ended early; one that was only just given will not do either.
            if outcome is Outcome.FAILED or want.asked:
                want.tried.add(taken.client)
            again.append(want)
        self._send_out(again)

    def _drop_other_promises(self, key: ChunkKey) -> None:
        for client in self._clients:
            if client.source is not None:
                client.source.promises.drop([key])

    def _give_back(self, taken: _Taken) -> None:
        if taken in self._taken:
            self._forget(taken)
            taken.source.release([taken.promise])

    def _forget(self, taken: _Taken) -> None:
        if taken in self._taken:
            del self._taken[taken]
            taken.client.pace.let_go(taken.promise.length)


def _finished(outcome: Outcome) -> Outcome:
    """What an item comes to when there is no time left: another peer might have had it."""
    return outcome if outcome is Outcome.OK else Outcome.FAILED
