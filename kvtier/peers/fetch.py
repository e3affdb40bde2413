"""Read one batch of chunks from several peers, with fail-over."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from kvtier.backends.base import GetItem, Outcome
from kvtier.errors import ChannelError
from kvtier.memory.header import IDENTITY
from kvtier.memory.keys import ChunkKey
from kvtier.peers.client import PeerClient, drop_leases
from kvtier.peers.link_codec import LinkDecoder
from kvtier.peers.remote_leases import RemoteLease
from kvtier.peers.source import Source
from kvtier.peers.throughput import fastest

DONE = (Outcome.OK, Outcome.VERIFIED)

Ask = Callable[[Sequence[ChunkKey]], Awaitable[None]]
"""Requests leases of these keys from every peer."""


@dataclass(slots=True, eq=False)
class _Item:
    """One item of the batch."""

    key: ChunkKey
    view: memoryview
    outcome: Outcome = Outcome.MISS
    requested: bool = False
    """Whether this batch has requested leases of it."""
    tried: set[PeerClient] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Taken:
    """A lease in use, and the item that it serves."""

    item: _Item
    client: PeerClient
    source: Source
    lease: RemoteLease
    target: memoryview
    """What it is read to: the view of the item, unless it is encoded."""


class Fetch:
    """Fills the views of one batch. Each chunk is read from the peer that would deliver it first.

    Leases of chunks that have none are requested once. A chunk that fails or misses at one peer is tried at
    another until the deadline. When :meth:`run` returns, no view is written any more and every lease taken
    has been released.
    """

    def __init__(
        self,
        clients: Sequence[PeerClient],
        items: Sequence[GetItem],
        ask: Ask,
        decoder: LinkDecoder | None = None,
    ) -> None:
        """``decoder``: to request chunks encoded, from peers where that pays."""
        self._clients = clients
        self._decoder = decoder
        self._items = [_Item(key, view) for key, view in items]
        self._ask = ask
        self._taken: dict[_Taken, None] = {}
        self._tasks: TaskGroup

    async def run(self, seconds: float) -> list[Outcome]:
        """Return the outcomes in the order of the items, after at most ``seconds``."""
        try:
            with anyio.move_on_after(seconds) as scope:
                async with anyio.create_task_group() as self._tasks:
                    self._dispatch(self._items)
        finally:
            # What a cancelled read has not released would stay leased at the peer until it expires.
            for taken in list(self._taken):
                self._release(taken)
        if scope.cancelled_caught:
            return [_finished(item.outcome) for item in self._items]
        return [item.outcome for item in self._items]

    def _dispatch(self, items: Sequence[_Item]) -> None:
        """Start reading items that have a lease, and request leases of those that have none."""
        batches: dict[Source, list[_Taken]] = {}
        unleased = []
        for item in items:
            taken = self._choose(item)
            if taken is not None:
                batches.setdefault(taken.source, []).append(taken)
            elif not item.requested:
                unleased.append(item)
        for batch in batches.values():
            ready = [taken for taken in batch if taken.lease.ready]
            later = [taken for taken in batch if not taken.lease.ready]
            if ready:
                self._tasks.start_soon(self._read, ready)
            if later:
                self._tasks.start_soon(self._read_later, later)
        if unleased:
            self._tasks.start_soon(self._request, unleased)

    def _choose(self, item: _Item) -> _Taken | None:
        candidates: list[tuple[PeerClient, Source]] = []
        for client in self._clients:
            source = client.source
            if source is None:
                continue
            if client in item.tried:
                source.leases.drop([item.key])
                continue
            lease = source.leases.find(item.key)
            if lease is None:
                continue
            if lease.length == len(item.view):
                candidates.append((client, source))
            else:
                source.leases.drop([item.key])
                item.tried.add(client)
        if not candidates:
            return None
        client, source = candidates[fastest([client.throughput for client, _ in candidates], len(item.view))]
        lease = source.leases.take(item.key)
        if lease is None:
            return None
        taken = _Taken(item, client, source, lease, item.view)
        self._taken[taken] = None
        client.throughput.assign(lease.length)
        return taken

    async def _request(self, items: Sequence[_Item]) -> None:
        for item in items:
            item.requested = True
        await self._ask([item.key for item in items])
        self._dispatch(items)

    async def _read_later(self, batch: Sequence[_Taken]) -> None:
        """Read chunks that the peer is still promoting, once they are in its memory."""
        await self._read(await self._readable(batch))

    async def _readable(self, batch: Sequence[_Taken], codec: int = IDENTITY) -> Sequence[_Taken]:
        """Wait until the peer has these chunks, with a codec encoded. Return those that it has."""
        try:
            arrived = await batch[0].source.readable([taken.lease for taken in batch], codec)
        except ChannelError:
            self._settle(batch, [Outcome.FAILED] * len(batch))
            return []
        missing = [taken for taken in batch if taken.lease not in arrived]
        self._settle(missing, [Outcome.MISS] * len(missing))
        return [taken for taken in batch if taken.lease in arrived]

    async def _read(self, batch: Sequence[_Taken]) -> None:
        if not batch:
            return
        decoder, codec = self._decoder, batch[0].client.codec(batch[0].source)
        if decoder is not None and decoder.knows(codec):
            await self._read_encoded(batch, codec, decoder)
        else:
            self._settle(batch, await self._transferred(batch))

    async def _read_encoded(self, batch: Sequence[_Taken], codec: int, decoder: LinkDecoder) -> None:
        """Have the peer encode chunks, read them, and decode those that were worth it."""
        choice, began = batch[0].client.choice, time.monotonic()
        batch = await self._readable(batch, codec)
        encoding = time.monotonic() - began
        if not batch:
            return
        encoded = [taken for taken in batch if taken.lease.encoded]
        with decoder.scratch([taken.lease.span.length for taken in encoded]) as buffers:
            for taken, buffer in zip(encoded, buffers, strict=True):
                taken.target = buffer
            outcomes = dict(zip(batch, await self._transferred(batch), strict=True))
            arrived, began = [taken for taken in encoded if outcomes[taken] in DONE], time.monotonic()
            reads = [(taken.item.key, taken.item.view, taken.target) for taken in arrived]
            decoded = await decoder.decode(reads, [outcomes[taken] for taken in arrived])
            seconds = encoding + time.monotonic() - began
        for taken, outcome in zip(arrived, decoded, strict=True):
            outcomes[taken] = outcome
            if outcome not in DONE:  # It would send the same again.
                taken.item.tried.add(taken.client)
        done = [taken for taken, outcome in outcomes.items() if outcome in DONE]
        lengths = sum(taken.lease.length for taken in done), sum(len(taken.target) for taken in done)
        decoder.count(*lengths)
        if choice is not None and choice.needs_trial and len(done) == len(batch):
            choice.tried(*lengths, seconds)
        self._settle(batch, list(outcomes.values()))

    async def _transferred(self, batch: Sequence[_Taken]) -> Sequence[Outcome]:
        """Read chunks to their targets, and measure the link by the bytes that it moves."""
        source, throughput = batch[0].source, batch[0].client.throughput
        length, moved = sum(len(taken.target) for taken in batch), 0
        throughput.begin(length)
        try:
            outcomes = await self._outcomes(source, batch)
            moved = sum(
                len(taken.target) for taken, outcome in zip(batch, outcomes, strict=True) if outcome in DONE
            )
        finally:
            throughput.end(length, moved)
        # Reads that ended with the connection are no measure of the peer's reads.
        if not source.over and not source.unresponsive:
            batch[0].client.record_reads(failed=Outcome.FAILED in outcomes)
        return outcomes

    async def _outcomes(self, source: Source, batch: Sequence[_Taken]) -> Sequence[Outcome]:
        try:
            reads = [(taken.lease, taken.target) for taken in batch]
            outcomes = await source.read(reads, hashes=True)
            if len(outcomes) != len(batch):
                return [Outcome.FAILED] * len(batch)
            return await self._confirmed(source, batch, outcomes) if source.one_sided else outcomes
        except (OSError, ChannelError) as error:
            batch[0].client.record_error(error)
            return [Outcome.FAILED] * len(batch)

    async def _confirmed(
        self, source: Source, batch: Sequence[_Taken], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Return the outcomes, with ``MISS`` for chunks whose lease ended during the read."""
        done = [taken for taken, outcome in zip(batch, outcomes, strict=True) if outcome in DONE]
        for taken in done:
            self._forget(taken)
        valid = await source.confirm([taken.lease for taken in done])
        return [
            Outcome.MISS if outcome in DONE and taken.lease not in valid else outcome
            for taken, outcome in zip(batch, outcomes, strict=True)
        ]

    def _settle(self, batch: Sequence[_Taken], outcomes: Sequence[Outcome]) -> None:
        """Record outcomes, and retry at another peer what was not read."""
        retry = []
        for taken, outcome in zip(batch, outcomes, strict=True):
            self._release(taken)
            item = taken.item
            item.outcome = outcome
            if outcome in DONE:
                drop_leases(self._clients, [item.key])
                continue
            # An old lease may have ended early, so its peer is worth another try; a fresh one is not.
            if outcome is Outcome.FAILED or item.requested:
                item.tried.add(taken.client)
            retry.append(item)
        self._dispatch(retry)

    def _release(self, taken: _Taken) -> None:
        if taken in self._taken:
            self._forget(taken)
            taken.source.release([taken.lease])

    def _forget(self, taken: _Taken) -> None:
        if taken in self._taken:
            del self._taken[taken]
            taken.client.throughput.release(taken.lease.length)


def _finished(outcome: Outcome) -> Outcome:
    """Return the outcome at the deadline: a miss becomes ``FAILED``, as another peer might hold the chunk."""
    return outcome if outcome in DONE else Outcome.FAILED
