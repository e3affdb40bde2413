"""Drives both sides of the connector hook by hook, like vLLM, around a step that computes nothing.

For tests and benchmarks. Needs vLLM, which :mod:`kvtier.integrations.vllm` imports, but no engine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, Self

import torch
from vllm.v1.request import RequestStatus

from kvtier import Settings
from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Role
from kvtier.integrations.vllm.layout import ModelLayout, Region
from kvtier.integrations.vllm.metadata import StepMetadata
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.integrations.vllm.weights import EngineWeights
from kvtier.integrations.vllm.worker import WorkerSide
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace

CHUNK_TOKENS, BLOCK_TOKENS = 32, 16
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
PAGE_BYTES, LAYERS = 1024, 2
TABLE_CHUNKS = 4
"""Number of chunks of a request with separate blocks; later chunks reuse these blocks."""

_numbers = itertools.count()


Request = SimpleNamespace


def make_request(tokens: int, **fields: object) -> Request:
    """Return a stand-in for vLLM's ``Request``. No two requests have the same token at the same position."""
    number = next(_numbers)
    ids = range(number << 15, (number << 15) + tokens)
    defaults = {
        "request_id": f"request-{number}",
        "prompt_token_ids": ids,
        "all_token_ids": ids,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "kv_transfer_params": None,
        "skip_reading_prefix_cache": False,
        "structured_output_request": None,
        "status": RequestStatus.RUNNING,
    }
    return SimpleNamespace(**{**defaults, **fields})


@dataclass
class Sides:
    """Both sides of the connector, connected to a cache process."""

    scheduler: SchedulerSide
    worker: WorkerSide
    bridges: tuple[SchedulerBridge, WorkerBridge]

    @classmethod
    def connect(cls, socket: Path, layout: ChunkLayout, blocks: int, **settings: object) -> Self:
        """Connect to the cache process that serves ``socket``, with one KV-cache group."""
        (group,) = layout.groups
        names = [f"layer {layer}" for layer in range(len(group.page_bytes))]
        page_bytes = group.page_bytes[0]
        regions = (tuple(Region(name, 0, page_bytes, page_bytes, blocks) for name in names),)
        model = ModelLayout(
            layout, namespace("model", layout), regions, group_ids=(0,), layers=(tuple(names),)
        )
        engine = f"engine-{next(_numbers)}"

        def hello(role: Role) -> Hello:
            return Hello(protocol.VERSION, engine, role, 0, layout, model.namespace)

        parsed = Settings(chunk_tokens=layout.chunk_tokens, **settings)  # type: ignore[arg-type]
        bridges = SchedulerBridge(hello("scheduler"), socket), WorkerBridge(hello("worker"), socket)
        bridges[1].connect()
        bridges[0].connect()
        weights = EngineWeights("", lambda weights_id: namespace("model", layout, weights_id))
        scheduler = SchedulerSide(parsed, model, bridges[0], weights=weights)
        worker = WorkerSide(model, bridges[1], 0)
        worker.register({name: torch.zeros((blocks, page_bytes), dtype=torch.uint8) for name in names})
        return cls(scheduler, worker, bridges)

    def run_worker(self, metadata: StepMetadata) -> SimpleNamespace:
        """Run the worker's hooks of a step, report their results to the scheduler, and return them."""
        self.worker.load(metadata.loads)
        self.worker.save(metadata.saves)
        saved, loaded, failed = self.worker.take_results()
        results = SimpleNamespace(
            finished_sending=saved, finished_recving=loaded, failed_recving=failed, invalid_block_ids=()
        )
        self.scheduler.update_from_output(results)
        return results

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def scheduled(tokens: Mapping[str, int], block_state: object = None) -> SimpleNamespace:
    """Return a stand-in for vLLM's ``SchedulerOutput``. ``tokens``: how many each request computes."""
    return SimpleNamespace(
        preempted_req_ids=None,
        num_scheduled_tokens=dict(tokens),
        total_num_scheduled_tokens=sum(tokens.values()),
        has_sync_kv_loads=False,
        kv_connector_block_state=block_state,
    )


