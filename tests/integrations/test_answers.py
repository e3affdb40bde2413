"""Whatever a cache process answers, and whenever: vLLM takes no token for computed that was not loaded.

The scheduler's side of the connector runs between two models. That of vLLM's scheduler asks, allocates,
computes, preempts and aborts. That of a cache process answers in pieces, late, or not at all, between any two
hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvtier import Settings
from kvtier.bridge import client as bridge_module
from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import Abandon, Cancel, Found, Hello, Lookup, Reserve, Reserved, Welcome
from kvtier.errors import ChannelClosed
from kvtier.integrations.vllm import saves as saves_module
from kvtier.integrations.vllm import scheduler as scheduler_module
from kvtier.integrations.vllm.copies import NULL_BLOCK, ChunkCopy
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.metadata import Job
from kvtier.integrations.vllm.multi_part import SchedulerSides
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.integrations.vllm.weights import EngineWeights
from kvtier.memory.keys import BLOCK_HASH_BYTES, ChunkKey, block_hashes, split_keys
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout
from kvtier.rpc import client as client_module
from tests.rigs.stepping import make_request

CHUNK, BLOCK, WINDOW = 64, 16, 40
BLOCKS = CHUNK // BLOCK
MAX_TOKENS = 6 * CHUNK
STEPS = 60
ATTENTION = GroupLayout(BLOCK, (64,))
LAYOUTS = {
    "attention": ChunkLayout(CHUNK, (ATTENTION,)),
    "window": ChunkLayout(CHUNK, (ATTENTION, GroupLayout(BLOCK, (64,), window=WINDOW))),
    "states": ChunkLayout(CHUNK, (ATTENTION, GroupLayout(CHUNK, (64,), state=True))),
}


class Content(NamedTuple):
    """What a lease holds."""

    prompt: str
    """The request whose tokens these are."""
    chunk: int
    tokens: int
    """How many of its tokens are those of the prompt; :data:`STATE_TOKENS` for the state at its end."""


@dataclass(repr=False)
class CacheModel:
    """Answers each request as a cache process may, in messages that arrive one by one."""

    random: Random
    layout: ChunkLayout
    epoch: int = 1
    pending: list[Any] = field(default_factory=list)
    leases: dict[int, Content] = field(default_factory=dict)
    """What is leased for lookups."""
    reserved: dict[int, ChunkKey] = field(default_factory=dict)
    lookups: dict[int, list[int]] = field(default_factory=dict)
    keys: dict[ChunkKey, tuple[str, int]] = field(default_factory=dict)
    """The request and the number of each chunk that was looked up."""
    asking: Any = None
    """The request for which the connector is called."""
    verified: set[str] = field(default_factory=set)
    """The requests that are computed to verify what is held."""
    last: int = 0

    def lease(self) -> int:
        self.last += 1
        return self.last

    def take(self, message: Any) -> None:
        match message:
            case Lookup():
                self.pending += self.look_up(message)
            case Reserve():
                keys = [key for run in message.runs for key in split_keys(run.keys)]
                self.verified.update(run.recomputes.request_id for run in message.runs if run.recomputes)
                leases = [self.random.choice((self.lease(), self.lease(), 0)) for _ in keys]
                self.reserved.update((lease, key) for lease, key in zip(leases, keys, strict=True) if lease)
                again = self.random.random() < 0.5
                offsets = [0] * len(leases)
                self.pending.append(
                    Reserved(message.ticket, leases, offsets, offer_again=again, lacks_room=again)
                )
            case Cancel():
                for lease in self.lookups.pop(message.ticket, ()):
                    self.leases.pop(lease, None)
                self.pending = [
                    answer
                    for answer in self.pending
                    if not (isinstance(answer, Found) and answer.ticket == message.ticket)
                    or self.random.random() < 0.5  # It was in flight.
                ]
            case Abandon():
                for lease in message.leases:
                    del self.reserved[lease]

    def look_up(self, message: Lookup) -> Iterator[Found]:
        """Yield the answers to a lookup: what is in memory, then what arrives, if it does."""
        keys, name = split_keys(message.keys), self.asking.request_id
        self.keys.update((key, (name, at)) for at, key in enumerate(keys))
        held = self.random.randint(0, len(keys))
        contents = [Content(name, at, min(CHUNK, message.tokens - at * CHUNK)) for at in range(held)]
        more: dict[str, Any] = {}
        last: dict[str, Any] = {}
        if self.layout.has_states:
            boundary = self.random.randint(0, held)
            contents = contents[:boundary] + [Content(name, boundary, STATE_TOKENS)] * bool(boundary)
            more = {"held": held, "needed": len(contents)}
        elif similar := self._similar(message, keys, held):
            content, more, last = similar
            contents.append(content)
        ready = self.random.randint(0, len(contents))
        lost = self.random.random() < 0.4
        end = self.random.randint(ready, len(contents)) if lost else len(contents)
        at, first = 0, True
        while first or at < end:
            count = ready if first else self.random.randint(1, end - at)
            # What is lost is known at the end, or in a message of its own.
            final = at + count == end and (end == len(contents) or self.random.random() < 0.5)
            if final and end == len(contents):
                more = {**more, **last}
            elif final and end < len(contents) and "last_tokens" in more:
                more = {}
            yield self._found(
                message.ticket, contents[at : at + count], 0 if final else len(contents) - at - count, more
            )
            at, first = at + count, False
            if final:
                return
        more = {name: value for name, value in more.items() if name in ("held", "needed")}
        yield self._found(message.ticket, [], 0, more)

    def _similar(
        self, message: Lookup, keys: Sequence[ChunkKey], held: int
    ) -> tuple[Content, dict[str, Any], dict[str, Any]] | None:
        """Return a chunk that begins like the first one that is not held, or ``None``."""
        start = held * CHUNK
        blocks = min(BLOCKS, len(message.marks) - held * BLOCKS)
        if blocks < 1 or self.random.random() < 0.5:
            return None
        likely = self.random.randint(1, blocks)
        equal = self.random.choice((likely, self.random.randint(0, likely)))
        stored = self.random.randint(likely * BLOCK, CHUNK)
        hashes = block_hashes(self.asking.all_token_ids[start : start + equal * BLOCK], BLOCK)
        hashes += bytes((stored // BLOCK - equal) * BLOCK_HASH_BYTES)
        parent = keys[held - 1] if held else message.root
        if self.random.random() < 0.1:  # The same tokens after others.
            parent, equal = bytes(32), 0
        content = Content(self.asking.request_id, held, equal * BLOCK)
        return (
            content,
            {"last_tokens": stored, "likely_blocks": likely},
            {"block_hashes": hashes, "parent": parent},
        )

    def _found(self, ticket: int, contents: Sequence[Content], fetching: int, more: dict[str, Any]) -> Found:
        leases = [self.lease() for _ in contents]
        self.leases.update(zip(leases, contents, strict=True))
        self.lookups.setdefault(ticket, []).extend(leases)
        # Not all of them may have been located, as far as anyone knows.
        located = fetching if self.random.random() < 0.9 else self.random.randint(0, fetching)
        offsets, sources = [0] * len(leases), [0] * len(leases)
        return Found(
            ticket,
            leases,
            offsets,
            sources,
            fetching,
            pending_sources=[(1, located)] if located else [],
            **more,
        )


class Connection:
    """A connection to the model of a cache process. Any call may deliver some answers."""

    congested = False

    def __init__(self, cache: CacheModel) -> None:
        self.cache = cache
        self.greeted = False
        self.welcome = Welcome(protocol.VERSION, cache.epoch, 1 << 20, ["ram", "ssd"], ["cpu", "disk"], None)

    def send(self, message: Any) -> None:
        self.cache.take(message)

    def receive(self, wait: float = 0.0) -> list[Any]:
        if not self.greeted:
            self.greeted = True
            return []
        if self.cache.random.random() < 0.005:
            self.cache.epoch += 1
            for lost in (self.cache.pending, self.cache.leases, self.cache.reserved, self.cache.lookups):
                lost.clear()
            raise ChannelClosed("it was killed")
        count = self.cache.random.choice((0, 0, 1, 1, len(self.cache.pending)))
        arrived, self.cache.pending = self.cache.pending[:count], self.cache.pending[count:]
        return arrived

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Running:
    """A request in the model of vLLM's scheduler."""

    request: Any
    tables: tuple[list[int], ...] = ()
    local: int = 0
    promised: int = 0
    """The tokens that are present once the load is done; 0 without a load."""
    computed: int | None = None
    """``None`` while it waits."""
    aborted: bool = False
    foreign: range = range(0)
    """The numbers of the blocks that another connector loads synchronously in the next step."""


