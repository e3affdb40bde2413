"""Fail-over through real sentinels, and a real cluster whose slots move and whose nodes die."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from kvtier.backends.base import Backend
from kvtier.backends.redis.topology import slot_of
from kvtier.backends.redis.url import Endpoint
from kvtier.errors import TierError
from kvtier.testing.backend import make_key, noise, same
from kvtier.testing.servers.redis import HOST, RedisServer
from kvtier.testing.servers.valkey import ValkeyServer

from .redis_groups import Cluster, Sentinels, wait_until
from .redis_pool import FAILED, KEYS, MIB, MISS, OK, assert_works, info, opened, room, values, warnings

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("it starts and asks servers")]


@pytest.fixture(scope="module", params=[RedisServer, ValkeyServer], ids=["redis", "valkey"])
def kind(request: pytest.FixtureRequest) -> type[RedisServer]:
    kind: type[RedisServer] = request.param
    if reason := kind.missing():
        pytest.skip(reason)
    return kind


@pytest.fixture
def sentinels(kind: type[RedisServer], tmp_path: Path) -> Iterator[Sentinels]:
    with ExitStack() as stack:
        yield Sentinels(kind, tmp_path, stack)


@pytest.fixture(scope="module")
def formed(kind: type[RedisServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(kind, tmp_path_factory.mktemp("c"), stack)


@pytest.fixture
def cluster(formed: Cluster) -> Cluster:
    """A cluster whose nodes are all up and empty; slots may have been moved."""
    wait_until(formed.is_whole)
    for node in formed.nodes:
        node.tell("FLUSHALL")
    return formed


async def all_held(backend: Backend) -> bool:
    try:
        return list(await backend.contains(KEYS)) == [True] * len(KEYS)
    except ConnectionError:
        return False


async def test_sentinels_name_another_primary(sentinels: Sentinels, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(sentinels, deadline=2) as backend:
        await assert_works(backend)
        assert "used" in await backend.check()
        wait_until(lambda: info(sentinels.replica)["master_repl_offset"] >= 8 * MIB)
        # The first one that is asked is gone, too.
        sentinels.sentinels[0].kill()
        sentinels.primary.kill()
        assert list(await backend.get(room(MIB))) == [FAILED] * len(KEYS)
        while not await all_held(backend):
            await anyio.sleep(0.05)
        items = room(MIB)
        assert list(await backend.get(items)) == [OK] * len(KEYS), "what the replica had is lost"
        assert all(same(view, noise(key, MIB)) for key, view in items)
        while FAILED in await backend.put(values(MIB)):
            await anyio.sleep(0.05)
        await assert_works(backend)
        assert info(sentinels.replica)["role"] == "master"
        assert len(warnings(caplog)) <= 2


@pytest.mark.slow
async def test_a_primary_that_became_a_replica_is_left(
    sentinels: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    url = sentinels.tier()["url"].replace("/mymaster", "/other")
    async with opened(sentinels, url=url) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match="knows no 'other'"):
            await backend.check()
    (warning,) = warnings(caplog)
    assert "knows no 'other'" in warning
    async with opened(sentinels) as backend:
        await assert_works(backend)
        sentinels.sentinels[0].tell("SENTINEL", "FAILOVER", "mymaster")
        wait_until(lambda: info(sentinels.replica)["role"] == "master")
        # A sentinel would say so, too, some seconds later.
        sentinels.primary.tell("REPLICAOF", HOST, str(sentinels.replica.port))
        while FAILED in await backend.put(values(MIB)):
            await anyio.sleep(0.05)
        assert list(await backend.contains(KEYS)) == [True] * len(KEYS)


async def test_a_cluster_has_its_keys_on_all_nodes(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [make_key(number) for number in range(60)]
    async with opened(cluster, connections=2) as backend:
        await assert_works(backend)
        await backend.delete(KEYS)
        assert list(await backend.put(values(1000, keys[::2]))) == [OK] * 30
        assert list(await backend.contains(keys)) == [True, False] * 30
        items = room(1000, keys)
        assert list(await backend.get(items)) == [OK, MISS] * 30
        assert all(same(view, noise(key, 1000)) for key, view in items[::2])
        assert sum(int(node.tell("DBSIZE")) for node in cluster.nodes) == 30
        assert all(int(node.tell("DBSIZE")) for node in cluster.nodes)
        assert "in a cluster of 3 primaries" in await backend.check()
        await backend.delete(keys)
        assert sum(int(node.tell("DBSIZE")) for node in cluster.nodes) == 0
    assert warnings(caplog) == []
    node = cluster.nodes[0]
    async with opened(node) as backend:
        assert FAILED in await backend.put(values(100))
    (warning,) = warnings(caplog)
    assert warning == f"pool: {Endpoint(HOST, node.port)} is a node of a cluster: write a +cluster:// `url`"
    for name in (
        b"123456789",
        b"{user1000}.following",
        b"foo{}{bar}",
        b"foo{{bar}}zap",
        b"foo{bar}{zap}",
        b"a{b",
    ):
        assert slot_of(name) == node.tell("CLUSTER", "KEYSLOT", name)


async def test_a_node_that_dies_takes_its_own_keys_alone(cluster: Cluster) -> None:
    owners = [cluster.owner_of(slot_of(b"kvtier:" + key.hex().encode())) for key in KEYS]
    gone = owners[0]
    async with opened(cluster, deadline=2) as backend:
        await assert_works(backend)
        gone.kill()
        expected = [FAILED if owner is gone else OK for owner in owners]
        assert set(expected) == {OK, FAILED}
        assert list(await backend.get(room(MIB))) == expected
        assert list(await backend.contains(KEYS)) == [outcome is OK for outcome in expected]
        await backend.delete(KEYS)
        assert True not in await backend.contains(KEYS)
        for ask in (backend.contains, backend.delete):
            with pytest.raises(ConnectionError, match="no server answers"):
                await ask(KEYS[:1])
        gone.start()
        while FAILED in await backend.put(values(MIB)):
            await anyio.sleep(0.05)
        await assert_works(backend)


async def test_a_slot_that_moves(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """All keys are in one slot, half of them on either node while it moves."""
    prefix = "kvtier{tag}:"
    slot = slot_of(prefix.encode())
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.nodes if node is not source)
    async with opened(cluster, prefix=prefix) as backend:
        assert list(await backend.put(values(MIB, KEYS[:4]))) == [OK] * 4
        cluster.begin_to_move(slot, source, target)
        # Redirected with -ASK, each time.
        for _ in range(2):
            await assert_works(backend)
            assert (source.tell("DBSIZE"), target.tell("DBSIZE")) == (4, 4)
        await backend.delete(KEYS)
        assert (source.tell("DBSIZE"), target.tell("DBSIZE")) == (0, 0)
        cluster.move(slot, target)
        # Redirected with -MOVED, then known.
        for _ in range(2):
            await assert_works(backend)
        assert (source.tell("DBSIZE"), target.tell("DBSIZE")) == (0, 8)
    assert warnings(caplog) == []


async def test_a_cluster_url_for_a_plain_server(
    kind: type[RedisServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kind(tmp_path) as server:
        url = f"{server.type}+cluster://{HOST}:{server.port}"
        async with opened(server, url=url) as backend:
            assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
            with pytest.raises(TierError, match="cluster support disabled"):
                await backend.check()
    assert len(warnings(caplog)) == 1
