"""The keys of a request depend on everything that its KV depends on, and are never hashed twice."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import kvtier
from kvtier.integrations.vllm.request import RequestState, cacheable, request_root
from kvtier.memory.keys import chunk_keys

CHUNK = 64
NAMESPACE = bytes(32)
TOKENS = list(range(1000, 1000 + 3 * CHUNK + 10))


def request(**more: Any) -> Any:
    """A stand-in for a vLLM request, with the used attributes."""
    fields = {
        "all_token_ids": list(TOKENS),
        "prompt_token_ids": list(TOKENS),
        "num_prompt_tokens": len(TOKENS),
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**fields, **more})


def keys(source: Any, tokens: int = len(TOKENS)) -> list[bytes]:
    return list(RequestState(source, request_root(NAMESPACE, source), CHUNK).extend(tokens))


def image(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_plain_request_has_the_common_keys() -> None:
    plain = request()
    assert keys(plain) == chunk_keys(request_root(NAMESPACE, plain), TOKENS, CHUNK)


def test_keys_grow_with_the_tokens() -> None:
    growing = request(all_token_ids=TOKENS[:CHUNK])
    state = RequestState(growing, request_root(NAMESPACE, growing), CHUNK)
    first = list(state.extend(CHUNK))
    growing.all_token_ids = TOKENS
    assert state.extend(len(TOKENS)) == keys(request())
    assert state.keys[:1] == first
    assert state.parent(0) == state.root
    assert state.parent(2) == state.keys[1]


def test_inputs_that_vllm_numbers_are_not_cached() -> None:
    """The first image of every process has the same number, so it would be a hit for any other image."""
    picture = request(mm_features=[image("renderer0-mm-1-image-0", 0, CHUNK)])
    assert cacheable(picture)
    assert not cacheable(picture, numbered=True)
    assert cacheable(request(), numbered=True)


def test_tail_has_its_own_key() -> None:
    plain = request()
    state = RequestState(plain, request_root(NAMESPACE, plain), CHUNK)
    tails = {state.tail_key(3 * CHUNK + more) for more in range(1, 10)}
    assert len(tails) == 9
    assert not tails.intersection(state.keys)
    assert state.tail_key(3 * CHUNK) is None


def test_salts_and_adapters_do_not_share_keys() -> None:
    roots = {
        request_root(NAMESPACE, request(cache_salt=salt), adapter)
        for salt in (None, "a", "b")
        for adapter in ("", "fingerprint", "other")
    }
    assert len(roots) == 9


def test_image_changes_its_chunk_and_all_following() -> None:
    plain = keys(request())
    second = keys(request(mm_features=[image("cat", CHUNK + 5, 20)]))
    assert second[0] == plain[0]
    assert not set(second[1:]).intersection(plain)
    assert keys(request(mm_features=[image("dog", CHUNK + 5, 20)]))[1] != second[1]
    assert keys(request(mm_features=[image("cat", CHUNK + 6, 20)]))[1] != second[1]


def test_image_across_two_chunks_changes_both() -> None:
    wide = image("cat", CHUNK - 4, 8)
    assert keys(request(mm_features=[wide]))[0] != keys(request())[0]
    other = image("dog", CHUNK - 4, 8)
    assert keys(request(mm_features=[wide]))[1] != keys(request(mm_features=[other]))[1]


def test_prompts_without_tokens_are_not_cacheable() -> None:
    assert cacheable(request())
    assert not cacheable(request(prompt_embeds=object()))
    assert not cacheable(request(prompt_token_ids=None))


def ahead(source: Any, lookahead: int) -> list[bytes]:
    state = RequestState(source, request_root(NAMESPACE, source), CHUNK, lookahead)
    return list(state.extend(len(source.all_token_ids)))


def test_lookahead_is_part_of_the_keys() -> None:
    """The KV of drafts depends on the tokens after a chunk: without them it has no key."""
    exact, other = request(all_token_ids=TOKENS[: 2 * CHUNK]), list(TOKENS)
    other[CHUNK] += 1
    assert len(ahead(exact, 0)) == 2
    assert ahead(exact, 1) == ahead(request(), 1)[:1]
    assert ahead(request(), 1)[0] != ahead(request(all_token_ids=other), 1)[0]
    assert ahead(request(), 1)[0] != ahead(request(), 2)[0]
    assert keys(request())[0] == keys(request(all_token_ids=other))[0]


def test_images_in_the_lookahead_are_part_of_the_keys() -> None:
    cat, dog = (request(mm_features=[image(name, CHUNK, 8)]) for name in ("cat", "dog"))
    assert ahead(cat, 1)[0] != ahead(dog, 1)[0]
    assert ahead(cat, 0)[0] == ahead(dog, 0)[0]


def test_tail_is_stored_only_if_its_kv_needs_no_later_token() -> None:
    """vLLM computes the last token again, and with it all that a lookahead of one token affects."""
    state = RequestState(request(), request_root(NAMESPACE, request()), CHUNK, 1)
    assert state.tail_key(len(TOKENS)) is not None
    state = RequestState(request(), request_root(NAMESPACE, request()), CHUNK, 2)
    assert state.tail_key(len(TOKENS)) is None


def tail_of(tokens: list[int], lookahead: int) -> bytes | None:
    """Return the key of the tail that ends one block after the second chunk."""
    source = request(all_token_ids=tokens)
    return RequestState(source, request_root(NAMESPACE, source), CHUNK, lookahead).tail_key(2 * CHUNK + 16)


def test_tail_within_a_prompt_depends_on_the_tokens_after_it() -> None:
    """vLLM computes none of its tokens again."""
    for lookahead in range(3):
        for after in range(4):
            other = list(TOKENS)
            other[2 * CHUNK + 16 + after] += 1
            assert (tail_of(other, lookahead) == tail_of(TOKENS, lookahead)) == (after >= lookahead)


def test_tail_shorter_than_the_lookahead_has_no_key() -> None:
    """The chunk before it has none yet."""
    source = request(all_token_ids=TOKENS[: 2 * CHUNK + 17], num_prompt_tokens=2 * CHUNK + 17)
    state = RequestState(source, request_root(NAMESPACE, source), CHUNK, lookahead=20)
    assert state.tail_key(2 * CHUNK + 16) is None


OWNERS = {"lookup": "lookups", "saving": "saves", "early": "early", "transfer": "prompt_transfers"}
"""The parts of a request's state, and the only module that changes each."""


def test_each_part_of_a_requests_state_is_changed_by_one_module() -> None:
    for path in (Path(kvtier.__file__).parent / "integrations" / "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed = [each.value for target in targets for each in ast.walk(target) if is_attribute(each)]
            parts = {each.attr for each in (*changed, node.value) if isinstance(each, ast.Attribute)}
            assert {OWNERS[part] for part in parts & OWNERS.keys()} <= {path.stem}, ast.unparse(node)


def is_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute)
