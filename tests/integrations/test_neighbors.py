"""Beside other connectors in vLLM's ``MultiConnector``, with vLLM's own classes and without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kvtier import Settings
from kvtier.bridge import protocol
from kvtier.errors import UnsupportedEngine
from kvtier.integrations.vllm.connector import KVTierConnector
from kvtier.integrations.vllm.foreign_loads import MAX_STEPS_IN_FLIGHT, ForeignLoads
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.lookups import Lookups
from kvtier.integrations.vllm.metrics import TransferPromMetrics
from kvtier.integrations.vllm.multi_part import PartMetadata, SchedulerSides, other_parts
from kvtier.integrations.vllm.patches import recompute_failed_loads
from kvtier.integrations.vllm.request import RequestState
from kvtier.integrations.vllm.scheduler import SchedulerSide
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.pipeline.query import Query
from tests.rigs.stepping import make_request, scheduled
from tests.rigs.vllm.bare_connector import bare_connector

LAYOUT = ChunkLayout(32, (GroupLayout(16, (64,)),))


class Bridge:
    """A cache process that does not answer."""

    welcome = None
    accepts_requests = reserves = responsive = late = False
    waited = 0.0
    epoch = 0

    def abandon(self, leases: Sequence[int]) -> None:
        assert not leases

    def reserve(self, _: object) -> None:
        raise AssertionError

    def update(self) -> None:
        pass

    probe = poll_if_due = update

    def send_outcomes(self, after: float = 0.0) -> None:
        pass

    def end(self, outcome: protocol.Outcome) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=protocol.Outcome) == outcome

    def answer_ended(self, *_: object) -> None:
        pass

    def take_explanations(self) -> Sequence[protocol.Explanation]:
        return ()


class Sent(Bridge):
    """A cache process that reads what it is sent, and never answers."""

    accepts_requests = True

    def look_up(self, query: Query, described: protocol.RequestInfo | None = None) -> int:
        root, marks = (b"", b"") if query.block_tags is None else query.block_tags[:2]
        expected = query.expect_chunks, query.expect_seconds
        prompt = *expected, query.hints, root, marks, query.compute_seconds, query.repeated, described
        return self._send(protocol.Lookup(1, join_keys(query.keys), query.tokens, *prompt))

    def transfer_kv(
        self, to: str, root: ChunkKey, keys: Sequence[ChunkKey], tokens: int, trace: bytes = b""
    ) -> int:
        return self._send(protocol.KVTransfer(2, to, root, join_keys(keys), tokens, trace))

    def _send(self, message: Any) -> int:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
        return int(message.ticket)

    def found(self, ticket: int, wait: float = 0.0) -> None:
        assert ticket == 1

    cancel = end_kv_transfer = lambda *_, **__: None

    def transferred(self, ticket: int) -> None:
        raise KeyError(ticket)


def side(bridge: Any = None) -> SchedulerSide:
    model = ModelLayout(LAYOUT, bytes(32), (), group_ids=(0,))
    weights: Any = SimpleNamespace(is_mixed=lambda: False, current=SimpleNamespace(namespace=bytes(32)))
    bridge = bridge or Bridge()
    return SchedulerSide(Settings(chunk_tokens=32), model, bridge, weights=weights)


def connector(one: SchedulerSide | None = None) -> KVTierConnector:
    return bare_connector(scheduler=SchedulerSides([one or side()], LAYOUT))


def multi(*connectors: Any) -> MultiConnector:
    made = object.__new__(MultiConnector)
    made._connectors = list(connectors)
    made._all_support_hma = True
    made._extra_async_saves, made._requests_to_connector = {}, {}
    return made


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"cache": [value]}
    return value


@pytest.mark.parametrize(
    "hints",
    [{}, {"cache": "off"}, {"unknown": 1}, None, [1], "x", float("nan"), nested(1000), nested(10_000)],
)
def test_one_of_two_answers_a_request_with_hints(hints: object) -> None:
    """Two answers under one name end the engine."""
    both = multi(connector(), connector())
    request = make_request(64, kv_transfer_params={"kvtier": hints, "other": 1})
    both.on_new_request(request)
    request.status = RequestStatus.FINISHED_STOPPED
    held, answer = both.request_finished_all_groups(request, ([1, 2, 3, 4],))
    assert not held
    assert answer == {"kvtier": {"peer": None}}
    assert request.kv_transfer_params == {"other": 1}, "others read theirs"


TEXT = st.text(max_size=20) | st.sampled_from(
    ["1.2.3.4:5", "x" * 100_000, "a:" + "9" * 5000, "[::1]:1", "\ud800"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, -(2**63), 2**64])
    | st.floats()
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
MODES = st.sampled_from(["both", "off", "read", "write"])


def fields(**known: Any) -> Any:
    """Return known hints, of which any part may be missing, and be of any type."""
    return VALUES | st.fixed_dictionaries({}, optional={name: each | VALUES for name, each in known.items()})


SECONDS, ADDRESSES = st.floats(0, 100), st.just("10.0.0.1:8200")
CACHE = {
    "tenant": TEXT,
    "priority": st.integers(-100, 100),
    "retention": SECONDS,
    "resume": SECONDS,
    "recompute": SECONDS,
    "mode": MODES,
}
HINTS = fields(
    kv_transfer=fields(to=ADDRESSES),
    expect=fields(tokens=st.integers(1, 2**31), seconds=SECONDS),
    cache=MODES | fields(**CACHE),
)


@given(VALUES | st.fixed_dictionaries({"kvtier": HINTS}), st.none() | TEXT, st.integers(1, 100))
@example({"kvtier": {"expect": {"tokens": 10**400, "seconds": 1e308}}}, None, 64)
def test_no_hints_end_the_engine(params: Any, salt: str | None, tokens: int) -> None:
    """Whatever clients send, and whatever of it a message to the cache process contains."""
    sides = [side(Sent()) for _ in range(2)]
    both = multi(*map(connector, sides))
    request = make_request(tokens, kv_transfer_params=params, cache_salt=salt)
    both.on_new_request(request)
    assert both.get_num_new_matched_tokens(request, 0) == (0, False)
    request.status = RequestStatus.FINISHED_STOPPED
    held, answer = both.request_finished_all_groups(request, ([1, 2, 3, 4, 5, 6, 7],))
    assert not held
    hinted = isinstance(params, dict) and "kvtier" in params
    assert answer == ({"kvtier": {"peer": None}} if hinted else None)
    assert not any(each._requests for each in sides)


@pytest.mark.parametrize("fields", [{"cache_salt": "\ud800"}, {"cache_salt": 7}])
def test_request_that_cannot_be_read_is_not_cached(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a hook raises about its content."""
    one = side()
    request = make_request(64, **fields)
    if fields["cache_salt"] == 7:

        def fail(*_: object) -> None:
            raise RecursionError

        monkeypatch.setattr(Lookups, "look_up", fail)
    one.on_new_request(request)
    assert one.matched_tokens(request, 0) == (0, False)
    request.status = RequestStatus.FINISHED_STOPPED
    assert one.finished(request, ([1, 2, 3, 4],)) == (False, None)


