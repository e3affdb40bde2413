"""Models by name, and the chunks of their prompts."""

from __future__ import annotations

import pytest

from kvtier.fleet.controller.errors import AmbiguousModel, UnknownModel, WrongPrompt
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.registry import MAX_MODELS, Models
from kvtier.fleet.member.protocol import Model
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import chunk_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from tests.fleet.controller.registering import LAYOUT, MODEL

OTHER_LAYOUT = ChunkLayout(128, (GroupLayout(32, (64,)),), ranks=2)


def model(*names: str, layout: ChunkLayout = LAYOUT) -> Model:
    return Model(list(names), namespace(names[0], layout), layout, False)


def test_model_is_found_by_each_of_its_names() -> None:
    models = Models()
    qwen = model("qwen")
    models.add([MODEL, qwen])
    assert models.find("llama") == models.find("meta/llama") == [MODEL]
    assert models.find("qwen") == [qwen]


def test_name_with_several_layouts() -> None:
    models = Models()
    both = [model("llama"), model("llama", layout=OTHER_LAYOUT)]
    models.add(both)
    assert models.find("llama") == both
    assert models.find(None) == both, "the only model"
    assert models.find("llama", both[1:]) == both[1:]


def test_unknown_and_ambiguous_models_are_reported_with_the_known_names() -> None:
    models = Models()
    with pytest.raises(UnknownModel, match="no model is known yet: no engine has connected"):
        models.find(None)
    models.add([MODEL, model("qwen")])
    with pytest.raises(UnknownModel, match="no model 'gpt'; known: llama, meta/llama, qwen") as unknown:
        models.find("gpt")
    assert unknown.value.known == ["llama", "meta/llama", "qwen"]
    with pytest.raises(AmbiguousModel, match="meta/llama, qwen") as ambiguous:
        models.find(None)
    assert ambiguous.value.known == ["meta/llama", "qwen"]
    assert models.find(None, [MODEL]) == [MODEL]
    with pytest.raises(UnknownModel):
        models.find("qwen", [MODEL])


def test_names_from_several_engines_are_merged() -> None:
    models = Models()
    models.add([model("llama", "chat")])
    models.add([model("llama", "assistant")])
    (found,) = models.find("chat")
    assert found.names == ["llama", "assistant", "chat"]


def test_number_of_models_is_limited() -> None:
    models = Models()
    models.add([MODEL])
    models.add(model(f"model {number}") for number in range(MAX_MODELS - 1))
    models.add([MODEL])
    models.add([model("one more")])
    assert len(models.all()) == MAX_MODELS
    assert models.find("llama") == [MODEL], "it was reported recently"
    with pytest.raises(UnknownModel):
        models.find("model 0")


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000, 1024])
def test_prompt_is_split_into_chunks_like_in_an_engine(count: int) -> None:
    tokens = list(range(count))
    prompt = PromptChunks.of(MODEL, tokens, "tenant")
    root = root_key(MODEL.namespace, "tenant")
    assert prompt.keys == chunk_keys(root, tokens, 256, tail=True)
    assert len(prompt.keys) == len(prompt.tokens) == len(prompt.lengths) == -(-count // 256)
    assert prompt.leading_tokens(len(prompt.keys)) == sum(prompt.tokens) == count
    assert prompt.leading_tokens(1) == min(count, 256)
    assert list(prompt.lengths) == [object_bytes(LAYOUT.payload_bytes(tokens)) for tokens in prompt.tokens]


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["1"], [1.5], [None]])
def test_invalid_token_ids_are_refused(tokens: list[int]) -> None:
    with pytest.raises(WrongPrompt, match="must be integers from 0 to 4294967295"):
        PromptChunks.of(MODEL, tokens)


def test_invalid_salt_is_refused() -> None:
    with pytest.raises(WrongPrompt):
        PromptChunks.of(MODEL, [1], "\ud800")