class StepTime(NamedTuple):
    """Seconds spent in the hooks of one step: wall-clock time and CPU time."""

    elapsed: float
    cpu: float


@dataclass
class Engine(Sides):
    """Running requests, which compute a chunk in each step, and requests that wait for a lookup."""

    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    """Finished requests whose blocks were kept until they were saved, and are free now."""

    @classmethod
    def open(cls, socket: Path, requests: int, **settings: object) -> Engine:
        """Connect to the cache process that serves ``socket``."""
        layout = ChunkLayout(CHUNK_TOKENS, (GroupLayout(BLOCK_TOKENS, (PAGE_BYTES,) * LAYERS),))
        return cls.connect(socket, layout, 1 + requests * TABLE_CHUNKS * CHUNK_BLOCKS, **settings)

    def run(self, request: Request) -> None:
        """Start a request that is computed from its first token on."""
        self.scheduler.on_new_request(request)
        self.scheduler.matched_tokens(request, 0)
        self.scheduler.allocated(request, self.blocks([]), 0)
        self.admit(request)

    def admit(self, request: Request) -> None:
        """Allocate blocks for a request, and start computing it."""
        first = 1 + len(self.tables) * TABLE_CHUNKS * CHUNK_BLOCKS
        self.tables[request.request_id] = list(range(first, first + TABLE_CHUNKS * CHUNK_BLOCKS))
        self.running.append(request)

    def arrive(self, request: Request) -> None:
        """Add a request that waits for the result of its lookup."""
        self.scheduler.on_new_request(request)
        self.waiting.append(request)

    def table(self, request: Request) -> tuple[list[int], ...]:
        """Return the blocks of a request, with room for one more chunk. vLLM rebuilds this list each time."""
        table = self.tables[request.request_id]
        blocks = -(-request.num_computed_tokens // BLOCK_TOKENS) + CHUNK_BLOCKS
        while len(table) < blocks:
            table += table[: TABLE_CHUNKS * CHUNK_BLOCKS]
        return (table,)

    def step(self, tokens: int = CHUNK_TOKENS) -> StepTime:
        """Run one step, in which each running request computes ``tokens`` tokens."""
        timestamps = [_now()]
        self._look_up()
        requests = {request.request_id: request for request in self.running}
        block_state = SimpleNamespace(
            get_block_ids=lambda name: self.table(requests[name]) if name in requests else None,
            boundary_state_offloads={},
        )
        output = scheduled(dict.fromkeys(requests, tokens), block_state)
        metadata = self.scheduler.build_metadata(output)
        timestamps.append(_now())
        for request in self.running:
            request.num_computed_tokens += tokens
        timestamps.append(_now())
        self.freed |= self.run_worker(metadata).finished_sending
        timestamps.append(_now())
        return StepTime(*(end - b + a - start for start, a, b, end in zip(*timestamps, strict=True)))

    def _look_up(self) -> None:
        """Query waiting requests again in each step, like vLLM, and finish those whose lookup is complete."""
        waiting = []
        for request in self.waiting:
            tokens, _ = self.scheduler.matched_tokens(request, 0)
            if tokens is None:
                waiting.append(request)
            else:
                self.scheduler.allocated(request, self.blocks([]), 0)
                request.status = RequestStatus.FINISHED_ABORTED
                self.scheduler.finished(request, ([],))
        self.waiting = waiting

    def finish(self, request: Request) -> bool:
        """Finish a request; return whether its blocks are kept until they are saved."""
        self.running.remove(request)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return self.scheduler.finished(request, self.table(request))[0]

    @staticmethod
    def blocks(ids: list[int]) -> SimpleNamespace:
        """Return what vLLM passes as the blocks of a request."""
        return SimpleNamespace(get_block_ids=lambda: (ids,))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()
