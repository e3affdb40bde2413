"""Chunks are fetched from other tiers and other instances; what has not come is told with its reason."""

from __future__ import annotations

import pytest

from kvtier.agent import session as session_module
from kvtier.agent.protocol import (
    Cancel,
    Failed,
)
from kvtier.keys import split_keys
from kvtier.pipeline import gather as gather_module
from kvtier.testing.backend import make_key
from tests.agent.conftest import SECRET, OpenHome, address_of, fetch
from tests.agent.controlling import Controller, Conversation, controlling, until
from tests.cache.conftest import CHUNK_OBJECT_BYTES

pytestmark = pytest.mark.anyio
RAM, SSD = 0, 1
SERVES = {"listen": "127.0.0.1:0", "secret": SECRET}
FETCHES = {"secret": SECRET}


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
