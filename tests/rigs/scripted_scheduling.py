"""The scheduler's side of a connector, step by step, with a scripted cache process and idle workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvtier import Settings
from kvtier.bridge.client import LookupState, SchedulerBridge
from kvtier.bridge.protocol import Found, Lookup, Reserve, Reserved
from kvtier.integrations.vllm.layout import ModelLayout, Region
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.integrations.vllm.weights import EngineWeights
from kvtier.memory.keys import KEY_BYTES
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from tests.rigs import stepping
from tests.rigs.scripted_server import ScriptedCache, scheduler_of
from tests.rigs.stepping import BLOCK_TOKENS, CHUNK_TOKENS, Request, make_request
from tests.rigs.waiting import wait_until

BLOCKS = 1000
LAYOUT = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (1024, 1024)),))


def chunk_counts(reserve: Reserve) -> list[int]:
    """Return the number of chunks of each run of a reservation."""
    return [len(run.keys) // KEY_BYTES for run in reserve.runs]


class Worker:
    """A worker side that copies nothing and records its jobs."""

    def __init__(self) -> None:
        self.saves: list[Job] = []
        self.loads: list[Job] = []

    def load(self, jobs: list[Job]) -> None:
        self.loads += jobs

    def save(self, jobs: list[Job]) -> None:
        self.saves += jobs

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        return {job.request_id for job in self.saves if job.last}, set(), set()


class Engine(stepping.Engine):
    """An engine with a stand-in worker side, before any request."""

    def __init__(self, cache: ScriptedCache, bridge: SchedulerBridge) -> None:
        self.cache = cache
        self.bridge = bridge
        worker: Any = Worker()
        self.saves: list[Job] = worker.saves
        self.loads: list[Job] = worker.loads
        """The jobs that the workers were given so far."""
        self.layout = LAYOUT
        bridges: Any = (bridge,)
        super().__init__(self._side(), worker, bridges)

    def replace_scheduler(self, layout: ChunkLayout = LAYOUT, **options: Any) -> None:
        """Use a new scheduler's side, of a model with another layout, or with options of its own."""
        self.layout = layout
        self.scheduler = self._side(**options)

    def _side(self, *, verify: float = 0.0, **options: Any) -> SchedulerSide:
        layout = self.layout
        groups = range(len(layout.groups))
        regions = tuple((Region(f"layer {group}", 0, 1024, 1024, BLOCKS),) for group in groups)
        model = ModelLayout(layout, namespace("model", layout), regions, group_ids=tuple(groups))
        weights = EngineWeights("", lambda weights_id: namespace("model", layout, weights_id))
        settings = Settings(chunk_tokens=CHUNK_TOKENS, verify=verify)
        return SchedulerSide(settings, model, self.bridge, weights=weights, **options)

    def ask(self, request: Request) -> Lookup:
        """Let a request arrive; return its lookup, which is not answered yet."""
        self.scheduler.on_new_request(request)
        return self.cache.receive(Lookup)

    def find(self, request: Request, *leases: int) -> Lookup:
        """Let a request arrive, whose first chunks are found, with these leases; return its lookup."""
        look_up = self.ask(request)
        self.answer(look_up, *leases)
        self.wait_for_hit(request, len(leases) * CHUNK_TOKENS)
        return look_up

    def answer(self, look_up: Lookup, *leases: int) -> None:
        """Answer a lookup: so many chunks are in memory, and no others are held."""
        offsets = [4096 * lease for lease in leases]
        self.cache.send(Found(look_up.ticket, list(leases), offsets, [0] * len(leases), 0))

    def wait_for_hit(self, request: Request, tokens: int) -> None:
        """Ask for the hit of a request until it is so many tokens."""
        wait_until(lambda: self.scheduler.matched_tokens(request, 0) == (tokens, tokens > 0))

    def load(self, request: Request, *leases: int) -> Lookup:
        """Let a request arrive, whose first chunks are found and loaded; return its lookup."""
        look_up = self.find(request, *leases)
        tokens = len(leases) * CHUNK_TOKENS
        self.scheduler.allocated(request, self.blocks(list(range(1, 65))), tokens)
        return look_up

    def start(self, request: Request, *leases: int) -> Lookup:
        """Let a request arrive, and let the next step compute what is not found of it."""
        look_up = self.find(request, *leases)
        self.admit(request)
        tokens = len(leases) * CHUNK_TOKENS
        self.scheduler.allocated(request, self.blocks(self.tables[request.request_id]), tokens)
        request.num_computed_tokens = tokens
        return look_up

    def start_misses(self, count: int, tokens: int = 16 * CHUNK_TOKENS) -> list[Request]:
        """Start requests of which nothing is found. The next step may wait again."""
        requests = [make_request(tokens) for _ in range(count)]
        for request in requests:
            self.start(request)
        self.step(0)
        return requests

    def settle(self) -> None:
        """Wait until everything is answered."""
        wait_until(lambda: (self.bridge.poll(), not self.bridge.calls)[1])

    def grant(
        self, reserve: Reserve | None = None, *, first: int = 1, settle: bool = True, again: bool = False
    ) -> list[int]:
        """Grant every chunk of a reservation, by default the next one; return the leases.

        ``again``: whether the chunks of prompts are to be offered again.
        """
        reserve = reserve or self.cache.receive(Reserve)
        count = sum(chunk_counts(reserve))
        leases = list(range(first, first + count))
        offsets = [4096 * (at % 64) for at in range(count)]
        self.cache.send(Reserved(reserve.ticket, leases, offsets, offer_again=again, lacks_room=again))
        if settle:
            self.settle()
        return leases

    def lose_connection(self) -> None:
        """End the connection, and wait until the engine knows."""
        self.cache.disconnect()
        wait_until(lambda: (self.bridge.update(), not self.bridge.connected)[1])

    def known(self, ticket: int) -> LookupState:
        """Return what is known of a lookup, after reading what has arrived."""
        self.bridge.poll()
        lookup = self.bridge.found(ticket)
        assert lookup is not None
        return lookup

    def change_welcome(self, **fields: Any) -> None:
        """Let the cache process have said something else of itself."""
        assert self.bridge.welcome is not None
        self.bridge.welcome = msgspec.structs.replace(self.bridge.welcome, **fields)

    def counts(self) -> dict[str, Any]:
        """Return the counters of the scheduler's side since the last call."""
        stats = self.scheduler.take_stats()
        assert stats is not None
        return stats.data

    def saved(self) -> list[int]:
        """Return the leases of all saves so far."""
        return [lease for job in self.saves for lease in job.leases]


@contextmanager
def scripted_engine(socket: Path) -> Iterator[Engine]:
    """Open an engine that is connected to a scripted cache process on ``socket``."""
    with scheduler_of(socket) as (cache, bridge):
        yield Engine(cache, bridge)
