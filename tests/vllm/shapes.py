"""An engine of any parallel shape without a model: vLLM's scheduler and parallel groups, and real workers.

vLLM cannot run pipeline stages or context parallelism on this CPU. Here its own scheduler, KV-cache manager
and parallel groups run, with kvtier's connector in one process per rank. In the place of a model, each rank
writes a number into the slot of each token that it holds, made from all tokens up to it, the layer and the
heads; and before each step it checks the numbers of all earlier tokens, loaded ones as well.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from zlib import crc32

BLOCK = 16
BLOCKS = 200
ABORT_STEP = 5
VOCABULARY = 512
PRIME = 6364136223846793005
MASK = (1 << 63) - 1


class Shape(NamedTuple):
    """How many ranks there are of each kind, and the model."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    kv_heads: int = 2
    mla: bool = False
    windows: bool = False
    """Whether every second layer has sliding-window attention."""
    layers: int = 5
    hosts: int = 1
    cuda: bool = False
    """Whether the KV cache is on a GPU, with the stand-in for CUDA."""
    blocks: int = BLOCKS
    zeroes: bool = False
    """Whether a step first zeroes new blocks, before any hook, as vLLM's Model Runner V2 does."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.pcp


# Everything below runs in the processes of the engine.


def vllm_config(model: str, shape: Shape, settings: dict[str, Any]) -> Any:
    """Return vLLM's configuration of an engine whose connector has these settings."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_model_len=640 if shape.cuda else 2048,  # Fits in few blocks.
        max_num_batched_tokens=256,
        tensor_parallel_size=shape.tp,
        pipeline_parallel_size=shape.pp,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config=settings,
        ),
    ).create_engine_config()
    # Not as arguments: vLLM refuses them for this processor, whose kernels cannot do it.
    parallel = config.parallel_config
    parallel.prefill_context_parallel_size = shape.pcp
    parallel.decode_context_parallel_size = shape.dcp
    parallel.cp_kv_cache_interleave_size = shape.interleave
    parallel.world_size = shape.ranks
    parallel.nnodes = shape.hosts
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks_override = shape.blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    if shape.cuda:
        config.device_config.device_type = "cuda"
    if shape.zeroes:  # Not before: vLLM refuses that runner for this processor.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return config


