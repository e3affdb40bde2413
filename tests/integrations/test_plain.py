"""What vLLM, torch and requests pass to kvtier is encoded as the builtin types that it stands for."""

from __future__ import annotations

import enum
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtier.bridge.protocol import Spans, decode_from_engine
from kvtier.integrations.vllm.hints import read_hints
from kvtier.integrations.vllm.plain import builtin, commit_of, plain, text
from kvtier.integrations.vllm.request import RequestState, request_root
from kvtier.integrations.vllm.traces import Traces
from kvtier.memory.keys import chunk_keys
from kvtier.observability.traces.spans import Sampling
from kvtier.rpc.frames import encode_body
from tests.rigs.stepping import make_request


class Name(str):
    __slots__ = ()


class Revision(Name):
    """Like huggingface_hub's ``ResolvedRevision``: equal to what the user has typed."""

    __slots__ = ()
    resolved = Name("c" * 40)


class Number(int):
    pass


class Kind(enum.Enum):
    FULL = "full"


class Level(enum.IntEnum):
    LOW = 1


class Dtype:
    """Like a dtype of torch, which has a name only."""

    def __repr__(self) -> str:
        return "torch.float32"


FOREIGN = [
    (Name("a"), "a"),
    (Number(3), 3),
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.array([1, 2]), [1, 2]),
    (Kind.FULL, "full"),
    (Level.LOW, 1),
    (Dtype(), "torch.float32"),
    (Path("a/b"), "a/b"),
    ({"b", "a"}, ["a", "b"]),
    (OrderedDict({Name("b"): Number(1), 2: None}), {"2": None, "b": 1}),
    ([(Name("a"),)], [("a",)]),
    (b"x", b"x"),
]


@pytest.mark.parametrize(("value", "expected"), FOREIGN, ids=[type(value).__name__ for value, _ in FOREIGN])
def test_builtin_types(value: Any, expected: Any) -> None:
    found = plain(value)
    assert (found, type(found)) == (expected, type(expected))
    assert msgspec.msgpack.encode(found) == msgspec.msgpack.encode(expected)


def test_encoder_of_foreign_types() -> None:
    values, expected = zip(*(case for case in FOREIGN if not isinstance(case[0], dict | set)), strict=True)
    assert msgspec.msgpack.encode(values, enc_hook=builtin) == msgspec.msgpack.encode(expected)


def test_object_without_a_name_is_equal_in_every_process() -> None:
    assert plain({"hook": object()}) == plain({"hook": object()})


def test_deep_nesting_is_a_value_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        plain(deep)


def test_names() -> None:
    assert (text(None), text(Name("a")), text(Path("/a")), text(7)) == ("", "a", "/a", "7")
    assert type(text(Name("a"))) is str


@pytest.mark.parametrize(
    "name", ["\ud800" * 200, Name("a" * 200), 7], ids=["not encodable", "subclass", "number"]
)
def test_id_of_a_traced_request_can_be_sent(name: Any) -> None:
    """The message of spans is encoded in a hook of all requests, and must not end the engine."""
    sent: list[Spans] = []

    def send(message: Spans) -> bool:
        sent.append(decode_from_engine(encode_body(message)))
        return True

    bridge: Any = SimpleNamespace(
        welcome=SimpleNamespace(sampling=Sampling(1.0, follows_client=True)), responsive=True, send=send
    )
    traces = Traces(bridge)
    traces.begin(make_request(1, request_id=name, trace_headers=None))
    traces.end(name)
    [span] = sent[0].spans
    shown = str(span.attributes["kvtier.request"])
    assert shown == {"\ud800": "?" * 128, "a": "a" * 128, "7": "7"}[str(name)[0]]


def test_commit_of_a_revision() -> None:
    assert commit_of(Revision("main")) == "c" * 40
    assert type(commit_of(Revision("main"))) is str
    assert (commit_of("main"), commit_of(None)) == ("main", None)


def test_hints_of_a_program_are_those_of_a_client() -> None:
    """A program that uses vLLM's ``LLM`` passes its own objects."""
    given = {
        "cache": {"tenant": Name("a"), "priority": np.int64(1), "retention": np.float32(4)},
        Name("kv_transfer"): {"to": Name("127.0.0.1:1")},
        "expect": {"tokens": Number(3)},
    }
    sent = {
        "cache": {"tenant": "a", "priority": 1, "retention": 4.0},
        "kv_transfer": {"to": "127.0.0.1:1"},
        "expect": {"tokens": 3},
    }
    hints = read_hints({"kvtier": given})
    assert hints == read_hints({"kvtier": sent})
    assert msgspec.msgpack.encode(hints) == msgspec.msgpack.encode(read_hints({"kvtier": sent}))


def test_deeply_nested_hints_are_invalid() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"cache": deep}
    with pytest.raises(ValueError, match="nested too deeply"):
        read_hints({"kvtier": deep})


def request(kind: Any, number: Any, path: Any) -> Any:
    image = SimpleNamespace(
        identifier=kind("image"), mm_position=SimpleNamespace(offset=number(10), length=number(50))
    )
    return SimpleNamespace(
        num_prompt_tokens=0,
        all_token_ids=[number(token) for token in range(200)],
        prompt_token_ids=[1],
        cache_salt=kind("salt"),
        lora_request=SimpleNamespace(lora_name=kind("lora"), lora_path=path("/adapters/lora")),
        mm_features=[image],
    )


def test_keys_of_a_program_are_those_of_a_client() -> None:
    def keys(source: Any) -> tuple[list[bytes], bytes]:
        state = RequestState(source, request_root(bytes(32), source), 64, 1, 32)
        return list(state.extend(200)), state.block_hashes(0, 192)

    expected = keys(request(str, int, str))
    assert keys(request(Name, Number, Path)) == keys(request(Name, np.int64, Path)) == expected
    assert expected[0] != chunk_keys(request_root(bytes(32), request(str, int, str)), range(200), 64)


@pytest.mark.parametrize("salt", [7, np.int64(7), Path("a"), Kind.FULL])
def test_salt_of_any_type_is_a_tenant(salt: Any) -> None:
    source = request(str, int, str)
    source.cache_salt = salt
    state = RequestState(source, request_root(bytes(32), source), 64)
    assert state.chunk_hints is not None
    assert msgspec.msgpack.encode(state.chunk_hints)
    assert request_root(bytes(32), source) != request_root(bytes(32), request(str, int, str))
