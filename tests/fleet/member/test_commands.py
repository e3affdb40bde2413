"""Commands of the controller, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from kvtier.catalog.catalog import State
from kvtier.fleet.member import session as session_module
from kvtier.fleet.member.protocol import (
    MAX_KEYS,
    Cancel,
    Command,
    Delete,
    DeleteAll,
    Done,
    Failed,
    Fetch,
    Pin,
    Tokenize,
    Unpin,
)
from kvtier.memory.keys import join_keys, split_keys
from kvtier.pipeline import move as move_module
from kvtier.pipeline.query import Query
from kvtier.testing.backend import make_key
from tests.cache.conftest import CHUNK_OBJECT_BYTES
from tests.fleet.member.conftest import SECRET, OpenNode, Registered, fetch
from tests.rigs.scripted_controller import scripted_controller
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio
RAM, SSD = 0, 1
FETCHES = {"secret": SECRET}


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 0.5)


# Delete.


async def test_delete_removes_from_one_tier_and_returns_the_removed_keys(registered: Registered) -> None:
    async with registered(ssd=128) as (conversation, one):
        keys = await one.store(4)
        joined = join_keys([*keys[:3], make_key(99)])
        done = await conversation.done(lambda ticket: Delete(ticket, RAM, joined))
        assert sorted(split_keys(done.keys)) == sorted(keys[:3])
        assert (done.chunks, done.bytes, done.reason) == (3, 3 * CHUNK_OBJECT_BYTES, None)
        assert conversation.held == {RAM: {keys[3]}, SSD: set(keys)}
        done = await conversation.done(lambda ticket: Delete(ticket, RAM, joined))
        assert (done.chunks, done.reason) == (0, None)
        done = await conversation.done(lambda ticket: Delete(ticket, SSD, join_keys(keys)))
        assert done.chunks == 4
        assert one.held() == {RAM: {keys[3]}}


async def test_chunks_deleted_while_leased_stay_intact(registered: Registered) -> None:
    async with registered() as (conversation, one):
        keys = await one.store(4)
        found = one.cache.look_up(Query(keys))
        before = [bytes(chunk.lease.view) for chunk in found.chunks]
        done = await conversation.done(lambda ticket: Delete(ticket, RAM, join_keys(keys)))
        assert done.chunks == 4
        await one.store(16, seed=2)
        assert [bytes(chunk.lease.view) for chunk in found.chunks] == before
        found.release()


async def test_delete_all_of_one_tier_or_of_all(registered: Registered) -> None:
    async with registered(ssd=128, peer=FETCHES) as (conversation, one):
        await one.store(4)
        done = await conversation.done(lambda ticket: DeleteAll(ticket, RAM))
        assert (done.keys, done.chunks, done.bytes) == (b"", 4, 4 * CHUNK_OBJECT_BYTES)
        await one.store(6, seed=2)
        done = await conversation.done(lambda ticket: DeleteAll(ticket, None))
        assert (done.chunks, done.bytes) == (10, 16 * CHUNK_OBJECT_BYTES)
        assert one.held() == {}
        assert {tier for tier, held in conversation.held.items() if held} == set()
        namespaces = one.cache.catalog.namespaces
        assert not namespaces.is_reset(one.model.namespace), "deleting chunks does not invalidate the model"


# Pin.


async def test_pinned_chunks_stay_until_they_are_unpinned(registered: Registered) -> None:
    async with registered(ram=16) as (conversation, one):
        keys = await one.store(4)
        joined = join_keys([*keys, make_key(99)])
        done = await conversation.done(lambda ticket: Pin(ticket, joined, None))
        assert (split_keys(done.keys), done.chunks, done.bytes) == (keys, 4, 4 * CHUNK_OBJECT_BYTES)
        assert done.reason == "no tier of this instance holds the others"
        for seed in range(2, 12):
            await one.store(8, seed=seed)
        assert one.holds(keys, RAM) == [0, 1, 2, 3]
        done = await conversation.done(lambda ticket: Unpin(ticket, joined))
        assert (done.chunks, done.reason) == (5, None)
        for seed in range(12, 22):
            await one.store(8, seed=seed)
        assert one.holds(keys, RAM) == []


async def test_pin_expires(registered: Registered) -> None:
    async with registered() as (conversation, one):
        keys = await one.store(2)
        await conversation.done(lambda ticket: Pin(ticket, join_keys(keys), 60.0))
        pinned, now = one.cache.catalog.pins.holds, anyio.current_time()
        assert all(pinned(key, now) for key in keys)
        assert not any(pinned(key, now + 60) for key in keys)


# Invalid commands.


MALFORMED: dict[str, tuple[Callable[[int], Command], str]] = {
    "unknown_tier": (lambda ticket: Delete(ticket, 7, b""), "invalid tier number 7"),
    "negative_tier": (lambda ticket: DeleteAll(ticket, -1), "invalid tier number -1"),
    "half_a_key": (lambda ticket: Pin(ticket, b"half a key", None), "not a whole number"),
    "too_many": (
        lambda ticket: Unpin(ticket, bytes(32 * (MAX_KEYS + 1))),
        f"{MAX_KEYS + 1} chunks in one command exceed the limit of {MAX_KEYS}",
    ),
    "missing_lengths": (
        lambda ticket: Fetch(ticket, 0, None, b"", make_key(1), [], None),
        "1 distinct chunks with 0 lengths",
    ),
    "zero_length": (lambda ticket: Fetch(ticket, 0, None, b"", make_key(1), [0], None), "a length below 1"),
    "into_the_peers": (
        lambda ticket: Fetch(ticket, 1, None, b"", make_key(1), [4096], None),
        "tier peers cannot be written to",
    ),
    "unknown_model": (
        lambda ticket: Tokenize(ticket, b"n" * 32, "Hello"),
        "no engine of this instance has reported the location of the model's tokenizer",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_invalid_command_fails_with_a_reason(kind: str, registered: Registered) -> None:
    make, reason = MALFORMED[kind]
    async with registered(peer=FETCHES) as (conversation, _):
        assert reason in await conversation.failed(make)
        assert (await conversation.done(lambda ticket: Unpin(ticket, b""))).chunks == 0


async def test_duplicate_ticket_ends_the_connection(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 60.0)
    async with scripted_controller() as controller, open_node(controller, ram=8, ssd=128) as one:
        conversation = await controller.up_to_date()
        ticket = await conversation.start_command(fetch(await one.store(12), RAM))
        await conversation.send(Unpin(ticket, b""))
        await conversation.socket.wait_closed()
        await controller.up_to_date(1)


async def test_too_many_commands_at_once_are_refused(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(move_module, "TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(session_module, "MAX_COMMANDS", 2)
    async with registered(ram=8, ssd=128) as (conversation, one):
        keys = await one.store(12)
        tickets = [await conversation.start_command(fetch(keys, RAM)) for _ in range(3)]
        answer = await conversation.wait_for_answer(tickets[2])
        assert isinstance(answer, Failed)
        assert "busy with 2 commands" in answer.reason
        for ticket in tickets[:2]:
            await conversation.send(Cancel(ticket))
            await conversation.wait_for_answer(ticket)


async def test_commands_are_read_while_the_controller_reads_nothing(open_node: OpenNode) -> None:
    """Or both sides might wait for the other to read."""
    async with scripted_controller(idle_timeout=60.0) as controller, open_node(controller) as one:
        conversation = await controller.up_to_date()
        keys = await one.store(2)
        conversation.socket.transport.pause_reading()
        many = join_keys([make_key(number) for number in range(MAX_KEYS)])
        tickets = [await conversation.start_command(lambda ticket: Unpin(ticket, many)) for _ in range(24)]
        tickets.append(await conversation.start_command(lambda ticket: Pin(ticket, join_keys(keys), None)))
        await until(lambda: one.cache.catalog.pins.holds(keys[0], anyio.current_time()))
        conversation.socket.transport.resume_reading()
        answers = [await conversation.wait_for_answer(ticket) for ticket in tickets]
        assert [isinstance(answer, Done) and answer.chunks for answer in answers] == [MAX_KEYS] * 24 + [2]


async def test_exception_in_one_command_does_not_affect_others(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with registered() as (conversation, one):
        monkeypatch.setattr(one.cache, "unpin", partial(one.cache.unpin, "no such argument"))
        assert "TypeError" in await conversation.failed(lambda ticket: Unpin(ticket, make_key(1)))
        assert (await conversation.done(lambda ticket: Pin(ticket, b"", None))).chunks == 0


# Concurrency.


async def test_fetches_and_deletes_race_with_stores_and_retrievals(registered: Registered) -> None:
    """Reports equal what the tiers hold, nothing stays pending, and no lease is left."""
    async with registered(ram=24, ssd=64) as (conversation, one):
        prompts = [await one.store(6, seed=seed) for seed in range(6)]

        async def churn() -> None:
            for seed in range(30):
                await one.is_intact(6, seed=seed % 6)
                await one.store(6, seed=seed % 9)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(churn)
            for round_ in range(25):
                keys = prompts[round_ % 6]
                tier = round_ % 2
                await conversation.done(fetch(keys, tier))
                if round_ % 3 == 0:
                    joined = join_keys(keys)
                    await conversation.done(
                        lambda ticket, tier=tier, joined=joined: Delete(ticket, 1 - tier, joined)
                    )
        catalog = one.cache.catalog
        assert not any(
            catalog.state(key, tier) is State.PENDING for tier in (RAM, SSD) for key in catalog.keys(tier)
        )
        await conversation.done(lambda ticket: DeleteAll(ticket, 1))
        assert {tier: held for tier, held in conversation.held.items() if held} == one.held()
