"""Scheduler side while the weights change, with a scripted cache process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.outputs import KVConnectorOutput

from kvtier.bridge.protocol import Abandon, Cancel, Clear, Lookup, Reserve, UseWeights
from kvtier.integrations.vllm import adapters
from kvtier.integrations.vllm import scheduler as scheduler_module
from kvtier.integrations.vllm.compat import is_empty
from kvtier.integrations.vllm.patches import finish_before_resets, follow_engine
from kvtier.integrations.vllm.request import request_root
from kvtier.memory.fingerprint import fingerprint
from kvtier.memory.keys import chunk_keys, join_keys
from kvtier.memory.layout import has_weights, namespace
from tests.rigs.scripted_scheduling import Engine
from tests.rigs.scripted_server import ScriptedCache
from tests.rigs.stepping import CHUNK_TOKENS, make_request
from tests.rigs.waiting import wait_until

from .test_neighbors import multi

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


@pytest.fixture(autouse=True)
def pool(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """The pool of the engine, whose resets do not wait for long."""
    monkeypatch.setattr(scheduler_module, "CLEAR_SECONDS", 0.05)
    pool: Any = Pool()
    engine.scheduler.bind(pool)
    return pool  # type: ignore[no-any-return]


def keys(engine: Engine, request: Any, weights_id: str, chunks: int) -> bytes:
    """Return the keys of a request's first chunks, computed with some weights."""
    space = namespace("model", engine.layout, weights_id)
    ids = list(request.all_token_ids[: chunks * CHUNK_TOKENS])
    return join_keys(chunk_keys(request_root(space, request), ids, CHUNK_TOKENS))


def reset(engine: Engine, cache: ScriptedCache) -> UseWeights:
    """Reset weights without an id, which removes their chunks."""
    engine.scheduler.reset()
    cache.receive(Clear)
    return cache.receive(UseWeights)


def preempt(request: Any) -> None:
    request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1


def test_queued_requests_are_looked_up_again_with_the_keys_of_the_new_weights(
    engine: Engine, cache: ScriptedCache
) -> None:
    request = make_request(TOKENS)
    before = engine.ask(request)
    assert before.keys == keys(engine, request, "", 4)
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(Cancel).ticket == before.ticket
    used = cache.receive(UseWeights).weights
    assert (used.id, used.namespace) == ("step-1", namespace("model", engine.layout, "step-1"))
    engine.answer(before, 1, 2, 3, 4)
    assert engine.scheduler.matched_tokens(request, 0) == (None, False), "the late answer is not used"
    assert cache.receive(Lookup).keys == keys(engine, request, "step-1", 4)


def test_chunks_of_a_request_that_starts_again_are_stored_with_the_new_keys(
    engine: Engine, cache: ScriptedCache
) -> None:
    """As after ``reset_prefix_cache`` with ``reset_running_requests``. The pending room is given back."""
    (request,) = engine.start_misses(1, TOKENS)
    engine.step()
    reserve = cache.receive(Reserve)
    assert reserve.runs[0].keys == keys(engine, request, "", 1)
    preempt(request)
    engine.running.clear()
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(UseWeights).weights.id == "step-1"
    engine.grant(reserve)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    assert not engine.saves
    assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    engine.answer(cache.receive(Lookup))
    engine.wait_for_hit(request, 0)
    engine.running.append(request)
    engine.step()
    (run,) = cache.receive(Reserve).runs
    assert (run.keys, run.parent) == (
        keys(engine, request, "step-1", 1),
        request_root(namespace("model", engine.layout, "step-1"), request),
    )


@pytest.mark.parametrize("change", ["reset", "name"])
def test_running_requests_store_nothing_more(
    engine: Engine, cache: ScriptedCache, pool: Pool, change: str
) -> None:
    """Their KV is of both weights. New requests may hit it in vLLM's own cache."""
    (request,) = engine.start_misses(1, TOKENS)
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
    last = make_request(TOKENS)
    assert engine.ask(last).keys == keys(engine, last, engine.scheduler.weights.current.id, 4)


def test_planned_and_reserved_chunks_of_a_finished_request_are_not_stored(
    engine: Engine, cache: ScriptedCache, pool: Pool
) -> None:
    """Their room would be reserved for the new weights, or written while vLLM is free to load those."""
    (request,) = engine.start_misses(1, TOKENS)
    engine.step()
    reserve = cache.receive(Reserve)
    engine.step()
    assert engine.finish(request), "vLLM keeps the blocks until they are saved"
    pool.used = 4
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    engine.grant(reserve)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    assert cache.nothing_received()
    assert [(job.leases, job.last) for job in engine.saves] == [([], True)]


def test_load_in_flight_fails(engine: Engine, cache: ScriptedCache, pool: Pool) -> None:
    """Its leases have ended when the worker asks, so vLLM computes the prompt."""
    request = make_request(TOKENS)
    look_up = engine.load(request, 1, 2)
    pool.used = 4
    engine.step(0)
    (job,) = engine.loads
    assert job.leases == [1, 2]
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(Cancel).ticket == look_up.ticket
    cache.receive(UseWeights)
    failed = KVConnectorOutput(finished_recving={request.request_id}, failed_recving={request.request_id})
    engine.scheduler.update_from_output(failed)
    assert cache.nothing_received(), "no lease is released twice"
    assert not engine.scheduler.loads(request.request_id)


