"""The registry: instances and tiers by name, holders, changes and limits."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from kvtier.fleet.controller import registry as registry_module
from kvtier.fleet.controller.checks import MAX_TIERS
from kvtier.fleet.controller.errors import (
    AmbiguousModel,
    RefusedInstance,
    UnknownModel,
    UnknownName,
    WrongPrompt,
)
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.registry import MAX_MODELS, Models, Registry
from kvtier.fleet.member.protocol import (
    HeldBy,
    Hello,
    Lost,
    Model,
    ServedAt,
    TierDescription,
    UpToDate,
    WhoHolds,
    WhoServes,
)
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from tests.rigs.running_controller import (
    DISK,
    LAYOUT,
    MODEL,
    POOL,
    RAM,
    TIERS,
    TIMEOUT_SECONDS,
    RegisteringInstance,
    RunningController,
    heartbeat,
    hello,
    keys_of,
    unconnected,
)

pytestmark = pytest.mark.anyio

KEYS = keys_of("prompt", 10)


async def admit(registry: Registry, instance: str = "one", **changes: Any) -> Member:
    return await registry.admit(hello(instance, **changes), unconnected())


async def who_holds(instance: RegisteringInstance, ticket: int = 7) -> dict[str, int]:
    await instance.send(WhoHolds(ticket, join_keys(KEYS)))
    answer = await instance.receive()
    assert isinstance(answer, HeldBy)
    assert answer.ticket == ticket
    return dict(zip(answer.peers, answer.chunks, strict=True))


async def test_instances_and_tiers_are_found_by_name() -> None:
    registry = Registry()
    one = await admit(registry, "one")
    two = await admit(registry, "two", tiers=[*TIERS, TierDescription("fast", "cpu", 1, False)])
    assert registry.find("one") is one
    assert registry.members == {"one": one, "two": two}
    with pytest.raises(UnknownName, match="no instance 'three'; known: one, two") as unknown:
        registry.find("three")
    assert unknown.value.known == ["one", "two"]
    assert registry.find_tier(("one", "ssd")) == registry.find_tier(("one", "disk")) == (one, DISK)
    assert registry.find_tier(("one", "cpu")) == (one, RAM)
    assert registry.find_tier(("two", "fast")) == (two, 3)
    with pytest.raises(UnknownName, match="no tier 'cpu' in instance 'two'; known: fast, pool, ram, ssd"):
        registry.find_tier(("two", "cpu"))


async def test_places_of_disconnected_instances_are_reused() -> None:
    registry = Registry()
    one = await admit(registry, "one")
    registry.stored(one, RAM, KEYS)
    registry.leave(one, "it is a test")
    registry.stored(one, RAM, KEYS)  # Sent before it left, but processed later.
    two = await admit(registry, "two")
    assert sorted(two.places) == sorted(one.places)
    assert registry.holders.prefixes(KEYS) == {}
    registry.leave(one, "again")
    assert list(registry.members) == ["two"]


async def test_instance_receives_the_other_holders_of_a_prompt(running: RunningController) -> None:
    async with (
        running.holding("few", KEYS[:2]),
        running.holding("most", KEYS[:6], tier=DISK) as most,
        running.holding("no_listener", KEYS, peer=None),
        running.holding("pool", KEYS, tier=POOL),
        running.holding("later", KEYS[1:]),
        running.holding("asker", KEYS) as asker,
    ):
        assert await who_holds(asker) == {"most:8200": 6, "few:8200": 2}
        await most.report(KEYS[6:], RAM)
        await running.wait_until(
            lambda: running.registry.holders.count(running.member("most").places[RAM]) == 4
        )
        found = await who_holds(asker)
        assert list(found.items()) == [("most:8200", 10), ("few:8200", 2)], "the sum of its tiers"
        await most.send(Lost())
        await running.wait_until(lambda: not running.member("most").up_to_date)
        assert await who_holds(asker) == {"few:8200": 2}
        await most.report(KEYS[:3], RAM)
        assert (await who_holds(most))["asker:8200"] == 10
        assert await who_holds(asker) == {"most:8200": 3, "few:8200": 2}, "whether it is up to date or not"
    await running.wait_until(lambda: not running.registry.members)
    async with running.connect("asker") as asker:
        assert await who_holds(asker) == {}


async def test_addresses_of_registered_instances_are_known(running: RunningController) -> None:
    async with (
        running.holding("Most", KEYS),
        running.holding("no_listener", KEYS, peer=None),
        running.connect("asker") as asker,
    ):
        asked = ["169.254.169.254:80", "test-host:8200", "most:8200", "most:8201", "no_listener:8200"]
        await asker.send(WhoServes(3, asked))
        assert await asker.receive() == ServedAt(3, ["test-host:8200", "most:8200"])
    async with running.connect("asker") as asker:
        await running.wait_until(lambda: list(running.registry.members) == ["asker"])
        await asker.send(WhoServes(4, asked))
        assert await asker.receive() == ServedAt(4, ["test-host:8200"]), "another instance on that host"


async def test_number_of_holders_in_an_answer_is_limited(running: RunningController) -> None:
    registry = running.registry
    for number in range(20):
        member = await admit(registry, f"holder-{number}")
        registry.stored(member, RAM, KEYS[: number // 2])
    async with running.connect("asker") as asker:
        found = await who_holds(asker)
    assert sorted(found.values(), reverse=True) == [9, 9, 8, 8, 7, 7, 6, 6]


async def test_changes_wake_watchers(running: RunningController) -> None:
    all_changes = running.registry.changes
    seen = all_changes.count

    async def changes() -> bool:
        nonlocal seen
        with anyio.move_on_after(TIMEOUT_SECONDS) as scope:
            seen = await all_changes.after(seen)
        return not scope.cancelled_caught

    async with running.connect("one") as instance:
        assert await changes()
        await instance.send(UpToDate())
        assert await changes()
        await instance.send(heartbeat(), heartbeat(), heartbeat(used=1))
        await running.wait_until(lambda: _used(running) == 1)
        assert await changes()
        with anyio.move_on_after(0.01) as scope:
            await all_changes.after(seen)
        assert scope.cancelled_caught, "several changes cause one notification"
    assert await changes()


def _used(running: RunningController) -> int | None:
    latest = running.member().heartbeat
    return None if latest is None else latest.tiers[RAM].used


async def test_number_of_instances_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_MEMBERS", 2)
    registry = Registry()
    await admit(registry, "one")
    await admit(registry, "two")
    with pytest.raises(RefusedInstance, match="has 2 instances, which is the limit"):
        await admit(registry, "three")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instance": ""}, "is not a valid instance id"),
        ({"instance": "a b"}, "is not a valid instance id"),
        ({"instance": "a" * 129}, "is not a valid instance id"),
        ({"instance": "one\n"}, "is not a valid instance id"),
        ({"host": "a\x1b[31mb"}, "not printable"),
        ({"kvtier": ""}, "is empty"),
        ({"peer": "nowhere"}, "the instance's peer address: 'nowhere' is not an address"),
        ({"peer": "h" * 300 + ":1"}, "longer than 256 characters"),
        ({"tiers": []}, "the instance has 0 tiers"),
        ({"tiers": TIERS * MAX_TIERS}, "the instance has 48 tiers, not 1 to 16"),
        ({"tiers": TIERS[:1] * 2}, "two of the instance's tiers have the same name"),
        ({"tiers": [TierDescription("", "cpu", 1, False)]}, "the instance's tiers: '' is empty"),
    ],
)
async def test_invalid_hello_is_refused(changes: dict[str, Any], reason: str) -> None:
    registry = Registry()
    message: Hello = hello(**changes)
    with pytest.raises(RefusedInstance, match=reason):
        await registry.admit(message, unconnected())
    assert not registry.members


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


@pytest.mark.parametrize(
    ("length", "count"),
    [(0, 0), (1, 1), (31, 31), (33, 32), (255, 224), (256, 256), (257, 256), (1000, 992), (1024, 1024)],
)
def test_prompt_is_split_into_chunks_like_in_an_engine(length: int, count: int) -> None:
    """Whole blocks are stored, or all of a prompt that has less than one."""
    tokens = list(range(length))
    prompt = PromptChunks.of(MODEL, tokens, "tenant")
    root = root_key(MODEL.namespace, "tenant")
    assert prompt.prompt_tokens == length
    assert prompt.keys == chunk_keys(root, tokens[:count], 256, tail=True)
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
