"""Every command does what it says, and its answer says what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from kvtier.keys import ChunkKey, join_keys, split_keys
from kvtier.pipeline import gather as gather_module
from kvtier.testing.backend import make_key
from tests.agent.conftest import SECRET, Home, OpenHome
from tests.agent.controlling import Controller, Conversation, controlling, until
from tests.cache.conftest import CHUNK_OBJECT_BYTES

pytestmark = pytest.mark.anyio
RAM, SSD = 0, 1
SERVES = {"listen": "127.0.0.1:0", "secret": SECRET}
FETCHES = {"secret": SECRET}


def fetch(
    keys: Sequence[ChunkKey],
    tier: int,
    peer: str | None = None,
    *,
    home: Home | None = None,
    seconds: float | None = None,
    length: int = CHUNK_OBJECT_BYTES,
) -> Callable[[int], Command]:
    namespace = bytes(32) if home is None else home.model._namespace
    lengths = [length] * len(keys)
    return lambda ticket: Fetch(ticket, tier, peer, namespace, join_keys(keys), lengths, seconds)


def address_of(home: Home) -> str:
    assert home.instance.server is not None
    return f"127.0.0.1:{home.instance.server.address[1]}"


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 0.5)


# Fetch, within one instance.


async def test_fetch_copies_from_disk_to_memory_and_back(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        done = await conversation.done(fetch(keys, RAM))
        assert (split_keys(done.keys), done.chunks, done.reason) == (keys, 4, None)
        assert done.bytes == 4 * CHUNK_OBJECT_BYTES
        # What it changed was told before.
        assert conversation.held == {RAM: set(keys), SSD: set(keys)}
        await one.cache.clear(keys[:2], tiers=["ssd"])
        done = await conversation.done(fetch(keys, SSD))
        assert (split_keys(done.keys), done.bytes, done.reason) == (keys, 2 * CHUNK_OBJECT_BYTES, None)
        assert conversation.held == {RAM: set(keys), SSD: set(keys)}
        assert await one.is_whole(4)


async def test_fetch_again_transfers_nothing(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        done = await conversation.done(fetch(keys, SSD))
        assert (done.chunks, done.bytes, done.reason) == (4, 0, None)
        assert (await conversation.done(fetch([], SSD))).reason is None


async def test_fetch_ends_at_what_is_nowhere(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        await one.cache.clear(keys[2:3])
        done = await conversation.done(fetch(keys, RAM))
        assert split_keys(done.keys) == keys[:2]
        assert done.reason == "the rest is in no other tier of this instance"


async def test_fetch_into_full_memory_makes_room_but_not_with_what_it_has_brought(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        wanted = await one.store(12, seed=1)
        await one.store(6, seed=2)
        done = await conversation.done(fetch(wanted, RAM))
        assert 6 <= done.chunks <= 8
        assert split_keys(done.keys) == wanted[: done.chunks], "the first ones, without a gap"
        assert done.reason == "tier ram has no room for the rest"


async def test_fetch_into_memory_that_is_all_in_use_names_the_tier(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        wanted = await one.store(4, seed=1)
        others = await one.store(8, seed=2)
        found = one.cache.look_up(others)
        assert len(found.chunks) > 4
        await one.cache.clear(wanted, tiers=["ram"])
        done = await conversation.done(fetch(wanted, RAM))
        assert (done.keys, done.chunks, done.reason) == (b"", 0, "tier ram has no room for the rest")
        found.release()
        assert (await conversation.done(fetch(wanted, RAM))).chunks == 4


async def test_fetch_into_a_disk_that_is_too_small_keeps_the_first(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ram=64, ssd=10, disk={"write": "never"}) as one:
        conversation = await controller.in_step()
        await conversation.done(fetch(await one.store(8, seed=2), SSD))
        wanted = await one.store(20, seed=1)
        done = await conversation.done(fetch(wanted, SSD))
        assert split_keys(done.keys) == wanted[:9]
        assert done.reason == "tier ssd has no room for the rest"
        assert one.holds(wanted, SSD) == list(range(9))


async def test_fetch_waits_for_memory_that_is_about_to_be_free(home: OpenHome) -> None:
    """All that is cold has still to be written down."""
    disk = {"write": "on_evict"}
    async with controlling() as controller, home(controller, ram=8, ssd=128, disk=disk) as one:
        conversation = await controller.in_step()
        wanted = await one.store(6, seed=1)
        await conversation.done(fetch(wanted, SSD))
        await one.cache.clear(wanted, tiers=["ram"])
        others = await one.store(7, seed=2)
        done = await conversation.done(fetch(wanted, RAM))
        assert (done.chunks, done.reason) == (6, None)
        catalog = one.cache.hierarchy.catalog
        assert all(catalog.tiers(key) for key in others), "nothing was lost"


# Fetch, from another instance.


async def two_homes(controller: Controller) -> tuple[Conversation, Conversation]:
    """The conversations of the instances that are called one and two."""
    await controller.in_step(0)
    await controller.in_step(1)
    named = {talk.hello.instance: talk for talk in controller.conversations if talk.hello is not None}
    return named["one"], named["two"]


async def test_fetch_from_a_peer_into_memory_and_onto_disk(home: OpenHome) -> None:
    async with (
        controlling() as controller,
        home(controller, peer=FETCHES, ssd=128, disk={"write": "never"}) as one,
        home(controller, name="two", peer=SERVES, ssd=128) as two,
    ):
        conversation, _ = await two_homes(controller)
        keys = await two.store(8)
        await two.cache.clear(keys[4:], tiers=["ram"])
        done = await conversation.done(fetch(keys, RAM, address_of(two), home=one))
        assert (split_keys(done.keys), done.reason) == (keys, None)
        assert done.bytes == 8 * CHUNK_OBJECT_BYTES
        assert conversation.held == {RAM: set(keys)}
        assert await one.is_whole(8)
        assert two.holds(keys, SSD) == list(range(8)), "nothing is deleted there"
        other = await two.store(4, seed=2)
        done = await conversation.done(fetch(other, SSD, address_of(two), home=one))
        assert (split_keys(done.keys), done.reason) == (other, None)
        assert one.cache.hierarchy.catalog.tiers(other[0]) == [SSD], "in memory it was but on its way"
        await until(lambda: not two.instance.status()["serving"]["grants"])  # type: ignore[index]
        assert await one.is_whole(4, seed=2)


async def test_fetch_takes_from_a_peer_only_what_is_not_here(home: OpenHome) -> None:
    async with (
        controlling() as controller,
        home(controller, peer=FETCHES, ssd=128) as one,
        home(controller, name="two", peer=SERVES) as two,
    ):
        conversation, _ = await two_homes(controller)
        keys = await two.store(8)
        await one.store(8)
        await one.cache.clear(keys, tiers=["ram"])
        await one.cache.clear(keys[6:])
        done = await conversation.done(fetch(keys, RAM, address_of(two), home=one))
        assert (done.chunks, done.reason) == (8, None)
        assert two.instance.status()["serving"]["granted"] == 1  # type: ignore[index]
        assert one.cache.hierarchy.counts["get_ok"] == 8
        assert await one.is_whole(8)


async def test_fetch_of_what_the_peer_has_lost_meanwhile(home: OpenHome) -> None:
    async with (
        controlling() as controller,
        home(controller, peer=FETCHES) as one,
        home(controller, name="two", peer=SERVES) as two,
    ):
        conversation, _ = await two_homes(controller)
        keys = await two.store(8)
        await two.cache.clear(keys[5:6])
        done = await conversation.done(fetch(keys, RAM, address_of(two), home=one))
        assert split_keys(done.keys)[:5] == keys[:5]
        assert keys[5] not in split_keys(done.keys)
        assert done.reason == f"the rest is neither here nor at peer {address_of(two)}"
        assert one.cache.hierarchy.catalog.count(1) == 0, "nothing is believed of the peer any longer"


async def test_fetch_from_a_peer_that_cannot_be_reached(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, peer=FETCHES, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        await one.cache.clear(keys[2:])
        done = await conversation.done(fetch(keys, RAM, "127.0.0.1:1", home=one))
        assert split_keys(done.keys) == keys[:2], "what is here is brought all the same"
        assert done.reason is not None
        assert "peer 127.0.0.1:1" in done.reason


async def test_fetch_from_a_peer_that_does_not_know_the_secret(home: OpenHome) -> None:
    async with (
        controlling() as controller,
        home(controller, peer={"secret": "another secret than theirs"}) as one,
        home(controller, name="two", peer=SERVES) as two,
    ):
        conversation, _ = await two_homes(controller)
        keys = await two.store(4)
        done = await conversation.done(fetch(keys, RAM, address_of(two), home=one))
        assert done.chunks == 0
        assert done.reason is not None
        assert address_of(two) in done.reason


async def test_fetch_by_an_instance_that_can_reach_nobody(home: OpenHome) -> None:
    async with controlling() as controller, home(controller) as one:
        conversation = await controller.in_step()
        done = await conversation.done(fetch([make_key(1)], RAM, "127.0.0.1:1", home=one))
        assert done.reason == "this instance has no way to fetch from others: give it peer.secret or peer.tls"


async def test_fetch_of_more_than_fits_at_the_peer_and_here_at_once(home: OpenHome) -> None:
    """Both have memory for a few chunks: it goes in batches, and what was raised makes way."""
    async with (
        controlling() as controller,
        home(controller, peer=FETCHES, ram=8, ssd=256, disk={"write": "never"}) as one,
        home(controller, name="two", peer=SERVES, ram=8, ssd=256) as two,
    ):
        conversation, _ = await two_homes(controller)
        keys = await two.store(8, seed=3)
        for seed in (1, 2):
            await two.store(8, seed=seed)
        done = await conversation.done(fetch(keys, SSD, address_of(two), home=one))
        assert (done.chunks, done.reason) == (8, None)
        assert await one.is_whole(8, seed=3)


async def test_what_was_reset_here_is_not_fetched_from_others(home: OpenHome) -> None:
    async with (
        controlling() as controller,
        home(controller, peer=FETCHES) as one,
        home(controller, name="two", peer=SERVES) as two,
    ):
        conversation, _ = await two_homes(controller)
        keys = await two.store(4)
        await one.model.clear()
        done = await conversation.done(fetch(keys, RAM, address_of(two), home=one))
        assert (done.chunks, done.reason) == (
            0,
            "this model was reset here, so what other hosts hold of it is not trusted",
        )


async def test_a_peer_that_ends_in_the_middle_of_a_fetch(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, peer=FETCHES, ram=256) as one:
        async with home(controller, name="two", peer=SERVES, ram=256) as two:
            conversation, _ = await two_homes(controller)
            keys = await two.store(200)
            ticket = await conversation.begin(fetch(keys, RAM, address_of(two), home=one))
            await until(lambda: one.holds(keys, RAM))
        done = await conversation.answered(ticket)
        assert not isinstance(done, Failed)
        assert split_keys(done.keys) == [keys[at] for at in one.holds(keys, RAM)]
        assert done.chunks == 200 or done.reason


# Fetch, in time.


async def test_fetch_ends_with_its_time(home: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 60.0)
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(12)
        done = await conversation.done(fetch(keys, RAM, seconds=0.3))
        assert 0 < done.chunks < 12
        assert done.reason == "the 0.3 s that it was given are over"


async def test_fetch_is_cancelled_and_answered(home: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(session_module, "PROGRESS_SECONDS", 0.02)
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(12)
        ticket = await conversation.begin(fetch(keys, RAM))
        await until(lambda: conversation.progress)
        assert conversation.progress[-1].ticket == ticket
        assert 0 < conversation.progress[-1].chunks < 12
        await conversation.say(Cancel(ticket))
        done = await conversation.answered(ticket)
        assert not isinstance(done, Failed)
        assert 0 < done.chunks < 12
        assert done.reason == "it was cancelled"
        await conversation.say(Cancel(ticket))  # Nobody is busy with it any more.
        assert one.status["commands"] == 0


async def test_what_is_cancelled_at_once_is_answered(home: OpenHome) -> None:
    async with controlling() as controller, home(controller, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(4)
        await one.cache.clear(keys, tiers=["ram"])
        ticket = await conversation.begin(fetch(keys, RAM))
        await conversation.say(Cancel(ticket))
        assert not isinstance(await conversation.answered(ticket), Failed)


async def test_commands_end_with_the_connection(home: OpenHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PATIENCE_SECONDS", 60.0)
    async with controlling() as controller, home(controller, ram=8, ssd=128) as one:
        conversation = await controller.in_step()
        keys = await one.store(12)
        await conversation.begin(fetch(keys, RAM))
        await until(lambda: one.holds(keys, RAM))
        await controller.kill()
        await one.at_rest()
        await controller.start()
        again = await controller.in_step(1)
        assert again.held == one.held()


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
        await conversation.done(lambda ticket: Pin(ticket, join_keys(keys), 0.01))
        await until(lambda: not one.cache.hierarchy.catalog.pinned(keys[0], anyio.current_time()))


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