def test_unnamed_weights_are_removed_and_replaced_by_unknown_ones(
    engine: Engine, cache: ScriptedCache
) -> None:
    """Also if the cache process does not answer: the namespace is another one in any case."""
    names = {engine.scheduler.weights.current.id}
    for _ in range(3):
        used = reset(engine, cache).weights
        assert used.id.startswith("unknown-")
        assert has_weights(used.namespace, used.id)
        names.add(used.id)
    assert len(names) == 4
    request = make_request(TOKENS)
    assert engine.ask(request).keys == keys(engine, request, used.id, 4)


def test_named_weights_are_kept(engine: Engine, cache: ScriptedCache, pool: Pool) -> None:
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    engine.scheduler.reset()
    assert cache.receive(UseWeights).weights.id.startswith("unknown-"), "not preceded by Clear"
    engine.scheduler.set_weight_version("step-1")
    assert cache.receive(UseWeights).weights.id == "step-1"
    engine.scheduler.set_weight_version("default")
    assert cache.receive(UseWeights).weights.id == ""


def test_id_may_be_set_before_the_reset(engine: Engine, cache: ScriptedCache, pool: Pool) -> None:
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


def test_named_weights_are_used_after_their_reset(engine: Engine, cache: ScriptedCache, pool: Pool) -> None:
    pool.cached = 3
    engine.scheduler.set_weight_version("step-1")
    cache.receive(UseWeights)
    pool.cached = 0
    engine.scheduler.reset()
    request = make_request(TOKENS)
    assert engine.ask(request).keys == keys(engine, request, "step-1", 4)


def test_same_id_again_changes_nothing(engine: Engine, cache: ScriptedCache, pool: Pool) -> None:
    (request,) = engine.start_misses(1, TOKENS)
    pool.used = 1
    engine.scheduler.set_weight_version("default")
    engine.step()
    assert cache.receive(Reserve).runs[0].keys == keys(engine, request, "", 1)


def test_reset_while_the_cache_process_is_gone(engine: Engine, cache: ScriptedCache) -> None:
    """The next one knows the weights that are there now, although they have changed since the greeting."""
    cache.disconnect()
    engine.bridge.poll(1.0)
    assert not engine.bridge.connected
    engine.scheduler.reset()
    used = engine.scheduler.weights.current
    assert used.id.startswith("unknown-")
    cache.greet()
    wait_until(engine.bridge.ready)
    assert cache.receive(UseWeights).weights == used


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


def test_adapters_of_vllm_reach_the_connectors() -> None:
    """Before they are loaded, so that what changes while they are is found by the next check."""
    follow_engine()
    follow_engine()
    calls: list[tuple[str, object]] = []

    def note(call: str) -> Callable[[object], None]:
        return lambda argument: calls.append((call, argument))

    core: Any = object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(add_lora=note("loaded"), remove_lora=note("removed"))
    hooks = SimpleNamespace(adapter_loads=note("loads"), adapter_removed=note("was removed"))
    core.scheduler = SimpleNamespace(get_kv_connector=lambda: hooks)
    core.add_lora("adapter")
    core.remove_lora(1)
    assert calls == [("loads", "adapter"), ("loaded", "adapter"), ("removed", 1), ("was removed", 1)]


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


def ask_until_tracked(engine: Engine, request: Any) -> Lookup:
    """Ask for hits until the identity of the request's adapter is known; return the lookup."""
    wait_until(lambda: (engine.scheduler.matched_tokens(request, 0), not engine.cache.nothing_received())[1])
    return engine.cache.receive(Lookup)


def test_request_waits_for_the_identity_of_its_adapter(
    engine: Engine, lora: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, files_of = Event(), adapters.files_of
    monkeypatch.setattr(adapters, "files_of", lambda path: read.wait(10) and files_of(path))
    request = make_request(TOKENS, lora_request=lora)
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    read.set()
    look_up = ask_until_tracked(engine, request)
    identity = fingerprint(*files_of(lora.lora_path), adapters.WHOLE_BYTES)
    root = request_root(namespace("model", engine.layout), request, identity)
    ids = list(request.all_token_ids)
    assert look_up.keys == join_keys(chunk_keys(root, ids, CHUNK_TOKENS))
    engine.scheduler.finished(request, ([],))


def test_load_fails_if_its_adapter_is_loaded_again(engine: Engine, lora: LoRARequest) -> None:
    request = make_request(TOKENS, lora_request=lora)
    engine.scheduler.on_new_request(request)
    engine.answer(ask_until_tracked(engine, request), 1, 2)
    engine.wait_for_hit(request, 2 * CHUNK_TOKENS)
    engine.scheduler.allocated(request, engine.blocks([1, 2, 3, 4]), 2 * CHUNK_TOKENS)
    engine.scheduler.adapters.loads(LoRARequest("adapter", 1, lora.lora_path, load_inplace=True))
    engine.step(0)
    assert [job.failure for job in engine.loads] == ["its adapter was loaded again"]


def test_room_of_a_request_whose_adapter_was_loaded_again_is_given_back(
    engine: Engine, cache: ScriptedCache, lora: LoRARequest
) -> None:
    """What it has computed is of both adapters."""
    request = make_request(TOKENS, lora_request=lora)
    engine.scheduler.on_new_request(request)
    engine.answer(ask_until_tracked(engine, request))
    engine.wait_for_hit(request, 0)
    engine.admit(request)
    engine.step()
    engine.grant()
    engine.scheduler.adapters.loads(LoRARequest("adapter", 1, lora.lora_path, load_inplace=True))
    assert not engine.finish(request)
    engine.step(0)
    assert cache.receive(Abandon).leases == [1]
    assert engine.saved() == []


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
