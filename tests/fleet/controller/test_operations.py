"""The controller's operations: the commands it sends, and the results."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvtier.concurrency.locks import LockManager, LockRequest
from kvtier.fleet.controller import prompts
from kvtier.fleet.controller.bodies import LookupBody
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.member.protocol import Changed, Command, Delete, Fetch, Model, TierDescription, Tokenize
from kvtier.memory.keys import ChunkKey, join_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from tests.rigs.running_controller import (
    A_TO_B,
    B_TO_A,
    CHUNK,
    KEYS,
    LENGTHS,
    MODEL,
    POOL,
    RAM,
    REST,
    TIMEOUT_SECONDS,
    TOKENS,
    WHOLE,
    Gate,
    RunningController,
    keys_of,
    tokens_of,
)
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


# Lookups


async def test_lookup_lists_each_tier_of_each_instance(controller: RunningController) -> None:
    assert (await controller.post_refused("/lookup", 404, tokens=TOKENS))["known"] == []
    async with (
        controller.instance("a", ram=KEYS[:2], disk=KEYS),
        controller.instance("b", ram=KEYS[1:]),
        controller.instance("c", disk=KEYS[:4]),
    ):
        found = await controller.post("/lookup", tokens=TOKENS, model="llama")
        assert found == {
            "model": "meta/llama",
            "num_tokens": WHOLE + REST,
            "instances": {"a": {"ram": 2 * CHUNK, "ssd": WHOLE + REST}, "c": {"ssd": WHOLE}},
            "event_id": "",
            "layout_info": {"a": ["LocalDiskBackend", WHOLE + REST], "c": ["LocalDiskBackend", WHOLE]},
        }
        assert await controller.held(tokens=tokens_of(3)) == {
            "a": {"ram": 2 * CHUNK, "ssd": 3 * CHUNK},
            "c": {"ssd": 3 * CHUNK},
        }
        assert await controller.held(salt="another tenant") == {}
        assert await controller.held(tokens=[]) == {}
    await controller.wait_until(lambda: not controller.registry.members)
    assert await controller.held() == {}


async def test_model_with_two_layouts_is_found_in_both(controller: RunningController) -> None:
    layout = ChunkLayout(128, (GroupLayout(32, (4096,)),))
    other = Model(["meta/llama"], namespace("meta/llama", layout), layout, False)
    keys = PromptChunks.of(other, TOKENS).keys
    async with controller.instance("a", ram=KEYS[:2]), controller.instance("b", ram=keys[:3], models=[other]):
        assert await controller.held() == {"a": {"ram": 2 * CHUNK}, "b": {"ram": 3 * 128}}
        event = await controller.done("/move", **B_TO_A)
        assert (event["num_tokens"], event["chunks"]) == (3 * 128, 3)


async def test_model_is_optional_if_there_is_only_one(controller: RunningController) -> None:
    other = Model(["mistral"], namespace("mistral", MODEL.layout), MODEL.layout, False)
    async with controller.instance("a", ram=KEYS), controller.instance("b", models=[other]):
        problem = await controller.post_refused("/lookup", 422, tokens=TOKENS)
        assert problem["known"] == ["meta/llama", "mistral"]
        problem = await controller.post_refused("/lookup", 404, tokens=TOKENS, model="gemma")
        assert "'gemma'" in problem["detail"]
        assert problem["known"] == ["llama", "meta/llama", "mistral"]
        pinned = await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)
        assert pinned["model"] == "meta/llama", "the only model that this instance serves"
        await controller.post_refused("/move", 422, **A_TO_B)


# Prompts


async def test_prompt_is_tokenized_by_an_instance_that_serves_the_model(
    controller: RunningController,
) -> None:
    without = Model(MODEL.names, MODEL.namespace, MODEL.layout, False)
    text = "a prompt of bytes " * 64
    keys = PromptChunks.of(MODEL, list(text.encode())).keys  # It ends with a block.
    async with (
        controller.instance("a", ram=keys, models=[without]) as a,
        controller.instance("b") as b,
        controller.instance("c") as c,
    ):
        found = await controller.post("/lookup", prompt=text)
        assert found["num_tokens"] == len(text)
        assert found["instances"] == {"a": {"ram": len(text)}}
        assert len(b.commands) == 1
        await controller.done("/pin", instance="c", tier="ram", prompt=text)
        assert isinstance(c.commands[0], Tokenize), "the named instance tokenizes"
        b.refuse = "its tokenizer is broken"
        assert (await controller.post("/lookup", prompt=text))["num_tokens"] == len(text)
        assert not a.commands


async def test_prompt_that_no_instance_can_tokenize_is_refused_with_reasons(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "TOKENIZE_SECONDS", 0.05)
    without = Model(MODEL.names, MODEL.namespace, MODEL.layout, False)
    async with controller.instance("a", models=[without]):
        problem = await controller.post_refused("/lookup", 422, prompt="text")
        assert "no connected instance has its tokenizer" in problem["detail"]
        assert "send `tokens` instead" in problem["detail"]
    async with controller.instance("b") as b, controller.instance("c") as c:
        b.refuse, c.before = "it is broken", Gate(Tokenize)
        problem = await controller.post_refused("/lookup", 422, prompt="text")
        assert "b: it is broken" in problem["detail"]
        assert "c: no answer within 0.05 s" in problem["detail"]
        await controller.wait_until(lambda: c.cancelled)


async def test_one_thread_computes_keys_of_long_prompts_even_if_a_lookup_is_cancelled(
    controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, release, computing, at_once = PromptChunks.of, threading.Event(), 0, list[int]()

    def wait_and_compute(*arguments: Any) -> PromptChunks:
        nonlocal computing
        computing += 1
        at_once.append(computing)
        assert release.wait(TIMEOUT_SECONDS)
        computing -= 1
        return compute(*arguments)

    lookup, body = controller.controller.operations.lookup, LookupBody(tokens=TOKENS)
    async with controller.instance("a", ram=KEYS):
        monkeypatch.setattr(prompts, "INLINE_TOKENS", 0)
        monkeypatch.setattr(PromptChunks, "of", wait_and_compute)
        async with anyio.create_task_group() as others, anyio.create_task_group() as cancelled:
            cancelled.start_soon(lookup, body)
            await until(lambda: at_once)
            cancelled.cancel_scope.cancel()
            others.start_soon(lookup, body)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            release.set()
        assert await controller.held() == {"a": {"ram": WHOLE + REST}}
    assert at_once == [1, 1, 1]


# Moves


async def test_move_is_done_once_the_source_has_deleted_its_chunks(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS, disk=KEYS) as a, controller.instance("b") as b:
        accepted = await controller.post("/move", **A_TO_B)
        assert accepted["num_tokens"] == WHOLE + REST
        event = await controller.wait_for_end(accepted)
        assert (event["kind"], event["state"], event["error"]) == ("move", "done", None)
        assert (event["source"], event["target"]) == (["a", "ram"], ["b", "ram"])
        assert event["model"] == "meta/llama"
        assert (event["chunks"], event["chunks_done"], event["bytes_done"]) == (5, 5, 500)
        assert event["result"] == {
            "tokens": WHOLE + REST, "chunks": 5, "bytes": 500, "removed": 5, "unpinned": 0, "reason": None,
        }  # fmt: skip
        assert await controller.held() == {"a": {"ssd": WHOLE + REST}, "b": {"ram": WHOLE + REST}}
        [fetch], [delete] = b.commands, a.commands
        assert fetch == Fetch(fetch.ticket, RAM, "a:8200", MODEL.namespace, join_keys(KEYS), LENGTHS, None)
        assert delete == Delete(delete.ticket, RAM, join_keys(KEYS))

        again = await controller.done("/move", **A_TO_B)
        assert (again["num_tokens"], again["chunks"], again["started_at"]) == (0, 0, None)
        assert len(b.commands) == 1, "there is nothing to do"


async def test_copy_keeps_the_source(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b"):
        event = await controller.done("/move", **A_TO_B, copy=True)
        assert (event["kind"], event["result"]["chunks"], event["result"]["removed"]) == ("copy", 5, 0)
        assert await controller.held() == {"a": {"ram": WHOLE + REST}, "b": {"ram": WHOLE + REST}}
        assert not a.commands
        moved = await controller.done("/move", **A_TO_B)
        assert (moved["result"]["chunks"], moved["result"]["bytes"], moved["result"]["removed"]) == (5, 0, 5)


async def test_move_within_one_instance_involves_no_peer(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS, peer=None) as a:
        await controller.done("/move", old_position=["a", "cpu"], new_position=["a", "disk"], tokens=TOKENS)
        assert await controller.held() == {"a": {"ssd": WHOLE + REST}}
        assert [type(command) for command in a.commands] == [Fetch, Delete]
        assert isinstance(a.commands[0], Fetch)
        assert a.commands[0].peer is None
        await controller.done("/move", old_position=["a", "ssd"], new_position=["a", "ram"], tokens=TOKENS)
        assert await controller.held() == {"a": {"ram": WHOLE + REST}}


async def test_chunks_promoted_only_for_the_move_are_removed_from_memory(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS[:1], disk=KEYS) as a, controller.instance("b"):
        event = await controller.done(
            "/move", old_position=["a", "ssd"], new_position=["b", "ram"], tokens=TOKENS
        )
        assert event["result"]["removed"] == 5
        assert list(a.held[RAM]) == KEYS[:1], "it was in memory before the move"
        assert await controller.held() == {"a": {"ram": CHUNK}, "b": {"ram": WHOLE + REST}}


async def test_interrupted_move_is_completed_by_repeating_it(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS[2:]), controller.instance("b", ram=KEYS[:2]):
        assert await controller.held() == {"b": {"ram": 2 * CHUNK}}
        event = await controller.done("/move", **A_TO_B)
        assert (event["num_tokens"], event["chunks"]) == (2 * CHUNK + REST, 3)
        assert await controller.held() == {"b": {"ram": WHOLE + REST}}
    async with controller.instance("c", ram=KEYS[3:]), controller.instance("d", ram=KEYS[:2]):
        event = await controller.done(
            "/move", old_position=["c", "ram"], new_position=["d", "ram"], tokens=TOKENS
        )
        assert event["chunks"] == 0, "they follow a chunk that neither holds"


async def test_full_target_takes_what_fits_and_the_source_keeps_the_rest(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        b.capacity = 3
        event = await controller.done("/move", **A_TO_B)
        assert event["result"] == {
            "tokens": 3 * CHUNK, "chunks": 3, "bytes": 300, "removed": 3, "unpinned": 0, "reason": "no room",
        }  # fmt: skip
        assert list(a.held[RAM]) == KEYS[3:]
        assert await controller.failed("/move", **A_TO_B) == "no room", "no chunk fits"
        assert list(a.held[RAM]) == KEYS[3:]


async def test_move_of_evicted_chunks_reports_the_reason(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:

        async def evict(command: Command) -> None:
            a.held[RAM] = dict.fromkeys(KEYS[:2])
            await a.send(Changed(RAM, b"", join_keys(KEYS[2:])))

        b.before = evict
        event = await controller.done("/move", **A_TO_B)
        assert event["result"]["reason"] == "the peer does not hold it"
        assert (event["result"]["chunks"], event["result"]["removed"]) == (2, 2)
        assert await controller.held() == {"b": {"ram": 2 * CHUNK}}


async def test_progress_is_reported(controller: RunningController) -> None:
    reported: list[tuple[str, int, int]] = []
    async with controller.instance("a", ram=KEYS), controller.instance("b"):
        with controller.events.subscribe(
            lambda event: reported.append((event.state, event.chunks_done, event.bytes_done))
        ):
            await controller.done("/move", **A_TO_B)
    assert reported[:4] == [("queued", 0, 0), ("running", 0, 0), ("running", 1, 100), ("running", 2, 200)]
    assert reported[-1] == ("done", 5, 500)


async def test_unknown_names_are_refused_with_the_known_ones(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b"):
        problem = await controller.post_refused("/move", 404, **A_TO_B | {"new_position": ["z", "ram"]})
        assert problem["known"] == ["a", "b"]
        problem = await controller.post_refused("/move", 404, **A_TO_B | {"old_position": ["a", "tape"]})
        assert problem["known"] == ["pool", "ram", "ssd"]
        problem = await controller.post_refused("/clear", 404, instance="a", tier="tape")
        assert "tape" in problem["detail"]
        for path in ("/prefetch", "/pin", "/unpin"):
            await controller.post_refused(path, 404, instance="z", tier="ram", tokens=TOKENS)


async def test_invalid_operations_are_refused(controller: RunningController) -> None:
    peers = [TierDescription("ram", "cpu", 1 << 30, False), TierDescription("peers", "peers", None, True)]
    async with controller.instance("a", ram=KEYS), controller.instance("b"):
        same = {"old_position": ["a", "ram"], "new_position": ["a", "cpu"], "tokens": TOKENS}
        assert "are the same" in (await controller.post_refused("/move", 422, **same))["detail"]
        pool = {"old_position": ["a", "pool"], "new_position": ["b", "ram"], "tokens": TOKENS}
        assert "use /prefetch" in (await controller.post_refused("/move", 422, **pool))["detail"]
    async with controller.instance("a", tiers=peers):
        problem = await controller.post_refused("/pin", 422, instance="a", tier="peers", tokens=TOKENS)
        assert "name a tier of one of them" in problem["detail"]


async def test_source_without_a_listener_is_reported(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS, peer=None) as a, controller.instance("b"):
        assert "set peer.listen" in await controller.failed("/move", **A_TO_B)
        assert list(a.held[RAM]) == KEYS


# Concurrency


async def test_opposite_moves_are_serialized_and_lose_nothing(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS) as a, controller.instance("b") as b:
        first, gate = await controller.post_held("/move", b, **A_TO_B)
        back = await controller.post("/move", **B_TO_A)
        same = await controller.post("/move", **A_TO_B)
        queued = await controller.get(f"/events/{back['event_id']}", wait=0.01)
        assert (queued["state"], queued["num_tokens"]) == ("queued", 0)
        gate.opened.set()
        events = [await controller.wait_for_end(event) for event in (first, back, same)]
        assert [event["state"] for event in events] == ["done"] * 3
        assert [event["result"]["removed"] for event in events] == [5, 5, 5], "each move when it was its turn"
        assert events[1]["num_tokens"] == WHOLE + REST
        assert not a.held[RAM]
        assert list(b.held[RAM]) == KEYS


async def test_duplicate_move_has_nothing_to_do(controller: RunningController) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        first, gate = await controller.post_held("/move", b, **A_TO_B)
        second = await controller.post("/move", **A_TO_B)
        assert second["num_tokens"] == WHOLE + REST
        gate.opened.set()
        assert (await controller.wait_for_end(first))["result"]["removed"] == 5
        event = await controller.wait_for_end(second)
        assert (event["state"], event["num_tokens"], event["chunks"]) == ("done", 0, 0)
        assert await controller.held() == {"b": {"ram": WHOLE + REST}}


async def test_clear_during_a_move_runs_after_it(
    controller: RunningController,
) -> None:
    async with controller.instance("a", ram=KEYS), controller.instance("b") as b:
        move, gate = await controller.post_held("/move", b, **A_TO_B)
        clear = await controller.post("/clear", instance="b")
        other = await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS[1:])
        assert other["num_tokens"] == 0, "it concerns other chunks"
        gate.opened.set()
        assert (await controller.wait_for_end(move))["result"]["removed"] == 5
        assert (await controller.wait_for_end(clear))["result"]["removed"] == 5
        assert await controller.held() == {}


# Prefetch


async def test_prefetch_from_the_own_disk_and_the_peer_with_the_longest_prefix(
    controller: RunningController,
) -> None:
    async with (
        controller.instance("a", disk=KEYS[:2]) as a,
        controller.instance("b", ram=KEYS[:3]),
        controller.instance("c", disk=KEYS[:4]),
        controller.instance("d", ram=KEYS, peer=None),
    ):
        event = await controller.done("/prefetch", instance="a", tier="ram", tokens=TOKENS, deadline="5s")
        [fetch] = a.commands
        assert isinstance(fetch, Fetch)
        assert (fetch.peer, fetch.seconds) == ("c:8200", 5.0)
        assert (event["source"], event["target"]) == (None, ["a", "ram"])
        assert (event["num_tokens"], event["result"]["chunks"], event["result"]["reason"]) == (WHOLE, 4, None)
        assert list(a.held[RAM]) == KEYS[:4]
        again = await controller.done("/prefetch", instance="a", tier="ram", tokens=TOKENS)
        assert (again["num_tokens"], again["result"]["bytes"]) == (WHOLE, 0)


async def test_lookup_in_a_pool_is_left_to_the_instance(
    controller: RunningController,
) -> None:
    own = [TierDescription("ram", "cpu", 1 << 30, False), TierDescription("ssd", "disk", 1 << 30, False)]
    async with controller.instance("a") as a, controller.instance("b", tiers=own) as b:
        a.held[POOL].update(dict.fromkeys(KEYS[:3]))  # Not reported to the controller.
        accepted = await controller.post("/prefetch", instance="a", tier="ram", tokens=TOKENS)
        assert accepted["num_tokens"] == 0
        event = await controller.wait_for_end(accepted)
        assert (event["state"], event["num_tokens"], event["chunks"]) == ("done", 3 * CHUNK, 3)
        assert list(a.held[RAM]) == KEYS[:3]
        nothing = await controller.done("/prefetch", instance="b", tier="ssd", tokens=unknown_tokens())
        assert nothing["started_at"] is None
        assert not b.commands


def unknown_tokens() -> list[int]:
    return [7] * 1000


FIRST, SECOND = keys_of("prompts", 2)


def request(instances: str, *roots: ChunkKey, exclusive: bool = True) -> LockRequest:
    return LockRequest(frozenset(roots) if roots else None, frozenset(instances), exclusive=exclusive)


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (request("ab", FIRST), request("ba", FIRST), True),
        (request("ab", FIRST), request("ab", SECOND), False),
        (request("ab", FIRST), request("cd", FIRST), True),
        (request("ab", FIRST, exclusive=False), request("ab", FIRST, exclusive=False), False),
        (request("ab", FIRST, exclusive=False), request("ab", FIRST), True),
        (request("a"), request("ab", FIRST), True),
        (request("a"), request("bc", FIRST), False),
        (request("a"), request("a"), True),
        (request("a"), request("a", FIRST, exclusive=False), True),
    ],
)
async def test_conflicts(first: LockRequest, second: LockRequest, conflict: bool) -> None:
    assert first.conflicts_with(second) == second.conflicts_with(first) == conflict
    locks = LockManager()
    locks.enqueue(first)
    assert locks.is_free(second) != conflict


async def test_conflicting_requests_run_one_at_a_time_in_order() -> None:
    locks = LockManager()
    in_flight: set[int] = set()
    order: list[int] = []

    async def work(number: int, own: LockRequest) -> None:
        async with locks.acquire(own):
            in_flight.add(number)
            assert in_flight == {number}
            await anyio.lowlevel.checkpoint()
            in_flight.discard(number)
            order.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            own = request("ab", FIRST, exclusive=number % 3 > 0) if number % 2 else request("b")
            locks.enqueue(own)
            tasks.start_soon(work, number, own)
    assert order == list(range(20))


async def test_copies_run_concurrently_and_a_delete_waits_for_all() -> None:
    locks = LockManager()
    together = anyio.Event()
    inside = itertools.count(1)
    order: list[str] = []

    async def copy(own: LockRequest) -> None:
        async with locks.acquire(own):
            if next(inside) == 3:
                together.set()
            await together.wait()
            order.append("copy")

    async def move(own: LockRequest) -> None:
        async with locks.acquire(own):
            order.append("move")

    copies = [request("ab", FIRST, exclusive=False) for _ in range(3)]
    last = request("ab", FIRST)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for own in copies:
                locks.enqueue(own)
            locks.enqueue(last)
            tasks.start_soon(move, last)
            for own in copies:
                tasks.start_soon(copy, own)
    assert order == ["copy"] * 3 + ["move"]


async def test_cancelled_request_leaves_the_queue() -> None:
    locks = LockManager()
    first, second, third = (request("ab", FIRST) for _ in range(3))
    for own in (first, second, third):
        locks.enqueue(own)

    async def wait_for_second(scope: anyio.CancelScope) -> None:
        with scope:
            async with locks.acquire(second):
                raise AssertionError

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()
            tasks.start_soon(wait_for_second, scope)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
        locks.release(first)
        async with locks.acquire(third):
            pass
    assert locks.is_free(request("ab", FIRST))
