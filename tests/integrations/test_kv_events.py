"""KV events: what routers see of the tiers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.integrations.vllm import compat, kv_events
from kvtier.integrations.vllm.kv_events import (
    STEP_DESCRIBED,
    STEP_PUBLISHED,
    EngineBlocks,
    KVEvents,
    published_group,
)
from kvtier.integrations.vllm.request import RequestState, request_root
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.rigs.router_index import RouterIndex

BLOCK, CHUNK = 16, 64
GROUP = 1
RAM, SSD, PEERS, POOL = 1, 2, 4, 8
"""Bits of the tiers in :class:`Bridge`."""

init_none_hash(sha256_cbor)
_numbers = itertools.count()


class Bridge:
    """A stand-in for the bridge to a cache process."""

    def __init__(self) -> None:
        self.connections, self.epoch, self.accepts_requests = 1, 7, True
        self.welcome = SimpleNamespace(media=["cpu", "disk", "peers", "redis"])
        self.watched: list[ChunkKey] = []
        self.forgotten: list[ChunkKey] = []
        self.held: dict[ChunkKey, int] = {}

    def watch(self, keys: Sequence[ChunkKey], forget: Sequence[ChunkKey] = ()) -> bool:
        self.watched += keys
        self.forgotten += forget
        return True

    def take_held(self) -> dict[ChunkKey, int]:
        held, self.held = self.held, {}
        return held


class Engine:
    """vLLM's block pool, and the events of its connector as a router receives them."""

    def __init__(self, *, hash_block: int = BLOCK, window: int = 0, beside: Engine | None = None) -> None:
        """``beside``: of which this is another kvtier, in a ``MultiConnector``."""
        self.hash_block = hash_block
        self.pool = beside.pool if beside else BlockPool(16, True, hash_block, enable_kv_cache_events=True)
        group = GroupLayout(BLOCK, (64,), window=window)
        layout = ChunkLayout(CHUNK, (group,))
        self.model: Any = SimpleNamespace(layout=layout, group_ids=(GROUP,))
        manager: Any = SimpleNamespace(
            block_pool=self.pool, kv_cache_event_metadata=(("mamba", None), ("full_attention", None))
        )
        self.bridge = Bridge()
        any_bridge: Any = self.bridge
        self.events = KVEvents(any_bridge, CHUNK, EngineBlocks(manager, self.model, 0))
        self.router = beside.router if beside else RouterIndex()
        self.published: list[Any] = []

    def request(self, tokens: int | Sequence[int], **fields: Any) -> Request:
        number = next(_numbers)
        ids = range(number << 12, (number << 12) + tokens) if isinstance(tokens, int) else tokens
        return Request(
            request_id=str(number),
            prompt_token_ids=list(ids),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.hash_block, sha256_cbor),
            **fields,
        )

    def ask(self, request: Request, *, tail: bool = False) -> list[ChunkKey]:
        """Look up a prompt; return the keys of its chunks."""
        state = RequestState(request, request_root(bytes(32), request), CHUNK)
        keys = list(state.extend(request.num_tokens))
        covered = len(keys) * CHUNK
        if tail:
            key = state.tail_key(request.num_tokens)
            assert key is not None
            keys.append(key)
            covered = request.num_tokens
        self.events.add(state, 0, keys, covered)
        return keys

    def hold(self, keys: Sequence[ChunkKey], tiers: int) -> list[Any]:
        """Let the cache process report the tiers of chunks; return the events that follow."""
        self.settle()  # Nothing is reported before it is watched.
        self.bridge.held.update(dict.fromkeys(keys, tiers))
        return self.settle()

    def step(self) -> list[Any]:
        """Publish the events of one step."""
        events = list(self.events.take())
        self.router.apply(msgspec.msgpack.encode(KVEventBatch(0.0, events)))
        self.published += events
        return events

    def settle(self) -> list[Any]:
        """Take steps until one publishes and watches nothing."""
        events: list[Any] = []
        watched = -1
        while (fresh := self.step()) or len(self.bridge.watched) > watched:
            events += fresh
            watched = len(self.bridge.watched)
        return events

    def held(self) -> dict[str, int]:
        """Return how many blocks the router knows in each of kvtier's media."""
        return {medium: len(self.router.held(medium)) for medium in ("CPU", "STORAGE")}