class Part:
    """A part of the engine: the scheduler's side for its cache process, and what its workers were given."""

    def __init__(self, random: Random, layout: ChunkLayout, verify: float) -> None:
        self.random = random
        self.layout = layout
        self.cache = CacheModel(random, layout)
        model = ModelLayout(layout, bytes(32), (), group_ids=tuple(range(len(layout.groups))))
        hello = Hello(protocol.VERSION, "engine", "scheduler", 0, layout, model.namespace)
        bridge = SchedulerBridge(hello, self.cache)  # type: ignore[arg-type]
        assert bridge.ready()
        weights = EngineWeights("", lambda _: bytes(32))
        settings = Settings(chunk_tokens=CHUNK, verify=verify)
        self.side = SchedulerSide(settings, model, bridge, weights=weights, kv_dtype="float32")
        self.written: dict[int, tuple[Content, int]] = {}
        """What was loaded into each block: the content of the lease, and which of its blocks."""
        self.done: set[str] = set()
        self.failed: set[str] = set()
        """Loads of which some copy has failed."""

    def save(self, job: Job, running: Running | None, computed: int) -> int:
        """Check that chunks are copied from the blocks that hold them, once all of each is computed."""
        saved = 0
        for copy in job.chunks:
            key = self.cache.reserved.pop(copy.lease, None)
            if job.epoch != self.cache.epoch or running is None:
                continue
            assert key is not None, "its room was given back"
            if key not in self.cache.keys:  # A state, or the end of a prompt that was not looked up.
                continue
            name, chunk = self.cache.keys[key]
            assert name == job.request_id
            assert computed >= chunk * CHUNK + copy.tokens
            for table, ids, group in zip(running.tables, copy.blocks, self.layout.groups, strict=True):
                first = chunk * CHUNK // group.block_tokens
                assert ids == [table[first + at] for at in group.blocks(copy.tokens)]
            saved += 1
        return saved

    def load(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            lost = job.epoch != self.cache.epoch or self.random.random() < 0.03
            if job.failure or lost:
                self.failed.add(job.request_id)
            if not lost:
                for copy in job.chunks:
                    self._copy(copy)
            if not job.more:
                self.done.add(job.request_id)

    def _copy(self, copy: ChunkCopy) -> None:
        content = self.cache.leases[copy.lease]  # It must be held.
        for ids, group in zip(copy.blocks, self.layout.groups, strict=True):
            for block, at in zip(ids, group.blocks(copy.tokens), strict=True):
                if block != NULL_BLOCK:
                    self.written[block] = content, at

    def check(self, running: Running) -> None:
        """Check every block that attention needs after the promised tokens."""
        stop, name = running.promised, running.request.request_id
        for table, group in zip(running.tables, self.layout.groups, strict=True):
            if group.state:
                assert stop % CHUNK == 0
                content, _ = self.written[table[stop // CHUNK - 1]]
                assert content == Content(name, stop // CHUNK, STATE_TOKENS)
                continue
            first = max(running.local, stop - WINDOW + 1 if group.window else 0) // BLOCK
            for number in range(first, -(-stop // BLOCK)):
                content, at = self.written[table[number]]
                end = min((number + 1) * BLOCK, stop)
                assert (content.prompt, content.chunk, at) == (name, (end - 1) // CHUNK, number % BLOCKS)
                assert content.tokens >= end - content.chunk * CHUNK


class EngineModel:
    """The part of vLLM's scheduler that trusts the connector, and workers whose copies are recorded."""

    def __init__(self, random: Random, layout: ChunkLayout, parts: int = 1, verify: float = 0.0) -> None:
        self.random = random
        self.layout = layout
        self.most = 2 if verify else MAX_TOKENS
        """Requests at once: an idle engine verifies."""
        self.parts = [Part(random, layout, verify) for _ in range(parts)]
        sides = [part.side for part in self.parts]
        self.sides = SchedulerSides(sides, layout)
        self.requests: dict[str, Running] = {}
        self.finished: dict[str, Running] = {}
        """Whose blocks are kept if something is left to save."""
        self.lag = random.randint(0, 1)
        """How many steps late it learns of the results of a step: with asynchronous scheduling, one."""
        self.outputs: list[tuple[set[str], set[str], set[int], dict[str, int]]] = []
        self.blocks = self.loaded = self.saved = self.recomputed = 0
        self.wrong: set[int] = set()
        """Blocks whose KV was not loaded, or is computed from such."""

    def allocate(self, tokens: int) -> tuple[list[int], ...]:
        tables = []
        for group in self.layout.groups:
            count = -(-tokens // group.block_tokens)
            tables.append(list(range(self.blocks + 1, self.blocks + 1 + count)))
            self.blocks += count
        return tuple(tables)

    def arrive(self) -> None:
        request = make_request(self.random.randint(1, MAX_TOKENS), shared_prefix_boundary=0)
        self.requests[request.request_id] = Running(request)
        self.ask_for(request)
        for side in self.sides.sides:
            side.on_new_request(request)

    def ask_for(self, request: Any) -> None:
        """Set for the caches which request the connector asks for from now on."""
        for part in self.parts:
            part.cache.asking = request

    def has_foreign_loads(self) -> bool:
        """Whether another connector of a MultiConnector loads: vLLM supports that with one group only."""
        return list(self.layout.groups) == [ATTENTION]

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.3 and len(self.requests) < self.most:
                self.arrive()
            self.step()

    def step(self) -> None:
        """Schedule, let the workers copy, and compute."""
        for running in list(self.requests.values()):
            if running.computed is None and not running.promised and not running.aborted:
                self.admit(running)
        preempted = self.preempt()
        invalid, has_sync_loads = self.load_synchronously()
        scheduled = {}
        for name, running in self.requests.items():
            if running.computed is not None:
                # With asynchronous scheduling, its first token is not known yet when the next is computed.
                left = max(1, running.request.num_tokens - running.computed)
                scheduled[name] = self.random.randint(1, min(left, 2 * CHUNK))
        output = SimpleNamespace(
            preempted_req_ids=preempted,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            has_sync_kv_loads=has_sync_loads,
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: self.requests[name].tables if name in scheduled else None,
                boundary_state_offloads=self.offers(scheduled),
            ),
        )
        metadata: Any = self.sides.build_metadata(output)  # type: ignore[arg-type]
        self.compute(scheduled)
        steps = metadata.steps if len(self.parts) > 1 else [metadata]
        for part, step in zip(self.parts, steps, strict=True):
            for job in step.saves:
                running = self.requests.get(job.request_id) or self.finished.get(job.request_id)
                computed = (
                    0 if running is None else (running.computed or 0) + scheduled.get(job.request_id, 0)
                )
                if self.has_foreign_loads():
                    assert not self.wrong.intersection(chain.from_iterable(c.blocks[0] for c in job.chunks))
                self.saved += part.save(job, running, computed)
            part.load(step.loads)
        for name, tokens in scheduled.items():
            running = self.requests[name]
            assert running.computed is not None
            running.computed += tokens
            running.request.num_computed_tokens = running.computed
        self.outputs.append((*self.results(), invalid, scheduled))
        if len(self.outputs) > self.lag:
            self.finish_loads(*self.outputs.pop(0))
        for running in list(self.requests.values()):
            if (running.computed or 0) >= running.request.num_tokens + self.lag:
                self.finish(running, RequestStatus.FINISHED_LENGTH_CAPPED)
            elif self.random.random() < 0.02:
                self.finish(running, RequestStatus.FINISHED_ABORTED)

    def load_synchronously(self) -> tuple[set[int], bool]:
        """Let the other connector load what it has promised; return the blocks of which it fails."""
        invalid: set[int] = set()
        loading = [running for running in self.requests.values() if running.foreign]
        for running in loading:
            blocks = [running.tables[0][at] for at in running.foreign]
            running.foreign = range(0)
            if self.random.random() < 0.5:
                first = self.random.randrange(len(blocks))
                invalid.update(blocks[first:])
        self.wrong |= invalid
        return invalid, bool(loading)

    def compute(self, scheduled: dict[str, int]) -> None:
        """Let each request compute its blocks: wrong ones, if one before them is wrong."""
        for name, tokens in scheduled.items() if self.has_foreign_loads() else ():
            running = self.requests[name]
            assert running.computed is not None
            first, stop = running.computed // BLOCK, -(-(running.computed + tokens) // BLOCK)
            table = running.tables[0]
            for block in table[first:stop]:
                self.wrong.discard(block)
            if self.wrong.intersection(table[:first]):
                self.wrong.update(table[first:stop])

    def recompute(self, invalid: set[int], scheduled: dict[str, int]) -> None:
        """Go back to the first invalid block, as ``Scheduler._update_requests_with_invalid_blocks`` does.

        Of requests that share it, only the first does.
        """
        marked: set[int] = set()
        for name, running in self.requests.items():
            if running.computed is None or not running.tables:
                continue
            before = running.computed - scheduled.get(name, 0)
            affected = [
                at for at, block in enumerate(running.tables[0][: -(-before // BLOCK)]) if block in invalid
            ]
            if not affected:
                continue
            own = [at for at in affected if running.tables[0][at] not in marked]
            marked.update(running.tables[0][at] for at in own)
            running.computed = own[0] * BLOCK if own else max(0, before)
            running.request.num_computed_tokens = running.computed
            self.recomputed += 1

    def admit(self, running: Running) -> None:
        """Ask for the hit of a waiting request, and allocate its blocks, if there are any."""
        request = running.request
        unit = CHUNK if self.layout.has_states else BLOCK
        local = self.random.choice((0, self.random.randint(0, (request.num_tokens - 1) // unit) * unit))
        local = 0 if request.skip_reading_prefix_cache else local
        self.ask_for(request)
        tokens, _ = self.sides.matched_tokens(request, local)
        if tokens is None or self.random.random() < 0.2:
            return
        if request.request_id in self.parts[0].cache.verified and not request.num_preemptions:
            assert not local + tokens, "what vLLM has itself may have been loaded"
        stop = local + tokens
        assert local <= stop <= request.num_tokens
        running.tables, running.local = self.allocate(request.num_tokens), local
        blocks = SimpleNamespace(get_block_ids=lambda: running.tables)
        for side in self.sides.sides:
            side.allocated(request, blocks, tokens)  # type: ignore[arg-type]
        if tokens:
            running.promised = stop
        elif self.has_foreign_loads():
            self.run(running, self.share(running, local))
        else:
            self.run(running, local)

    def share(self, running: Running, local: int) -> int:
        """Let a prompt begin with computed blocks of another, or load from another connector; return how far.

        vLLM finds blocks that are computed again, too.
        """
        table, last = running.tables[0], (running.request.num_tokens - 1) // BLOCK
        others = [other for other in self.requests.values() if other is not running and other.tables]
        if local and others and self.random.random() < 0.7:
            other = self.random.choice(others)
            count = min(local, other.computed or 0, len(other.tables[0]) * BLOCK) // BLOCK
            table[:count] = other.tables[0][:count]
        elif last > local // BLOCK and self.random.random() < 0.7:
            running.foreign = range(local // BLOCK, self.random.randint(local // BLOCK, last - 1) + 1)
            return running.foreign.stop * BLOCK
        return local

    def run(self, running: Running, computed: int) -> None:
        """Compute from there on. vLLM computes the last token of a prompt again."""
        running.promised = 0
        running.computed = min(computed, running.request.num_tokens - 1)
        running.request.num_computed_tokens = running.computed

    def preempt(self) -> set[str]:
        preempted = {
            name
            for name, running in self.requests.items()
            if running.computed is not None
            and running.computed < running.request.num_tokens
            and self.random.random() < 0.02
        }
        for name in preempted:
            running = self.requests[name]
            running.computed, running.tables, running.foreign = None, (), range(0)
            running.request.num_computed_tokens = 0
            running.request.num_preemptions += 1
        return preempted

    def offers(self, scheduled: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """Return the states that this step leaves: those at the boundary after which it ends."""
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for name, tokens in scheduled.items() if self.layout.has_states else ():
            running = self.requests[name]
            assert running.computed is not None
            boundary = (running.computed + tokens) // CHUNK
            if boundary * CHUNK > running.computed:
                offers[name] = [(1, running.tables[1][boundary - 1], boundary * CHUNK)]
        return offers

    def results(self) -> tuple[set[str], set[str]]:
        """Return the loads that every part has ended, as vLLM's ``KVOutputAggregator`` does."""
        done = set.intersection(*(part.done for part in self.parts))
        failed = done & set.union(*(part.failed for part in self.parts))
        for part in self.parts:
            part.done -= done
            part.failed -= done
        return done, failed

    def finish_loads(
        self, done: set[str], failed: set[str], invalid: set[int], scheduled: dict[str, int]
    ) -> None:
        self.recompute(invalid, scheduled)
        for part, name in product(self.parts, done - failed):
            if not self.requests[name].aborted:
                part.check(self.requests[name])
                self.loaded += 1
        output = KVConnectorOutput(finished_recving=done, failed_recving=failed, invalid_block_ids=invalid)
        self.sides.update_from_output(output)
        for side in self.sides.sides:
            list(side.events())
        for name in done:
            running = self.requests[name]
            if running.aborted:
                del self.requests[name]
            elif name in failed:
                running.promised, running.tables = 0, ()
            else:
                self.run(running, running.promised)

    def finish(self, running: Running, status: RequestStatus) -> None:
        name = running.request.request_id
        running.request.status = status
        self.finished[name] = running
        self.sides.finished(running.request, running.tables or tuple([] for _ in self.layout.groups))
        if running.promised:  # vLLM keeps the blocks until the load is reported.
            running.aborted = True
        else:
            del self.requests[name]

    def end(self) -> None:
        """Abort everything, and check that nothing is leased or reserved any more."""
        for running in list(self.requests.values()):
            if not running.aborted:
                self.finish(running, RequestStatus.FINISHED_ABORTED)
        caches = [part.cache for part in self.parts]
        for _ in range(100):
            if not self.requests and not any(c.pending or c.leases or c.reserved for c in caches):
                break
            self.step()
        assert not self.requests
        for cache in caches:
            assert not cache.leases
            assert not cache.reserved
        for side in self.sides.sides:
            side.close()


@pytest.fixture(scope="module")
def connected() -> Iterator[None]:
    """Let bridges connect to models of cache processes, in the place of paths. No call waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge_module, "open_connection", lambda cache, _: Connection(cache))
        patch.setattr(client_module, "MIN_POLL_INTERVAL_SECONDS", 0.0)
        patch.setattr(scheduler_module, "LOOKUP_WAIT_SECONDS", 0.0)
        patch.setattr(scheduler_module, "STEP_WAIT_SECONDS", 0.0)
        patch.setattr(saves_module, "MAX_BACKLOG_CHUNKS", 2)
        yield


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(("parts", "verify"), [(1, 0.0), (2, 0.0), (1, 1.0)])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_what_was_reported_is_loaded(layout: str, parts: int, verify: float, seed: int) -> None:
    engine = EngineModel(Random(seed), LAYOUTS[layout], parts, verify)
    engine.go_on(STEPS)
    engine.end()


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_models_are_not_idle(layout: str) -> None:
    engines = [EngineModel(Random(seed), LAYOUTS[layout]) for seed in range(10)]
    for engine in engines:
        engine.go_on(STEPS)
        engine.end()
    assert sum(engine.loaded for engine in engines) > 20
    assert sum(engine.saved for engine in engines) > 80
    assert {engine.lag for engine in engines} == {0, 1}
    verifying = [EngineModel(Random(seed), LAYOUTS[layout], verify=1.0) for seed in range(10)]
    for engine in verifying:
        engine.go_on(STEPS)
        engine.end()
    assert sum(len(engine.parts[0].cache.verified) for engine in verifying) > 5
    if layout == "attention":
        assert sum(engine.recomputed for engine in engines) > 5
