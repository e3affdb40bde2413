"""Caches without async: the same names and results, from any thread, until the block ends."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import KVTierError, SettingsError, sync
from kvtier import cache as cache_module

from .conftest import TOKEN_BYTES, MakeSettings, Prompt, rows


def methods(kind: type[object]) -> dict[str, Any]:
    return {name: member for name, member in vars(kind).items() if not name.startswith("_")}


def parameters(method: Any) -> list[tuple[str, object, object]]:
    function = getattr(method, "__func__", method)
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_every_method_of_a_model_is_there_with_the_same_arguments() -> None:
    theirs = {name: each for name, each in methods(kvtier.ModelCache).items() if callable(each)}
    ours = methods(sync.ModelCache)
    assert set(ours) == set(theirs)
    assert {name: parameters(each) for name, each in ours.items()} == {
        name: parameters(each) for name, each in theirs.items()
    }


@pytest.mark.parametrize("name", ["TieredCache", "Instance"])
def test_other_methods_take_some_of_the_same_arguments(name: str) -> None:
    for method, ours in methods(getattr(sync, name)).items():
        theirs = parameters(getattr(getattr(kvtier, name), method))
        assert [each for each in theirs if each in parameters(ours)] == parameters(ours)


def test_every_method_works(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(600)
    target = np.zeros((600, TOKEN_BYTES // 4), "f4")
    with sync.TieredCache.open(settings(disk={"write": "never"})) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        assert model.store(tokens, rows(tokens)) == model.held_tokens(tokens) == 600
        assert model.retrieve(tokens, target) == 600
        assert target.tobytes() == rows(tokens)
        assert len(model.keys(tokens)) == 3
        assert model.move(tokens, "ram", "ssd", copy=True) == 600
        assert model.prefetch(tokens) == model.pin(tokens) == 600
        model.unpin(tokens)
        assert cache.clear(tiers=["ssd"]).chunks == model.clear(tokens) == 3
        assert cache.drain(10)
        status: Any = cache.status()
        assert (status["pinned_chunks"], status["arena"]["used_bytes"]) == (0, 0)


def test_errors_reach_the_caller(settings: MakeSettings, prompt: Prompt) -> None:
    with sync.TieredCache.open(settings(ssd=0)) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        with pytest.raises(SettingsError, match="unknown tier 'tape'"):
            model.move(prompt(300), "ram", "tape")
        with pytest.raises(KVTierError, match="token IDs must be"):
            model.pin([-1])
    with pytest.raises(ZeroDivisionError), sync.TieredCache.open(settings(ssd=0)):
        raise ZeroDivisionError


def test_a_closed_cache_says_so_and_keeps_its_chunks_on_disk(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(600)
    with sync.TieredCache.open(settings()) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        model.store(tokens, rows(tokens))
    for call in (lambda: model.held_tokens(tokens), cache.status):
        with pytest.raises(KVTierError, match="the cache is closed: use it within the `with` block"):
            call()
    with sync.TieredCache.open(settings()) as cache:
        target = bytearray(600 * TOKEN_BYTES)
        assert cache.model("llama", token_bytes=TOKEN_BYTES).retrieve(tokens, target) == 600
        assert target == rows(tokens)


def test_the_block_ends_after_the_calls_of_other_threads(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, copying, waiting = prompt(600), threading.Event(), threading.Event()
    copy, wait = cache_module.copy_all, sync.wait
    stored: list[int] = []

    def copy_later(copies: Any) -> None:
        copying.set()
        assert waiting.wait(10), "nothing waits for this call"
        copy(copies)

    def begin_to_wait(calls: Any) -> None:
        waiting.set()
        wait(calls)

    monkeypatch.setattr(cache_module, "copy_all", copy_later)
    monkeypatch.setattr(sync, "wait", begin_to_wait)
    with sync.TieredCache.open(settings(ssd=0)) as cache:
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        thread = threading.Thread(target=lambda: stored.append(model.store(tokens, rows(tokens))))
        thread.start()
        assert copying.wait(60)
    thread.join(60)
    assert stored == [600]


def test_instance(settings: MakeSettings, prompt: Prompt) -> None:
    tokens = prompt(600)
    with sync.Instance.open(settings(ssd=0)) as instance:
        model = instance.cache.model("llama", token_bytes=TOKEN_BYTES)
        assert model.store(tokens, rows(tokens)) == 600
        assert instance.what_if() is None
        assert instance.status()["instance"] == instance.name