@pytest.fixture
def engine() -> Engine:
    return Engine()


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)


FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": dict,
    "lora": lambda: {"lora_request": LoRARequest("adapter", 3, "/adapter")},
    "salt": lambda: {"cache_salt": "tenant"},
    "images": lambda: {"mm_features": [image("a", 10, 20), image("b", 90, 30)]},
}


@pytest.mark.parametrize("use_int", ["0", "1"])
@pytest.mark.parametrize("hash_block", [BLOCK, BLOCK // 2])
@pytest.mark.parametrize("fields", FIELDS)
def test_events_are_those_of_vllm_for_the_same_blocks(
    fields: str, hash_block: int, use_int: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", use_int)
    engine = Engine(hash_block=hash_block)
    request = engine.request(3 * CHUNK, **FIELDS[fields]())
    engine.pool.emit_cached_block_events(request, 3 * CHUNK // BLOCK, BLOCK, GROUP)
    (own,) = engine.pool.take_events()
    events = engine.hold(engine.ask(request), RAM)
    # As they are sent.
    own, *chunks = msgspec.msgpack.decode(msgspec.msgpack.encode([own, *events]))
    assert [chunk["medium"] for chunk in chunks] == ["CPU"] * 3
    for name in ("block_hashes", "token_ids", "extra_keys"):
        assert [item for chunk in chunks for item in chunk[name]] == own[name], name
    for name in ("type", "block_size", "lora_id", "lora_name", "group_idx"):
        assert {chunk[name] for chunk in chunks} == {own[name]}, name
    last = [None, *(chunk["block_hashes"][-1] for chunk in chunks[:-1])]
    assert [chunk["parent_block_hash"] for chunk in chunks] == last
    assert {chunk["kv_cache_spec_kind"] for chunk in chunks} == {"full_attention"}


def test_request_of_a_program_has_the_events_of_a_clients(engine: Engine) -> None:
    """Its salt may be a subclass of ``str``, which has no encoding."""

    class Salt(str):
        __slots__ = ()

    events = engine.hold(engine.ask(engine.request(3 * CHUNK, cache_salt=Salt("tenant"))), RAM)
    assert [type(key) for (key,) in events[0].extra_keys[:1]] == [str]
    assert msgspec.msgpack.encode(events)
    assert len(events) == 3


def test_decoded_tokens_have_events_once_their_blocks_are_hashed(engine: Engine) -> None:
    request = engine.request(CHUNK - 4)
    state = RequestState(request, request_root(bytes(32), request), CHUNK)
    request.append_output_token_ids(list(range(4)))
    engine.events.add(state, 0, state.extend(CHUNK), CHUNK)
    (stored,) = engine.hold(state.keys, RAM)
    assert stored.token_ids[-4:] == [0, 1, 2, 3]
    assert len(stored.block_hashes) == CHUNK // BLOCK


def test_eviction_to_disk_never_leaves_the_router_without_the_blocks(engine: Engine) -> None:
    keys = engine.ask(engine.request(2 * CHUNK))
    engine.hold(keys, RAM)
    events = engine.hold(keys, SSD)
    kinds = [(type(event), event.medium) for event in events]
    stored, removed = (BlockStored, "STORAGE"), (BlockRemoved, "CPU")
    assert kinds == [stored, removed, stored, removed]
    assert engine.held() == {"CPU": 0, "STORAGE": 2 * CHUNK // BLOCK}
    (removed_event,) = engine.hold(keys, 0)
    assert (removed_event.medium, removed_event.group_idx) == ("STORAGE", GROUP)
    assert engine.held() == {"CPU": 0, "STORAGE": 0}


def test_medium_of_two_tiers_is_removed_with_the_last(engine: Engine) -> None:
    keys = engine.ask(engine.request(CHUNK))
    assert len(engine.hold(keys, SSD | POOL)) == 1
    assert engine.hold(keys, POOL) == []
    assert len(engine.hold(keys, 0)) == 1


def test_peers_are_not_published(engine: Engine) -> None:
    """A peer publishes its own blocks, and a router should send requests there."""
    assert engine.hold(engine.ask(engine.request(CHUNK)), PEERS) == []


def test_chunks_that_were_not_described_are_never_published(engine: Engine) -> None:
    """Such as states, and chunks of other engines."""
    engine.ask(engine.request(CHUNK))
    assert engine.hold([ChunkKey(bytes(32))], RAM) == []
    assert engine.hold([ChunkKey(bytes(32))], 0) == []


def test_only_whole_blocks_of_a_partial_chunk_are_published(engine: Engine) -> None:
    keys = engine.ask(engine.request(CHUNK + 2 * BLOCK + 5), tail=True)
    assert [len(event.block_hashes) for event in engine.hold(keys, RAM)] == [CHUNK // BLOCK, 2]
    keys = engine.ask(engine.request(CHUNK + 5), tail=True)
    assert [len(event.block_hashes) for event in engine.hold(keys, RAM)] == [CHUNK // BLOCK]


@pytest.mark.parametrize("whole_first", [False, True])
def test_blocks_that_a_partial_and_a_whole_chunk_share_stay_until_both_are_removed(
    engine: Engine, whole_first: bool
) -> None:
    ids = list(engine.request(2 * CHUNK).all_token_ids)
    tail = engine.ask(engine.request(ids[: CHUNK + 2 * BLOCK]), tail=True)
    whole = engine.ask(engine.request(ids))
    engine.hold([*whole, *tail] if whole_first else [*tail, *whole], RAM)
    (removed,) = engine.hold(whole[-1:], 0)
    assert len(removed.block_hashes) == CHUNK // BLOCK - 2
    assert engine.held()["CPU"] == CHUNK // BLOCK + 2
    engine.hold(whole[-1:], RAM)
    assert engine.hold(tail[-1:], 0) == []
    assert engine.held()["CPU"] == 2 * CHUNK // BLOCK
    engine.hold([*whole, *tail], 0)
    assert engine.held()["CPU"] == 0


def test_whole_chunk_on_disk_does_not_keep_a_partial_one_in_memory(engine: Engine) -> None:
    ids = list(engine.request(2 * CHUNK).all_token_ids)
    tail = engine.ask(engine.request(ids[: CHUNK + 2 * BLOCK]), tail=True)
    whole = engine.ask(engine.request(ids))
    engine.hold(whole, SSD)
    engine.hold(tail[-1:], RAM)
    assert engine.held()["CPU"] == 2
    engine.hold(tail[-1:], 0)
    assert engine.held() == {"CPU": 0, "STORAGE": 2 * CHUNK // BLOCK}


def test_step_does_a_bounded_amount_of_work(engine: Engine) -> None:
    request = engine.request(1000 * CHUNK)
    keys = engine.ask(request)
    steps = 0
    while len(engine.bridge.watched) < len(keys):
        before = len(engine.bridge.watched)
        engine.step()
        assert len(engine.bridge.watched) - before <= STEP_DESCRIBED
        steps += 1
    assert steps == -(-1000 // STEP_DESCRIBED)
    assert engine.bridge.watched == keys, "in this order, because a router must know the parent of a block"
    engine.bridge.held = dict.fromkeys(keys, RAM)
    steps = 0
    while events := engine.step():
        assert len(events) <= STEP_PUBLISHED
        steps += 1
    assert steps == -(-1000 // STEP_PUBLISHED)
    assert engine.router.matched(request.all_token_ids, BLOCK, "CPU") == 1000 * CHUNK
    assert engine.router.ignored == []


def test_known_chunks_are_not_described_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = engine.request(10 * CHUNK)
    keys = engine.ask(request)
    engine.settle()
    monkeypatch.setattr(EngineBlocks, "describe", lambda *_: pytest.fail("described again"))
    engine.ask(request)
    engine.settle()
    assert engine.bridge.watched == keys


def test_what_is_displaced_is_published_as_removed_a_chunk_before_its_parent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_WATCHED_CHUNKS", 8)
    first, second = engine.request(6 * CHUNK), engine.request(4 * CHUNK)
    old = engine.ask(first)
    engine.hold(old, RAM)
    engine.hold(engine.ask(second), RAM)
    assert engine.router.matched(first.all_token_ids, BLOCK, "CPU") == 4 * CHUNK
    assert engine.router.matched(second.all_token_ids, BLOCK, "CPU") == 4 * CHUNK
    assert engine.held()["CPU"] == 8 * CHUNK // BLOCK, "what is forgotten is removed"
    assert engine.bridge.forgotten == old[:3:-1]
    # Its removal from the tier needs no event any more, and the next lookup describes it again.
    assert engine.hold(old[4:], 0) == []
    engine.ask(first)
    engine.settle()
    assert engine.bridge.watched[-2:] == old[4:]


def test_lost_cache_process_is_published_as_removed_and_its_successor_as_stored(engine: Engine) -> None:
    request = engine.request(5 * STEP_PUBLISHED * CHUNK)
    keys = engine.ask(request)
    engine.hold(keys, RAM | SSD)
    engine.bridge.epoch = 0
    engine.bridge.watched.clear()
    assert engine.step(), "and the rest in later steps"
    assert engine.held()["CPU"] == 4 * STEP_PUBLISHED * CHUNK // BLOCK
    engine.settle()
    assert engine.held() == {"CPU": 0, "STORAGE": 0}
    assert engine.bridge.watched == []
    engine.bridge.epoch, engine.bridge.connections = 8, 2
    engine.settle()
    assert engine.bridge.watched == keys
    engine.hold(keys, SSD)
    assert engine.held() == {"CPU": 0, "STORAGE": len(keys) * CHUNK // BLOCK}
    assert engine.router.ignored == []


def test_reconnect_to_the_same_cache_process_keeps_what_it_confirms(engine: Engine) -> None:
    keys = engine.ask(engine.request(4 * CHUNK))
    engine.hold(keys, RAM)
    engine.bridge.connections = 2
    engine.bridge.held = dict.fromkeys(keys[:3], RAM)
    # A report of the old connection says nothing about the new one.
    engine.step()
    assert engine.bridge.watched == [*keys, *keys]
    engine.hold(keys[:3], RAM)
    assert engine.held()["CPU"] == 3 * CHUNK // BLOCK


def test_reset_of_vllms_own_cache_publishes_again_what_the_tiers_hold(engine: Engine) -> None:
    """``AllBlocksCleared`` drops the blocks of all media in a router."""
    request = engine.request(4 * CHUNK)
    keys = engine.ask(request)
    engine.hold(keys, RAM)
    engine.hold(keys[:1], RAM | SSD)
    engine.pool.reset_prefix_cache()
    engine.router.apply(msgspec.msgpack.encode(KVEventBatch(0.0, engine.pool.take_events())))
    assert engine.held() == {"CPU": 0, "STORAGE": 0}
    events = engine.settle()
    assert {type(event) for event in events} == {BlockStored}
    assert engine.held() == {"CPU": 4 * CHUNK // BLOCK, "STORAGE": CHUNK // BLOCK}
    assert engine.router.matched(request.all_token_ids, BLOCK, "CPU") == 4 * CHUNK


def test_clear_removes_everything_that_is_not_held_again(engine: Engine) -> None:
    keys = engine.ask(engine.request(4 * CHUNK))
    engine.hold(keys, RAM)
    engine.bridge.held = dict.fromkeys(keys, RAM)
    engine.events.resync()  # A report from before the clear.
    engine.bridge.watched.clear()
    (removed,) = engine.settle()
    assert len(removed.block_hashes) == 4 * CHUNK // BLOCK
    assert engine.bridge.watched == keys, "a chunk that was stored since is reported"


def test_unresponsive_cache_process_is_not_sent_more(engine: Engine) -> None:
    engine.bridge.accepts_requests = False
    keys = engine.ask(engine.request(2 * CHUNK))
    engine.step()
    assert engine.bridge.watched == []
    engine.bridge.accepts_requests = True
    engine.step()
    assert engine.bridge.watched == keys


@pytest.mark.parametrize(
    ("windows", "states", "published"),
    [
        ((0,), (False,), 0),
        ((128, 0), (False, False), 1),
        ((0, 0), (True, False), 1),
        ((256, 128), (False, False), 0),
    ],
)
def test_full_attention_is_published_if_there_is_any(
    windows: Sequence[int], states: Sequence[bool], published: int
) -> None:
    groups = [GroupLayout(BLOCK, (64,), window, state) for window, state in zip(windows, states, strict=True)]
    model: Any = SimpleNamespace(layout=ChunkLayout(CHUNK, tuple(groups)))
    assert published_group(model) == published


def test_model_of_states_only_publishes_nothing() -> None:
    model: Any = SimpleNamespace(layout=ChunkLayout(CHUNK, (GroupLayout(BLOCK, (64,), 0, True),)))
    assert published_group(model) is None


def test_event_of_vllm_033_has_the_tokens_that_its_hashes_cover(engine: Engine) -> None:
    """As its ``BlockPool`` builds it, with arguments that 0.32 does not have."""
    request = engine.request(3 * CHUNK, cache_salt="tenant")
    pool: Any = SimpleNamespace(
        hash_block_size=BLOCK,
        num_hash_lookahead_tokens=2,
        _generate_event_extra_keys=lambda _, start, end, feature: ((start, end), feature),
        _build_block_stored_event=lambda *_, **arguments: arguments,
    )
    found: Any = compat.block_stored(pool, request, GROUP, BLOCK, 4, 6)
    ids = request.all_token_ids
    assert found["lookahead_token_ids"] == [ids[80:82], ids[96:98]]
    assert found["extra_keys_list"] == [(64, 80), (80, 96)]
    pool.num_hash_lookahead_tokens = 0
    found = compat.block_stored(pool, request, GROUP, BLOCK, 4, 6)
    assert found["lookahead_token_ids"] is None


def test_two_kvtier_of_an_engine_remove_what_neither_holds(engine: Engine) -> None:
    other = Engine(beside=engine)
    request = engine.request(3 * CHUNK)
    for each in (engine, other):
        keys = each.ask(request)
        each.hold(keys, RAM | SSD)
    engine.hold(keys[2:], 0)
    other.hold(keys[1:2], RAM)
    blocks = CHUNK // BLOCK
    assert engine.held() == {"CPU": 3 * blocks, "STORAGE": 3 * blocks}
    engine.hold(keys[1:2], 0)
    assert engine.held() == {"CPU": 3 * blocks, "STORAGE": 2 * blocks}
    engine.bridge.epoch = 0  # Its cache process has exited.
    engine.settle()
    assert engine.held() == {"CPU": 3 * blocks, "STORAGE": 2 * blocks}
    other.events.forget_all()
    other.settle()
    assert engine.held() == {"CPU": 0, "STORAGE": 0}


def test_another_engine_of_a_process_is_not_beside(engine: Engine) -> None:
    """Its router, and what it holds, are others."""
    other = Engine()
    request = engine.request(CHUNK)
    for each in (engine, other):
        each.hold(each.ask(request), RAM)
    engine.hold(engine.ask(request), 0)
    assert engine.held()["CPU"] == 0
    assert other.held()["CPU"] == CHUNK // BLOCK
