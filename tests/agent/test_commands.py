"""Every command does what it says, and its answer says what it did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import pytest

from kvtier.agent import session as session_module
from kvtier.agent.protocol import (
    MOST_KEYS,
    Cancel,
    Command,
    Delete,
    DeleteAll,
    Failed,
    Fetch,
    Pin,
    Tokenize,
    Unpin,
)
from kvtier.catalog import State
from kvtier.keys import join_keys, split_keys
from kvtier.pipeline import gather as gather_module
from kvtier.testing.backend import make_key
from tests.agent.conftest import SECRET, OpenHome, fetch
from tests.agent.controlling import controlling
from tests.cache.conftest import CHUNK_OBJECT_BYTES

pytestmark = pytest.mark.anyio
RAM, SSD = 0, 1
FETCHES = {"secret": SECRET}


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 0.5)


# Delete.


async def test_delete_removes_from_one_tier_and_names_what_was_there(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        conversation = await controller.in_step()
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


async def test_what_is_deleted_while_it_is_read_stays_whole(home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        found = one.cache.look_up(keys)
        before = [bytes(chunk.lease.view) for chunk in found.chunks]
        done = await conversation.done(lambda ticket: Delete(ticket, RAM, join_keys(keys)))
        assert done.chunks == 4
        await one.store(16, seed=2)
        assert [bytes(chunk.lease.view) for chunk in found.chunks] == before
        found.release()


async def test_delete_all_of_one_tier_or_of_all(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128, peer=FETCHES) as one:
        conversation = await controller.in_step()
        await one.store(4)
        done = await conversation.done(lambda ticket: DeleteAll(ticket, RAM))
        assert (done.keys, done.chunks, done.bytes) == (b"", 4, 4 * CHUNK_OBJECT_BYTES)
        await one.store(6, seed=2)
        done = await conversation.done(lambda ticket: DeleteAll(ticket, None))
        assert (done.chunks, done.bytes) == (10, 16 * CHUNK_OBJECT_BYTES)
        assert one.held() == {}
        assert {tier for tier, held in conversation.held.items() if held} == set()
        assert not one.cache.hierarchy.distrusted, "nobody has said that the model is another one"


# Pin.


async def test_pinned_chunks_stay_until_they_are_unpinned(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ram=16) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        joined = join_keys([*keys, make_key(99)])
        done = await conversation.done(lambda ticket: Pin(ticket, joined, None))
        assert (split_keys(done.keys), done.chunks, done.bytes) == (keys, 4, 4 * CHUNK_OBJECT_BYTES)
        assert done.reason == "the others are in no tier of this instance"
        for seed in range(2, 12):
            await one.store(8, seed=seed)
        assert one.holds(keys, RAM) == [0, 1, 2, 3]
        done = await conversation.done(lambda ticket: Unpin(ticket, joined))
        assert (done.chunks, done.reason) == (5, None)
        for seed in range(12, 22):
            await one.store(8, seed=seed)
        assert one.holds(keys, RAM) == []


async def test_a_pin_ends_with_its_time(home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        keys = await one.store(2)
        await conversation.done(lambda ticket: Pin(ticket, join_keys(keys), 60.0))
        pinned, now = one.cache.hierarchy.catalog.pinned, anyio.current_time()
        assert all(pinned(key, now) for key in keys)
        assert not any(pinned(key, now + 60) for key in keys)


# What makes no sense.


MALFORMED: dict[str, tuple[Callable[[int], Command], str]] = {
    "no_such_tier": (lambda ticket: Delete(ticket, 7, b""), "there is no tier 7"),
    "tier_below_zero": (lambda ticket: DeleteAll(ticket, -1), "there is no tier -1"),
    "half_a_key": (lambda ticket: Pin(ticket, b"half a key", None), "not a whole number"),
    "too_many": (
        lambda ticket: Unpin(ticket, bytes(32 * (MOST_KEYS + 1))),
        f"{MOST_KEYS + 1} chunks in one command are over {MOST_KEYS}",
    ),
    "no_lengths": (
        lambda ticket: Fetch(ticket, 0, None, b"", make_key(1), [], None),
        "1 different chunks and 0 lengths",
    ),
    "no_bytes": (lambda ticket: Fetch(ticket, 0, None, b"", make_key(1), [0], None), "one of no bytes"),
    "into_the_peers": (
        lambda ticket: Fetch(ticket, 1, None, b"", make_key(1), [4096], None),
        "nothing is ever put into tier peers",
    ),
    "unknown_model": (
        lambda ticket: Tokenize(ticket, b"n" * 32, "Hello"),
        "no engine of this instance has said where the model's tokenizer is",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_a_command_that_cannot_be_carried_out_fails_in_words(kind: str, home: OpenHome) -> None:
    make, reason = MALFORMED[kind]
    async with controlling() as controller, home(controller, peer=FETCHES):
        conversation = await controller.in_step()
        assert reason in await conversation.failed(make)
        assert (await conversation.done(lambda ticket: Unpin(ticket, b""))).chunks == 0


async def test_two_commands_with_one_ticket_end_the_connection(
    home: OpenHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 60.0)
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        ticket = await conversation.begin(fetch(await one.store(12), RAM))
        await conversation.say(Unpin(ticket, b""))
        await conversation.socket.wait_closed()
        await controller.in_step(1)


async def test_too_many_commands_at_once_are_refused(home: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(session_module, "MOST_COMMANDS", 2)
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(12)
        tickets = [await conversation.begin(fetch(keys, RAM)) for _ in range(3)]
        answer = await conversation.answered(tickets[2])
        assert isinstance(answer, Failed)
        assert "busy with 2 commands" in answer.reason
        for ticket in tickets[:2]:
            await conversation.say(Cancel(ticket))
            await conversation.answered(ticket)


async def test_a_bug_in_one_command_ends_no_other(home: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        monkeypatch.setattr(one.cache, "unpin", partial(one.cache.unpin, "no such argument"))
        assert "TypeError" in await conversation.failed(lambda ticket: Unpin(ticket, make_key(1)))
        assert (await conversation.done(lambda ticket: Pin(ticket, b"", None))).chunks == 0


# While the cache is used.


async def test_fetches_and_deletes_race_with_everything_else(home: OpenHome) -> None:
    """Whatever is confirmed is there, whatever is told is true, and nothing is left leased."""
    async with controlling() as controller, home(controller, ram=24, ssd=64) as one:
        conversation = await controller.in_step()
        prompts = [await one.store(6, seed=seed) for seed in range(6)]

        async def churn() -> None:
            for seed in range(30):
                await one.is_whole(6, seed=seed % 6)
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
        catalog = one.cache.hierarchy.catalog
        assert not any(
            catalog.state(key, tier) is State.PENDING for tier in (RAM, SSD) for key in catalog.keys(tier)
        )
        await conversation.done(lambda ticket: DeleteAll(ticket, 1))
        assert {tier: held for tier, held in conversation.held.items() if held} == one.held()
