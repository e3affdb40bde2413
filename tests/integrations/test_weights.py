"""Scheduler side while the weights change, with a scripted cache process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvtier.bridge.protocol import Abandon, Cancel, Clear, Found, Lookup, Reserve, UseWeights
from kvtier.integrations.vllm import adapters
from kvtier.integrations.vllm import scheduler as scheduler_module
from kvtier.integrations.vllm.compat import is_empty
from kvtier.integrations.vllm.patches import finish_before_resets, follow_engine
from kvtier.integrations.vllm.request import request_root
from kvtier.memory.keys import chunk_keys, join_keys
from kvtier.memory.layout import has_weights, namespace
from tests.rigs import stepping
from tests.rigs.stepping import CHUNK_TOKENS, Engine, make_request
from tests.rigs.waiting import wait_until

from .test_neighbors import multi
from .test_scheduler import Cache, Worker, wait_for_replies

TOKENS = 4 * CHUNK_TOKENS


class Pool:
    """A stand-in for vLLM's block pool: empty, or with blocks in use, or with cached ones."""

    num_gpu_blocks = 10

    def __init__(self) -> None:
        self.used, self.cached = 0, 0

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - self.used

    @property
    def cached_block_hash_to_block(self) -> range:
        return range(self.cached)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    instance = Cache(tmp_path / "socket")
    yield instance
    instance.close()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def engine(cache: Cache, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(scheduler_module, "CLEAR_SECONDS", 0.05)
    monkeypatch.setattr(stepping.WorkerBridge, "connect", lambda _: None)
    monkeypatch.setattr(
        stepping.SchedulerBridge,
        "connect",
        lambda bridge: (bridge.ready(), cache.greet(), wait_until(bridge.ready)),
    )
    instance = Engine.open(tmp_path / "socket", 16, prefetch={"policy": "timeout"})
    instance.worker = Worker()  # type: ignore[assignment]
    any_pool: Any = pool
    instance.scheduler.bind(any_pool)
    yield instance
    instance.close()


def keys(engine: Engine, request: Any, weights_id: str, chunks: int) -> bytes:
    """Return the keys of a request's first chunks, computed with some weights."""
    space = namespace("model", engine.scheduler._layout, weights_id)
    ids = list(request.all_token_ids[: chunks * CHUNK_TOKENS])
    return join_keys(chunk_keys(request_root(space, request), ids, CHUNK_TOKENS))


def start(engine: Engine, cache: Cache) -> Any:
    """Start a request that misses."""
    request = make_request(TOKENS)
    engine.scheduler.on_new_request(request)
    cache.send(Found(cache.receive(Lookup).ticket, [], [], [], 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (0, False))
    engine.scheduler.allocated(request, engine.blocks([]), 0)
    engine.admit(request)
    engine.step(0)
    return request


def load(engine: Engine, cache: Cache) -> Any:
    """Start a request that loads its first two chunks, whose leases are 1 and 2."""
    request = make_request(TOKENS)
    engine.scheduler.on_new_request(request)
    cache.send(Found(cache.receive(Lookup).ticket, [1, 2], [4096, 8192], [0, 0], 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (2 * CHUNK_TOKENS, True))
    engine.scheduler.allocated(request, engine.blocks([1, 2, 3, 4]), 2 * CHUNK_TOKENS)
    return request


def reset(engine: Engine, cache: Cache) -> UseWeights:
    """Reset weights without an id, which removes their chunks."""
    engine.scheduler.reset()
    cache.receive(Clear)
    return cache.receive(UseWeights)


def preempt(request: Any) -> None:
    request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1


def test_queued_requests_are_looked_up_again_with_the_keys_of_the_new_weights(
    engine: Engine, cache: Cache
) -> None:
    request = make_request(TOKENS)
    engine.scheduler.on_new_request(request)
    before = cache.receive(Lookup)
    assert before.keys == keys(engine, request, "", 4)
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(Cancel).ticket == before.ticket
    used = cache.receive(UseWeights).weights
    assert (used.id, used.namespace) == ("step-1", namespace("model", engine.scheduler._layout, "step-1"))
    cache.send(Found(before.ticket, [1, 2, 3, 4], [0, 4096, 8192, 12288], [0] * 4, 0))
    assert engine.scheduler.matched_tokens(request, 0) == (None, False), "the late answer is not used"
    assert cache.receive(Lookup).keys == keys(engine, request, "step-1", 4)


def test_chunks_of_a_request_that_starts_again_are_stored_with_the_new_keys(
    engine: Engine, cache: Cache
) -> None:
    """As after ``reset_prefix_cache`` with ``reset_running_requests``. The pending room is given back."""
    request = start(engine, cache)
    engine.step()
    reserve = cache.receive(Reserve)
    assert reserve.runs[0].keys == keys(engine, request, "", 1)
    preempt(request)
    engine.running.clear()
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(UseWeights).weights.id == "step-1"
    cache.answer(reserve)
    wait_for_replies(engine)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    assert not engine.worker.saves  # type: ignore[attr-defined]
    assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    look_up = cache.receive(Lookup)
    cache.send(Found(look_up.ticket, [], [], [], 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (0, False))
    engine.running.append(request)
    engine.step()
    (run,) = cache.receive(Reserve).runs
    assert (run.keys, run.parent) == (
        keys(engine, request, "step-1", 1),
        request_root(namespace("model", engine.scheduler._layout, "step-1"), request),
    )


@pytest.mark.parametrize("change", ["reset", "name"])
def test_running_requests_store_nothing_more(engine: Engine, cache: Cache, pool: Pool, change: str) -> None:
    """Their KV is of both weights. New requests may hit it in vLLM's own cache."""
    request = start(engine, cache)
    pool.used = 1
    if change == "reset":
        reset(engine, cache)
    else:
        engine.scheduler.set_weight_version("step-1")
        cache.receive(UseWeights)
    engine.step(2 * CHUNK_TOKENS)
    other = make_request(TOKENS)
    engine.scheduler.on_new_request(other)
    assert engine.scheduler.matched_tokens(other, CHUNK_TOKENS) == (0, False)
    engine.admit(other)
    engine.step(2 * CHUNK_TOKENS)
    assert not engine.finish(request)
    engine.step()
    pool.used, pool.cached = 0, 5
    engine.scheduler.on_new_request(make_request(TOKENS))
    assert cache.nothing_received()
    pool.cached = 0
    engine.scheduler.on_new_request(last := make_request(TOKENS))
    used = engine.scheduler.weights.current.id
    assert cache.receive(Lookup).keys == keys(engine, last, used, 4)


def test_planned_and_reserved_chunks_of_a_finished_request_are_not_stored(
    engine: Engine, cache: Cache, pool: Pool
) -> None:
    """Their room would be reserved for the new weights, or written while vLLM is free to load those."""
    request = start(engine, cache)
    engine.step()
    reserve = cache.receive(Reserve)
    engine.step()
    assert engine.finish(request), "vLLM keeps the blocks until they are saved"
    pool.used = 4
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    cache.answer(reserve)
    wait_for_replies(engine)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    assert cache.nothing_received()
    assert [(job.leases, job.last) for job in engine.worker.saves] == [([], True)]  # type: ignore[attr-defined]


def test_load_in_flight_fails(engine: Engine, cache: Cache, pool: Pool) -> None:
    """Its leases have ended when the worker asks, so vLLM computes the prompt."""
    request = load(engine, cache)
    pool.used = 4
    engine.step(0)
    (job,) = engine.worker.loads  # type: ignore[attr-defined]
    assert job.leases == [1, 2]
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(Cancel).ticket == 1
    cache.receive(UseWeights)
    failed = KVConnectorOutput(finished_recving={request.request_id}, failed_recving={request.request_id})
    engine.scheduler.update_from_output(failed)
    assert cache.nothing_received(), "no lease is released twice"
    assert len(engine.scheduler._loads) == 0


def test_unnamed_weights_are_removed_and_replaced_by_unknown_ones(engine: Engine, cache: Cache) -> None:
    """Also if the cache process does not answer: the namespace is another one in any case."""
    names = {engine.scheduler.weights.current.id}
    for _ in range(3):
        used = reset(engine, cache).weights
        assert used.id.startswith("unknown-")
        assert has_weights(used.namespace, used.id)
        names.add(used.id)
    assert len(names) == 4
    engine.scheduler.on_new_request(request := make_request(TOKENS))
    assert cache.receive(Lookup).keys == keys(engine, request, used.id, 4)


def test_named_weights_are_kept(engine: Engine, cache: Cache, pool: Pool) -> None:
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    engine.scheduler.reset()
    assert cache.receive(UseWeights).weights.id.startswith("unknown-"), "not preceded by Clear"
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(UseWeights).weights.id == "step-1"
    engine.scheduler.set_weight_version("default")
    assert cache.receive(UseWeights).weights.id == ""


def test_id_may_be_set_before_the_reset(engine: Engine, cache: Cache, pool: Pool) -> None:
    """The first reset after it belongs to it, the second to the next change."""
    pool.cached = 3
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    engine.scheduler.reset()  # vLLM's own cache could not be reset.
    engine.scheduler.on_new_request(make_request(TOKENS))
    pool.cached = 0
    engine.scheduler.reset()
    assert cache.nothing_received()
    assert engine.scheduler.weights.current.id == "step-1"
    engine.scheduler.reset()
    assert cache.receive(UseWeights).weights.id.startswith("unknown-")


def test_named_weights_are_used_after_their_reset(engine: Engine, cache: Cache, pool: Pool) -> None:
    pool.cached = 3
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    pool.cached = 0
    engine.scheduler.reset()
    engine.scheduler.on_new_request(request := make_request(TOKENS))
    assert cache.receive(Lookup).keys == keys(engine, request, "step-1", 4)


def test_same_id_again_changes_nothing(engine: Engine, cache: Cache, pool: Pool) -> None:
    request = start(engine, cache)
    pool.used = 1
    engine.scheduler.set_weight_version("default")
    engine.step()
    assert cache.receive(Reserve).runs[0].keys == keys(engine, request, "", 1)


def test_reset_while_the_cache_process_is_gone(engine: Engine, cache: Cache) -> None:
    cache.disconnect()
    wait_until(lambda: (engine.step(0), not engine.bridges[0].connected)[1])
    engine.scheduler.reset()
    used = engine.scheduler.weights.current
    assert used.id.startswith("unknown-")
    assert engine.bridges[0]._make_hello().weights == used


class Connector:
    """A stand-in for a connector."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self._connectors = [None]  # Whatever another connector uses this name for.

    def set_weight_version(self, version: str) -> None:
        self.versions.append(version)


def test_weight_version_of_vllm_reaches_the_connectors() -> None:
    follow_engine()
    follow_engine()
    alone, inner, innermost = Connector(), Connector(), Connector()
    for each in (alone, multi(inner, object(), multi(innermost)), None):
        core = object.__new__(EngineCore)
        core.scheduler = SimpleNamespace(get_kv_connector=lambda each=each: each)
        core.set_weight_version("step-1")
        assert core.get_weight_version() == "step-1"
    assert alone.versions == inner.versions == innermost.versions == ["step-1"]


class Saving:
    """A scheduler with a finished request whose blocks are used for two more steps."""

    def __init__(self) -> None:
        self.steps = 2

    def has_unfinished_requests(self) -> bool:
        return False

    def has_finished_requests(self) -> bool:
        return self.steps > 0

    def step(self) -> None:
        self.steps -= 1

    def reset_prefix_cache(self, *_: bool) -> bool:
        return not self.steps


@pytest.mark.parametrize("kind", [EngineCore, EngineCoreProc])
def test_engine_without_a_loop_finishes_saves_before_a_reset(kind: type[EngineCore]) -> None:
    finish_before_resets()
    finish_before_resets()
    core = kind.__new__(kind)
    core.scheduler = saving = Saving()
    core.step_fn = saving.step
    assert core.reset_prefix_cache(True, reset_connector=True) == (kind is EngineCore)


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"trained")
    return LoRARequest("adapter", 1, str(folder))


def ask_until_tracked(engine: Engine, request: Request) -> None:
    """Ask for hits until the identity of the request's adapter is known, and a lookup was sent."""
    wait_until(lambda: (engine.scheduler.matched_tokens(request, 0), engine.scheduler._requests)[1])


def test_request_waits_for_the_identity_of_its_adapter(
    engine: Engine, cache: Cache, lora: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, files_of = Event(), adapters.files_of
    monkeypatch.setattr(adapters, "files_of", lambda path: read.wait(10) and files_of(path))
    request = make_request(TOKENS, lora_request=lora)
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    read.set()
    ask_until_tracked(engine, request)
    look_up = cache.receive(Lookup)
    known = engine.scheduler._requests[request.request_id].adapter
    assert known is not None
    root = request_root(namespace("model", engine.scheduler._layout), request, known.identity)
    ids = list(request.all_token_ids)
    assert look_up.keys == join_keys(chunk_keys(root, ids, CHUNK_TOKENS))
    engine.scheduler.finished(request, ([],))


def test_load_fails_if_its_adapter_is_loaded_again(engine: Engine, cache: Cache, lora: LoRARequest) -> None:
    request = make_request(TOKENS, lora_request=lora)
    engine.scheduler.on_new_request(request)
    ask_until_tracked(engine, request)
    cache.send(Found(cache.receive(Lookup).ticket, [1, 2], [4096, 8192], [0, 0], 0))
    wait_until(lambda: engine.scheduler.matched_tokens(request, 0) == (2 * CHUNK_TOKENS, True))
    engine.scheduler.allocated(request, engine.blocks([1, 2, 3, 4]), 2 * CHUNK_TOKENS)
    engine.scheduler.adapters.loads(LoRARequest("adapter", 1, lora.lora_path, load_inplace=True))
    engine.step(0)
    worker: Any = engine.worker
    assert [job.failure for job in worker.loads] == ["its adapter was loaded again"]


def test_block_pool_is_empty_only_after_a_reset() -> None:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    assert is_empty(pool)
    blocks = pool.get_new_blocks(1)
    assert not is_empty(pool)
    key: Any = b"any"
    pool.cached_block_hash_to_block.insert(key, blocks[0])
    pool.free_blocks(blocks)
    assert not is_empty(pool)
    assert pool.reset_prefix_cache()
    assert is_empty(pool)
