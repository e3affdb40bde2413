"""Whatever happens to copies and to the cache process, a worker reports only what is true, and once.

The worker's side of the connector with loads and saves in random parts, copies that end late or fail, and a
cache process that answers late, never, or is replaced by another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.bridge.protocol import Confirmed
from kvtier.errors import ChannelClosed
from kvtier.integrations.vllm import worker
from kvtier.integrations.vllm.copies import ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout, Region
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.calls import Call, Calls

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))
REGIONS = ((Region("layer", 0, 4096, 4096, 1000),),)
STEPS = 50


class Bridge:
    """A connection to a cache process, which may be replaced by another one whenever it is used."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.newest = 1
        self.epoch = 1
        self.connecting = False
        self.waited = 0.0
        self.arena = object()
        self.staging = None
        self.calls = Calls()
        self.asked: list[tuple[Call[bool], list[int]]] = []
        self.granted_by: dict[int, int] = {}
        """The cache process of each lease. Another one may have granted the same number."""
        self.confirmed: list[int] = []
        self.committed: list[int] = []
        self.abandoned: list[int] = []

    def poll(self, wait: float = 0.0) -> None:
        if self.epoch == 0:
            self.epoch = self.random.choice((0, self.newest))
        elif self.random.random() < 0.01:
            self.epoch, self.newest, self.asked = 0, self.newest + 1, []
            self.calls.fail(ChannelClosed("it was killed"))
        elif self.asked and self.random.random() < 0.5:
            call, leases = self.asked.pop(0)
            held = self.random.random() < 0.9
            self.confirmed += leases if held else []
            self.calls.settle(Confirmed(call.ticket, held))

    def update(self) -> None:
        self.poll()

    def retry_now(self) -> None:
        pass

    def confirm(self, leases: list[int]) -> Call[bool] | None:
        if self.epoch == 0:
            return None
        assert {self.granted_by[lease] for lease in leases} <= {self.epoch}
        call = self.calls.add("confirmations", Confirmed, lambda confirmed: confirmed.held)
        self.asked.append((call, leases))
        return call

    def await_reply(self, call: Call[bool] | None, wait: float) -> bool | None:
        self.poll()
        return None if call is None else call.result

    def fill(self, leases: list[int]) -> list[bool]:
        return [True] * len(leases)

    def commit(self, leases: list[int]) -> bool:
        if self.epoch:
            assert {self.granted_by[lease] for lease in leases} <= {self.epoch}
            self.committed += leases
        return self.epoch != 0

    def abandon(self, leases: list[int], epoch: int = 0) -> None:
        assert {self.granted_by[lease] for lease in leases} <= {epoch}
        self.abandoned += leases

    def close(self) -> None:
        pass


class Copies:
    """Copies that end at any time, or fail."""

    def __init__(self, random: Random, *, deferred: bool) -> None:
        self.random = random
        self.deferred = deferred
        self.running: dict[int, list[int]] = {}
        self.tickets = 0
        self.copied: set[int] = set()
        """The leases of the chunks whose copies have ended."""

    def load(self, memory: object, chunks: Sequence[ChunkCopy], after: Sequence[int] = ()) -> int:
        if self.random.random() < 0.01:
            raise RuntimeError("out of memory")
        self.tickets += 1
        self.running[self.tickets] = [chunk.lease for chunk in chunks]
        if not self.deferred:
            self._end(self.tickets)
        return self.tickets

    def save(self, memory: object, chunks: Sequence[ChunkCopy]) -> int:
        return self.load(memory, chunks)

    def done(self, ticket: int) -> bool:
        if ticket in self.running and self.random.random() < 0.4:
            if self.random.random() < 0.03:
                raise RuntimeError("an illegal memory access")
            self._end(ticket)
        return ticket not in self.running

    def _end(self, ticket: int) -> None:
        self.copied.update(self.running.pop(ticket))

    def hold(self, ticket: int) -> None:
        pass

    def close(self) -> None:
        for ticket in list(self.running):
            self._end(ticket)


