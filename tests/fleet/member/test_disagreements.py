"""How engines and instances that serve the same model differ, so that they share no chunk."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvtier.fleet.member.served_models import MODEL, Described, EngineModel, ServedModels, disagreements
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace

PLATFORM = ("cpu", "LBHNC", "auto", "torch.bfloat16", "", "AVX2")
FACTS = {"files or --revision": "files 12ab", "--quantization": "None", MODEL: "hash a"}


def layout(
    chunk: int = 256, block: int = 16, *, platform: Sequence[str] = PLATFORM, **more: int
) -> ChunkLayout:
    return ChunkLayout(chunk, (GroupLayout(block, (1024,)),), platform="|".join(platform), **more)


def described(where: str, layout: ChunkLayout, *names: str, weights_id: str = "", **facts: str) -> Described:
    """Return an engine; ``facts`` by position: the files, the quantization, the rest of the model."""
    given = {name: facts.get(short, FACTS[name]) for short, name in zip("fqm", FACTS, strict=True)}
    return Described(where, names or ("llama",), namespace(str(given), layout, weights_id), layout, given)


def changed(field: int, value: str) -> tuple[str, ...]:
    return (*PLATFORM[:field], value, *PLATFORM[field + 1 :])


@pytest.mark.parametrize(
    ("other", "fields"),
    [
        ({"platform": changed(3, "torch.float16")}, "--dtype torch.float16 instead of torch.bfloat16"),
        ({"platform": changed(2, "fp8")}, "--kv-cache-dtype fp8 instead of auto"),
        ({"platform": changed(1, "LBNHC")}, "VLLM_KV_CACHE_LAYOUT LBNHC instead of LBHNC"),
        ({"platform": changed(4, "FLASH")}, "--attention-backend FLASH instead of -"),
        ({"platform": changed(5, "AVX512")}, "kind of CPU AVX512 instead of AVX2"),
        ({"platform": (*PLATFORM, "dcp 2")}, "pipeline and context parallelism dcp 2 instead of -"),
        ({"chunk": 512}, "chunk_tokens 512 instead of 256"),
        ({"block": 32}, "--block-size 32 instead of 16"),
        ({"ranks": 2}, "--tensor-parallel-size 2 instead of 1"),
    ],
)
def test_layouts_that_differ_are_named_by_what_to_set(other: dict[str, object], fields: str) -> None:
    served = [
        described("engine b", layout(**other)),
        described("engine a", layout()),
        described("engine c", layout()),
    ]  # type: ignore[arg-type]
    (finding,) = disagreements(served)
    assert finding.found == f"engine b and engine a, engine c share no chunk of llama: {fields}"
    assert fields.startswith(finding.remedy.removeprefix("start all of them with the same "))


@pytest.mark.parametrize(
    ("facts", "weights_id", "fields"),
    [
        ({"f": "files 34cd"}, "", "files or --revision files 34cd instead of files 12ab"),
        ({"q": "awq", "m": "hash b"}, "", "--quantization awq instead of None"),
        ({"m": "hash b"}, "", f"{MODEL} hash b instead of hash a"),
        ({}, "step-2", "weights_id - instead of -"),
    ],
)
def test_models_that_differ_in_the_same_layout(facts: dict[str, str], weights_id: str, fields: str) -> None:
    served = [
        described("a", layout()),
        described("c", layout()),
        described("b", layout(), weights_id=weights_id, **facts),
    ]
    (finding,) = disagreements(served)
    assert finding.found == f"b and a, c share no chunk of llama: {fields}"


def test_layers_are_named_if_they_alone_differ() -> None:
    wider = msgspec.structs.replace(layout(), groups=(GroupLayout(16, (2048,)),))
    (finding,) = disagreements([described("a", layout()), described("b", wider)])
    assert finding.remedy == "start all of them with the same layers"


def test_other_models_equal_ones_and_parts_of_one_engine_do_not_disagree() -> None:
    parts = [layout(platform=(*PLATFORM, f"pp 2, tp 1, part {number} of 2")) for number in (1, 2)]
    assert not list(disagreements([]))
    assert not list(disagreements([described("a", layout()), described("b", layout())]))
    assert not list(disagreements([described("a", layout()), described("b", layout(512), "mistral")]))
    assert not list(
        disagreements([described(f"{engine}/{part}", parts[part]) for engine in "ab" for part in (0, 1)])
    )


def test_engines_without_facts_are_not_compared() -> None:
    """They are of an older version: what they differ in is not known."""
    old = described("old", layout(512))._replace(facts={})
    assert not list(disagreements([old, described("a", layout())]))


def test_a_model_with_several_names_is_compared_once() -> None:
    served = [described("a", layout(), "chat", "org/llama"), described("b", layout(512), "chat", "org/llama")]
    assert len(list(disagreements(served))) == 1


def test_long_lists_are_shortened() -> None:
    many = [described(f"instance {number}", layout()) for number in range(200)]
    (finding,) = disagreements([*many, described("instance x", layout(512))])
    assert finding.found.startswith(
        "instance x and instance 0, instance 1, instance 2, instance 3 and 196 more share no chunk of llama"
    )


def test_a_place_that_has_both_is_named_once() -> None:
    (finding,) = disagreements(described("engines of a", each) for each in (layout(), layout(512)))
    assert finding.found.startswith("engines of a share no chunk of llama")


def test_disconnected_engines_do_not_disagree() -> None:
    served = ServedModels()
    for name, one in (("a", layout()), ("b", layout(512))):
        served.add(name, namespace("m", one), one, EngineModel(["llama"], facts=FACTS))
    assert [finding.found[:21] for finding in served.disagreements()] == ["engine b and engine a"]
    assert [bool(model.facts) for model in served.models] == [True, True]
    served.remove("b")
    assert not list(served.disagreements())
    assert [bool(model.facts) for model in served.models] == [True, False]


def test_engine_model_of_an_older_engine_is_decoded() -> None:
    old = msgspec.msgpack.encode([["llama"], None])
    assert msgspec.msgpack.decode(old, type=EngineModel) == EngineModel(["llama"])