def test_second_engine_of_a_process_has_metrics() -> None:
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="KVTierConnector"))
    for _ in range(2):
        metrics = TransferPromMetrics(
            config, {each: each for each in (Counter, Gauge, Histogram)}, ["engine"], {0: ["0"]}
        )
        metrics.observe({"looked_up_tokens": 5, "hit_tokens/ram": 3})
        assert REGISTRY.get_sample_value("kvtier_looked_up_tokens_total", {"engine": "0"}) == 5


class Payload(KVConnectorHandshakeMetadata):
    """What another connector reports."""


def test_metadata_of_another_connector_is_ignored() -> None:
    model: Any = SimpleNamespace(parts=1)
    assert other_parts(model, [Payload(), Payload()], 1) == []


def test_parts_that_are_hidden_by_another_connector_are_refused() -> None:
    model: Any = SimpleNamespace(parts=2)
    workers = [PartMetadata(0, LAYOUT, bytes(32), 1, ""), Payload()]
    with pytest.raises(
        UnsupportedEngine, match=r"the Payload of another connector.*list KVTierConnector first"
    ):
        other_parts(model, workers, 1)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_only_loads_of_others_fail_a_request(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_handle_failed_recving", Scheduler._handle_failed_recving)
    recompute_failed_loads()
    recompute_failed_loads()
    one = side()
    monkeypatch.setattr(one, "loads", lambda name: name == "ours")
    ours = connector(one)
    scheduler = object.__new__(Scheduler)
    scheduler.connector = multi(object(), ours)
    scheduler.recompute_kv_load_failures = policy == "recompute"
    scheduler.failed_recving_kv_req_ids = set()
    scheduler.requests = {
        name: SimpleNamespace(status=RequestStatus.WAITING_FOR_REMOTE_KVS, num_computed_tokens=32)
        for name in ("ours", "other")
    }
    failed = scheduler._handle_failed_recving({"ours", "other", "unknown"})
    assert failed == ({"other"} if policy == "fail" else set())
    assert scheduler.requests["ours"].num_computed_tokens == 0
    assert "ours" in scheduler.failed_recving_kv_req_ids
    assert scheduler.recompute_kv_load_failures == (policy == "recompute")


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORTED])
def test_request_whose_load_failed_elsewhere_stores_nothing(
    status: RequestStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With policy `fail`, vLLM ends it with the tokens that were to be loaded counted as computed."""
    one = side()
    monkeypatch.setattr(Bridge, "responsive", True)
    monkeypatch.setattr(Bridge, "reserves", True)
    request = make_request(64)
    one.on_new_request(request)
    request.num_computed_tokens, request.status = 64, status
    assert one.finished(request, ([1, 2, 3, 4],)) == (False, None)
    one.build_metadata(scheduled({}))  # type: ignore[arg-type]  # It reserves what is left to store.


def test_saves_go_on_whatever_steps_vllm_reports() -> None:
    """vLLM 0.30 to 0.33 call ``take_events`` once for each step, with and without an output."""
    loads = ForeignLoads(16)
    loads.process()  # Of no step.
    loads.schedule(loads=True)
    assert loads.pending
    loads.schedule(loads=False)
    loads.process()
    assert not loads.pending
    loads.schedule(loads=True)
    for _ in range(MAX_STEPS_IN_FLIGHT):
        assert loads.pending
        loads.schedule(loads=False)
    assert not loads.pending


def test_keys_of_replaced_tokens_are_forgotten() -> None:
    """A session goes on with other tokens in the place of the last one, which was not computed."""
    request = make_request(64, all_token_ids=list(range(64)))
    state = RequestState(request, ChunkKey(bytes(32)), 32)
    before = list(state.extend(64))
    request.num_computed_tokens = 63
    request.all_token_ids = [*range(63), 99, 100]
    request.num_prompt_tokens = request.num_tokens = 65
    state.follow_prompt()
    after = state.extend(64)
    assert after[0] == before[0]
    assert after[1] != before[1]