def specs_of(shape: Shape, rank: int) -> dict[str, Any]:
    """Return what the layers of a rank keep. Later stages have fewer layers."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    stage = rank // (shape.tp * shape.pcp)
    share = -(-shape.layers // shape.pp)
    heads: dict[str, Any] = {
        "num_kv_heads": max(1, shape.kv_heads // shape.tp),
        "head_size": 32,
        "dtype": torch.float32,
    }
    specs: dict[str, Any] = {}
    for layer in range(stage * share, min((stage + 1) * share, shape.layers)):
        name = f"model.layers.{layer}.self_attn.attn"
        if shape.mla:
            specs[name] = MLAAttentionSpec(
                block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32
            )
        elif shape.zeroes and layer % 2:  # Another precision: vLLM then zeroes blocks.
            halves = {**heads, "head_size": 64, "dtype": torch.float16}
            specs[name] = SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **halves)
        elif shape.windows and layer % 2:
            specs[name] = SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **heads)
        else:
            specs[name] = FullAttentionSpec(block_size=BLOCK, **heads)
    return specs


def hashes(tokens: Sequence[int]) -> list[int]:
    """Return a number for each prefix of ``tokens``."""
    found, last = [], 1
    for token in tokens:
        last = (last * PRIME + token + 1) & MASK
        found.append(last)
    return found


class Scheduled(NamedTuple):
    """A request in one step."""

    tokens: list[int]
    start: int
    stop: int
    blocks: Sequence[Sequence[int]]


class Worker:
    """One rank. Its process runs :meth:`run`."""

    def __init__(self, connection: Connection, config: Any, shape: Shape, rank: int, rendezvous: str) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import (
            get_dcp_group,
            init_distributed_environment,
            initialize_model_parallel,
        )

        from kvtier.integrations.vllm import parts

        self._connection = connection
        self._config = config
        self._shape = shape
        self._rank = rank
        with set_current_vllm_config(config):
            init_distributed_environment(shape.ranks, rank, rendezvous, rank, "gloo")
            initialize_model_parallel(shape.tp, shape.pp, shape.pcp, shape.dcp, "gloo")
        assert parts.engine_rank() == rank
        self._dcp_rank = get_dcp_group().rank_in_group
        self._pages: dict[str, Any] = {}
        self._groups: list[Any] = []

    def run(self) -> None:
        connection = self._connection
        connection.send(specs_of(self._shape, self._rank))
        self._open(connection.recv())
        while (step := connection.recv()) is not None:
            connection.send(self._step(*step))
        self._connector.shutdown()
        connection.send(self._report())

    def _report(self) -> Any:
        """Return what a test wants to know in the end."""

    def _allocate(self, length: int) -> Any:
        import torch

        return torch.zeros(length, dtype=torch.int8)

    def _put(self, memory: Any, block: int, slot: int, number: int) -> None:
        """Write a number to the slot of a token of one layer."""
        memory[block, slot].fill_(number)

    def _zero(self, memory: Any, blocks: Sequence[int]) -> None:
        """Zero blocks of one layer."""
        memory[list(blocks)] = 0

    def _computed(self) -> None:
        """Called when all of a step is written."""

    def _open(self, cache: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvtier.integrations.vllm.connector import KVTierConnector

        memory = self._allocate(cache.kv_cache_tensors[0].size)
        specs = specs_of(self._shape, self._rank)
        for tensor in cache.kv_cache_tensors:
            for index, name in enumerate(tensor.layers):
                self._pages[name] = memory.as_strided(
                    (cache.num_blocks, specs[name].page_size_bytes),
                    (tensor.block_stride, 1),
                    tensor.offset + index * tensor.layer_stride,
                )
        self._groups = cache.kv_cache_groups
        self._connector = KVTierConnector(self._config, KVConnectorRole.WORKER, cache)
        self._connector.register_kv_caches(self._pages)
        metadata = self._connector.get_handshake_metadata()
        stage, rest = divmod(self._rank, self._shape.tp * self._shape.pcp)
        self._connection.send({(stage, rest): metadata} if metadata else None)

    def _step(
        self, metadata: Any, finished: set[str], requests: list[Scheduled], zeroed: Sequence[int]
    ) -> tuple[Any, int]:
        from vllm.v1.outputs import KVConnectorOutput

        connector = self._connector
        for memory in self._pages.values():
            self._zero(memory, zeroed)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        wrong = 0
        for request in requests:
            wrong += self._compute(request)
        self._computed()
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(finished)
        connector.clear_connector_metadata()
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=connector.get_kv_connector_stats(),
        )
        return output, wrong

    def _compute(self, request: Scheduled) -> int:
        """Write the numbers of new tokens. Return how many of earlier ones are wrong."""
        import torch

        numbers = hashes(request.tokens[: request.stop])
        wrong = 0
        for group, blocks in zip(self._groups, request.blocks, strict=True):
            for name in group.layer_names:
                window = getattr(group.kv_cache_spec, "sliding_window", None)
                visible = max(0, request.start - window + 1) if window else 0
                slots = [
                    (token, slot) for token, slot in self._slots(request.stop, group) if token >= visible
                ]
                pages = self._pages[name]
                memory = pages.view(torch.int64).view(pages.shape[0], BLOCK, -1)
                for token, slot in slots:
                    block, number = blocks[slot // BLOCK], (numbers[token] ^ self._seed(name)) * PRIME & MASK
                    if token >= request.start:
                        self._put(memory, block, slot % BLOCK, number)
                    else:
                        is_right = block and (memory[block, slot % BLOCK] == number).all()
                        wrong += not bool(is_right)
        return wrong

    def _seed(self, layer: str) -> int:
        """Return a number for the heads that this rank has of a layer."""
        heads = 1 if self._shape.mla else self._shape.kv_heads
        shards = min(heads, self._shape.tp)
        return crc32(f"{layer} {self._rank % self._shape.tp * shards // self._shape.tp}".encode())

    def _slots(self, stop: int, group: Any) -> Iterator[tuple[int, int]]:
        """Yield the tokens that this rank holds, with their slots: ``_compute_slot_mappings_kernel``."""
        size, interleave = self._shape.dcp, self._shape.interleave
        if size == 1 or not group.kv_cache_spec.dcp_sharded:
            yield from ((token, token) for token in range(stop))
            return
        for token in range(stop):
            block, rest = divmod(token, BLOCK * size)
            if rest // interleave % size == self._dcp_rank:
                yield token, block * BLOCK + rest // (interleave * size) * interleave + rest % interleave


@dataclass
class Engine:
    """The scheduler's process."""

    config: Any
    shape: Shape
    workers: list[Connection]
    wrong: int = 0
    preemptions: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import core
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        specs = [worker.recv() for worker in self.workers]
        find_groups = getattr(core, "get_global_kv_cache_groups", None)  # Since vLLM 0.33.
        groups = [find_groups(self.config, specs)] if find_groups else []
        caches = core.get_kv_cache_configs(self.config, specs, [1 << 28] * len(specs), *groups)
        for worker, cache in zip(self.workers, caches, strict=True):
            worker.send(cache)
        metadata = [worker.recv() for worker in self.workers]
        cache = core.generate_scheduler_kv_cache_config(caches)
        self.config.cache_config.num_gpu_blocks = cache.num_blocks
        block, hash_block = resolve_kv_cache_block_sizes(cache, self.config)
        structured = StructuredOutputManager(self.config)
        self.scheduler = Scheduler(self.config, cache, structured, block, hash_block)
        merged = {place: found for each in metadata if each for place, found in each.items()}
        if merged:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(merged)
        self._aggregator = KVOutputAggregator(len(self.workers))
        self._hash_block = hash_block
        self._numbers = iter(range(1_000_000))

    def generate(self, prompts: list[list[int]], new: int, aborted: int = 0) -> list[int]:
        """Run prompts together; return how many tokens of each were found in a cache.

        ``aborted``: how many requests are aborted after some steps.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request, RequestStatus

        hasher = get_request_block_hasher(self._hash_block, sha256)
        names = []
        for prompt in prompts:
            name = str(next(self._numbers))
            sampling = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0)
            sampling.update_from_generation_config({}, None)
            request = Request(name, prompt, sampling, None, block_hasher=hasher)
            self.scheduler.add_request(request)
            names.append(name)
        steps = 0
        while self.scheduler.has_requests():
            self._step()
            steps += 1
            if steps == ABORT_STEP:
                self.scheduler.finish_requests(names[:aborted], RequestStatus.FINISHED_ABORTED)
        return [self.cached.get(name, 0) for name in names]

    def _step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        output = scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            self.cached.setdefault(new.req_id, new.num_computed_tokens)
        requests, sampled = [], []
        for name, count in output.num_scheduled_tokens.items():
            request, start = scheduler.requests[name], starts[name]
            tokens = list(request.all_token_ids)
            blocks = scheduler.kv_cache_manager.get_block_ids(name)
            requests.append(Scheduled(tokens, start, start + count, blocks))
            complete = start + count == len(tokens)
            sampled.append([hashes(tokens)[-1] % VOCABULARY] if complete else [])
        for worker in self.workers:
            zeroed = list(output.new_block_ids_to_zero or ())
            assert bool(zeroed) <= self.shape.zeroes
            worker.send((output.kv_connector_metadata, output.finished_req_ids, requests, zeroed))
        outputs = []
        for worker in self.workers:
            transferred, wrong = worker.recv()
            self.wrong += wrong
            names = list(output.num_scheduled_tokens)
            indexes = {name: index for index, name in enumerate(names)}
            result = ModelRunnerOutput(names, indexes, sampled)
            result.kv_connector_output = transferred
            outputs.append(result)
        scheduler.update_from_output(output, self._aggregator.aggregate(outputs))

    def close(self) -> list[Any]:
        """Stop. Return what the workers report."""
        for worker in self.workers:
            worker.send(None)
        reports = [worker.recv() for worker in self.workers]
        self.scheduler.shutdown()
        return reports


def serve(connection: Connection, log: str, model: str, shape: Shape, settings: list[dict[str, Any]]) -> None:
    """Run an engine until the connection closes. ``settings``: of the connector on each host."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["VLLM_DIST_IDENT"] = f"shapes-{os.getpid()}"  # The name of shared memory for collectives.
    fork = multiprocessing.get_context("fork")
    rendezvous = f"file://{log}.rendezvous"
    configs = [vllm_config(model, shape, each) for each in settings]
    engine_id = configs[0].kv_transfer_config.engine_id
    workers = []
    for rank in range(shape.ranks):
        here, there = fork.Pipe()
        config = configs[rank * shape.hosts // shape.ranks]
        config.kv_transfer_config.engine_id = engine_id
        process = fork.Process(
            target=lambda *arguments: worker_class(shape)(*arguments).run(),
            args=(there, config, shape, rank, rendezvous),
            daemon=True,
        )
        process.start()
        workers.append(here)
    engine = Engine(configs[0], shape, workers)
    connection.send("open")
    while message := _received(connection):
        if message["call"] == "generate":
            hits = engine.generate(message["prompts"], message["new"], message.get("aborted", 0))
            connection.send({"hits": hits, "wrong": engine.wrong, "preemptions": engine.preemptions})
        elif message["call"] == "reset":
            connection.send(engine.scheduler.reset_prefix_cache())
        elif message["call"] == "close":
            connection.send(engine.close())
            return
    engine.close()


def worker_class(shape: Shape) -> type[Worker]:
    """Return the kind of worker for the memory of this engine."""
    if not shape.cuda:
        return Worker
    from tests.vllm.shapes_on_gpu import WorkerOnGPU

    return WorkerOnGPU


def _received(connection: Connection) -> dict[str, Any] | None:
    try:
        message: dict[str, Any] | None = connection.recv()
    except EOFError:
        return None
    return message