@dataclass
class Engine:
    """The scheduler's side: loads and saves of requests, in one or more jobs each."""

    random: Random
    deferred: bool
    leases: int = 0
    requests: int = 0
    loads: dict[str, list[int]] = field(default_factory=dict)
    """The leases of each load that was not reported."""
    parted: dict[str, int] = field(default_factory=dict)
    """Loads of which further jobs will follow, and the epoch of each."""
    saves: dict[str, list[int]] = field(default_factory=dict)
    """The reservations of each request whose last save was not reported."""
    open: set[str] = field(default_factory=set)
    """Requests whose last save was not sent."""
    reported: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.bridge = Bridge(self.random)
        self.copies = Copies(self.random, deferred=self.deferred)
        any_bridge: Any = self.bridge
        model = ModelLayout(LAYOUT, bytes(32), REGIONS, (0,))
        with mock.patch.object(worker, "page_copies", return_value=self.copies):
            self.side = WorkerSide(model, any_bridge, 0)

    def chunks(self, epoch: int, count: int) -> list[ChunkCopy]:
        first, self.leases = self.leases + 1, self.leases + count
        self.bridge.granted_by.update(dict.fromkeys(range(first, first + count), epoch))
        # Each with blocks of its own: what is shared is tested with a stand-in for CUDA.
        return [
            ChunkCopy(lease, lease * 4096, 64, ([lease % 200 * 4 + at + 1 for at in range(4)],))
            for lease in range(first, first + count)
        ]

    def name(self) -> str:
        self.requests += 1
        return f"request {self.requests}"

    def load(self) -> list[Job]:
        """Return the jobs of a step: of new loads, and of those in progress."""
        jobs = []
        names = [self.name() for _ in range(self.random.choice((0, 0, 1, 3)))]
        for name in [*self.parted, *names]:
            if name in self.parted and self.random.random() < 0.5:
                continue
            epoch = self.parted.pop(name, self.bridge.epoch or self.bridge.newest)
            failure = "lost" if self.random.random() < 0.05 else ""
            more = not failure and self.random.random() < 0.5
            chunks = [] if failure else self.chunks(epoch, self.random.randint(0, 3))
            if more:
                self.parted[name] = epoch
            self.loads.setdefault(name, []).extend(chunk.lease for chunk in chunks)
            if failure:
                self.loads[name].append(0)
            jobs.append(Job(name, epoch, chunks, more=more, failure=failure))
        return jobs

    def save(self) -> list[Job]:
        jobs = []
        names = [self.name() for _ in range(self.random.choice((0, 0, 1, 3)))]
        for name in [*sorted(self.open), *names]:
            last = self.random.random() < 0.3
            epoch = self.bridge.epoch or self.bridge.newest
            chunks = [] if last else self.chunks(epoch, self.random.randint(1, 3))
            self.saves.setdefault(name, []).extend(chunk.lease for chunk in chunks)
            self.open.discard(name) if last else self.open.add(name)
            jobs.append(Job(name, epoch, chunks, last=last))
        return jobs

    def step(self, *, last: bool = False) -> None:
        self.side.load([] if last else self.load())
        self.side.save([] if last else self.save())
        self.check(*self.side.take_results())

    def check(self, saved: set[str], loaded: set[str], failed: set[str]) -> None:
        assert failed <= loaded
        self.reported.update((*saved, *loaded))
        for name in loaded - failed:
            leases = set(self.loads[name])
            assert leases <= self.copies.copied, "a copy has not ended"
            assert leases <= set(self.bridge.confirmed), "its leases were not confirmed"
        for name in loaded:
            assert name not in self.parted, "its last job was not sent"
            del self.loads[name]
        for name in saved:
            running = {lease for leases in self.copies.running.values() for lease in leases}
            assert name not in self.open, "its last job was not sent"
            assert running.isdisjoint(self.saves[name]) or not self.healthy(name), "vLLM frees its blocks"
            del self.saves[name]

    def healthy(self, name: str) -> bool:
        """Whether no copy of a request's chunks has failed: it is unknown when those end."""
        return set(self.saves[name]).isdisjoint(self.bridge.abandoned)

    def end(self) -> None:
        """Send the last jobs, and wait until everything is reported."""
        self.side.load([Job(name, epoch, []) for name, epoch in self.parted.items()])
        self.side.save([Job(name, 1, [], last=True) for name in sorted(self.open)])
        self.parted, self.open = {}, set()
        for _ in range(300):
            self.step(last=True)
        assert self.loads == self.saves == {}
        assert set(self.reported.values()) <= {1}
        assert max(Counter(self.bridge.committed).values(), default=1) == 1


@pytest.mark.parametrize("deferred", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_only_what_is_true_is_reported(deferred: bool, seed: int) -> None:
    engine = Engine(Random(seed), deferred)
    for _ in range(STEPS):
        engine.step()
    engine.end()
