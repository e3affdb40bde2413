"""An engine of several parts: how the answers of its sides are combined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.outputs import KVConnectorOutput

from kvtier.errors import UnsupportedEngine
from kvtier.integrations.vllm.connector import KVTierConnector
from kvtier.integrations.vllm.layout import ModelLayout
from kvtier.integrations.vllm.multi_part import PartMetadata, SchedulerSides, other_parts, part_metadata
from kvtier.memory.layout import ChunkLayout, GroupLayout
from tests.rigs.vllm.bare_connector import bare_connector

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))
REQUEST: Any = SimpleNamespace(request_id="a")


class Side:
    """A side that answers as it is told, and records what it is asked."""

    def __init__(self, tokens: int | None = 0, *, holds: bool = False) -> None:
        self.tokens = tokens
        self.holds = holds
        self.short: set[str] = set()
        self.reported: list[Any] = []
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        return self.tokens, bool(self.tokens)

    def finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.holds, {"by": self.tokens}

    def report(self, request: Any) -> None:
        self.reported.append(request)

    def short_loads(self, output: Any) -> set[str]:
        return self.short

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (self.calls.append(name), self.arguments.append(arguments))


def combined(*sides: Side, has_states: bool = False) -> SchedulerSides:
    every: Any = sides
    return SchedulerSides(every, ChunkLayout(64, (GroupLayout(16, (4096,), state=has_states),)))


@pytest.mark.parametrize(
    ("found", "has_states", "answer"),
    [
        ([128, 128], False, (128, True)),
        ([128, 64], False, (64, True)),
        ([128, 80], False, (64, True)),
        ([128, 0], False, (0, False)),
        ([128, None], False, (None, False)),
        ([0, None], False, (None, False)),
        ([128, 128], True, (128, True)),
        ([128, 64], True, (0, False)),
    ],
)
def test_hit_is_what_all_parts_have(
    found: list[int | None], has_states: bool, answer: tuple[int | None, bool]
) -> None:
    """In whole chunks, if they differ. A state at the end of one hit says nothing about a shorter one."""
    sides = [Side(tokens) for tokens in found]
    assert combined(*sides, has_states=has_states).matched_tokens(REQUEST, 0) == answer


def test_parts_load_again_what_all_of_them_have() -> None:
    sides = Side(), Side()
    sides[1].short = {"request"}
    output = KVConnectorOutput(finished_recving={"request"}, failed_recving={"request"})
    combined(*sides).update_from_output(output)
    assert [side.arguments for side in sides] == [[(output, {"request"})]] * 2


def test_all_workers_report_a_request_of_which_one_part_has_to_save() -> None:
    sides = Side(1, holds=True), Side(2), Side(3)
    assert combined(*sides).finished(REQUEST, ([],)) == (True, {"by": 1})
    assert [side.reported for side in sides] == [[], [REQUEST], [REQUEST]]
    idle = Side(), Side()
    assert combined(*idle).finished(REQUEST, ([],)) == (False, {"by": 0})
    assert not any(side.reported for side in idle)


@pytest.mark.parametrize(
    ("hook", "arguments", "call"),
    [
        ("on_new_request", [REQUEST], "on_new_request"),
        ("update_state_after_alloc", [REQUEST, None, 64], "allocated"),
        ("update_connector_output", [KVConnectorOutput()], "update_from_output"),
        ("bind_gpu_block_pool", [None], "bind"),
        ("reset_cache", [], "reset"),
        ("set_weight_version", ["step-2"], "set_weight_version"),
        ("get_kv_connector_stats", [], "take_stats"),
        ("take_events", [], "events"),
        ("shutdown", [], "close"),
    ],
)
def test_every_part_is_called(hook: str, arguments: list[Any], call: str) -> None:
    sides = Side(), Side(), Side()
    getattr(bare_connector(scheduler=combined(*sides)), hook)(*arguments)
    assert [side.calls for side in sides] == [[call]] * 3


def model(parts: int) -> ModelLayout:
    return ModelLayout(LAYOUT, b"n" * 32, (), (), (), 0, parts)


def worker(part: int, epoch: int, address: str = "10.0.0.2:8200") -> PartMetadata:
    return PartMetadata(part, LAYOUT, bytes([part]) * 32, epoch, address)


def test_parts_of_this_host_and_of_others() -> None:
    """A cache process that the scheduler does not use is that of another host."""
    found = other_parts(model(3), [worker(0, 7), worker(1, 7), worker(2, 8)], 7)
    assert [(each.part, each.namespace, address) for each, address in found] == [
        (1, b"\1" * 32, ""),
        (2, b"\2" * 32, "10.0.0.2:8200"),
    ]
    assert other_parts(model(1), [worker(0, 7)], 7) == []
    assert other_parts(model(1), [], 7) == []


def test_parts_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 reports the workers again when an engine of several parts wakes up."""
    opened: list[Side] = []

    def open_part(connector: Any, model: ModelLayout, address: str) -> Side:
        opened.append(Side())
        return opened[-1]

    monkeypatch.setattr(KVTierConnector, "_open_part", open_part)
    first: Any = Side()
    first.epoch = 7
    connector = bare_connector(scheduler=combined(first), model=model(2))
    workers: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {
        (0, 0): worker(0, 7),
        (1, 0): worker(1, 7),
    }
    connector.set_xfer_handshake_metadata_pp_aware(workers)
    connector.set_xfer_handshake_metadata_pp_aware(workers)
    connector.reset_cache()
    assert [side.calls for side in (first, *opened)] == [["reset"]] * 2


def test_parts_whose_cache_process_is_not_connected_yet() -> None:
    assert [address for _, address in other_parts(model(2), [worker(0, 0), worker(1, 0)], 7)] == [""]
    assert [address for _, address in other_parts(model(2), [worker(0, 0), worker(1, 8)], 0)] == [""]


def test_what_cannot_be_reached_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match=r"set peer\.listen and peer\.secret on all hosts"):
        other_parts(model(2), [worker(0, 7), worker(1, 8, "")], 7)
    with pytest.raises(UnsupportedEngine, match="no worker of 1 of the engine's 2 parts"):
        other_parts(model(2), [worker(0, 7)], 7)


def test_other_cache_processes_on_one_host_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert other_parts(model(1), [worker(0, 8)], 7) == []
    assert "different cache processes" in caplog.text


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        (None, ""),
        ("10.0.0.9:8200", "10.0.0.9:8200"),
        ("0.0.0.0:8200", "10.1.1.1:8200"),
        ("[::]:8200", "10.1.1.1:8200"),
        ("[fd00::2]:8200", "[fd00::2]:8200"),
    ],
)
def test_address_is_one_that_other_hosts_reach(
    listen: str | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.integrations.vllm.multi_part.get_ip", lambda: "10.1.1.1")
    bridge: Any = SimpleNamespace(welcome=SimpleNamespace(peer=listen), epoch=7)
    assert part_metadata(model(2), bridge).address == address
