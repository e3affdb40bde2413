"""Failover with real sentinels, and a real cluster with slot migrations and dying nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from kvtier.backends.base import Backend
from kvtier.backends.redis.settings import Endpoint
from kvtier.backends.redis.topology import slot_of
from kvtier.errors import TierError
from kvtier.testing.backend import make_key, noise, same
from kvtier.testing.servers import free_port
from tests.rigs.certificates import make_certificate
from tests.rigs.chunks import FAILED, MISS, OK
from tests.rigs.redis_groups import Cluster, Sentinels
from tests.rigs.redis_pool import KEYS, MIB, assert_works, buffers, info, opened, values
from tests.rigs.servers.redis import HOST, RedisServer
from tests.rigs.servers.valkey import ValkeyServer
from tests.rigs.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.loop_may_block("starts and queries servers")]


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
def shared_cluster(kind: type[RedisServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(kind, tmp_path_factory.mktemp("c"), stack)


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """A cluster with all nodes up and empty. Slots may have been migrated."""
    wait_until(shared_cluster.is_healthy)
    for node in shared_cluster.nodes:
        node.command("FLUSHALL")
    return shared_cluster


async def all_held(backend: Backend) -> bool:
    try:
        return list(await backend.contains(KEYS)) == [True] * len(KEYS)
    except ConnectionError:
        return False


async def test_sentinels_name_the_primary_after_a_failover(
    sentinels: Sentinels, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(sentinels, deadline=2) as backend:
        await assert_works(backend)
        assert "used" in await backend.check()
        wait_until(lambda: info(sentinels.replica)["master_repl_offset"] >= 8 * MIB)
        # The sentinel that is queried first is down as well.
        await anyio.to_thread.run_sync(sentinels.sentinels[0].kill)
        await anyio.to_thread.run_sync(sentinels.primary.kill)
        assert list(await backend.get(buffers(MIB))) == [FAILED] * len(KEYS)
        while not await all_held(backend):
            await anyio.sleep(0.05)
        items = buffers(MIB)
        assert list(await backend.get(items)) == [OK] * len(KEYS), "the replica lost data"
        assert all(same(view, noise(key, MIB)) for key, view in items)
        while FAILED in await backend.put(values(MIB)):
            await anyio.sleep(0.05)
        await assert_works(backend)
        assert info(sentinels.replica)["role"] == "master"
        assert len(caplog.messages) <= 2


@pytest.mark.slow
async def test_demoted_primary_is_abandoned(sentinels: Sentinels, caplog: pytest.LogCaptureFixture) -> None:
    url = sentinels.tier()["url"].replace("/mymaster", "/other")
    async with opened(sentinels, url=url) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match="does not monitor 'other'"):
            await backend.check()
    (warning,) = caplog.messages
    assert "does not monitor 'other'" in warning
    async with opened(sentinels) as backend:
        await assert_works(backend)
        sentinels.sentinels[0].command("SENTINEL", "FAILOVER", "mymaster")
        wait_until(lambda: info(sentinels.replica)["role"] == "master")
        # A sentinel would do so a few seconds later.
        sentinels.primary.command("REPLICAOF", HOST, str(sentinels.replica.port))
        while FAILED in await backend.put(values(MIB)):
            await anyio.sleep(0.05)
        assert list(await backend.contains(KEYS)) == [True] * len(KEYS)


async def test_cluster_keys_are_spread_over_all_nodes(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [make_key(number) for number in range(60)]
    async with opened(cluster, connections=2) as backend:
        await assert_works(backend)
        await backend.delete(KEYS)
        assert list(await backend.put(values(1000, keys[::2]))) == [OK] * 30
        assert list(await backend.contains(keys)) == [True, False] * 30
        items = buffers(1000, keys)
        assert list(await backend.get(items)) == [OK, MISS] * 30
        assert all(same(view, noise(key, 1000)) for key, view in items[::2])
        assert sum(int(node.command("DBSIZE")) for node in cluster.nodes) == 30
        assert all(int(node.command("DBSIZE")) for node in cluster.nodes)
        assert "in a cluster of 3 primaries" in await backend.check()
        await backend.delete(keys)
        assert sum(int(node.command("DBSIZE")) for node in cluster.nodes) == 0
    assert caplog.messages == []
    node = cluster.nodes[0]
    async with opened(node) as backend:
        assert FAILED in await backend.put(values(100))
    (warning,) = caplog.messages
    message = f"{Endpoint(HOST, node.port)} is a cluster node: use a +cluster:// `url`"
    assert warning == f"pool: {message}"
    # The keys of its own slots work, which a trial with one chunk would take for success.
    async with opened(node) as backend:
        with pytest.raises(TierError) as failure:
            await backend.check()
    assert str(failure.value) == message
    for name in (
        b"123456789",
        b"{user1000}.following",
        b"foo{}{bar}",
        b"foo{{bar}}zap",
        b"foo{bar}{zap}",
        b"a{b",
    ):
        assert slot_of(name) == node.command("CLUSTER", "KEYSLOT", name)


async def test_dead_node_fails_only_its_own_keys(cluster: Cluster) -> None:
    owners = [cluster.owner_of(slot_of(b"kvtier:" + key.hex().encode())) for key in KEYS]
    dead = owners[0]
    async with opened(cluster, deadline=2) as backend:
        await assert_works(backend)
        await anyio.to_thread.run_sync(dead.kill)
        expected = [FAILED if owner is dead else OK for owner in owners]
        assert set(expected) == {OK, FAILED}
        assert list(await backend.get(buffers(MIB))) == expected
        assert list(await backend.contains(KEYS)) == [outcome is OK for outcome in expected]
        await backend.delete(KEYS)
        assert True not in await backend.contains(KEYS)
        for call in (backend.contains, backend.delete):
            with pytest.raises(ConnectionError, match="no server answers"):
                await call(KEYS[:1])
        await anyio.to_thread.run_sync(dead.start)
        while FAILED in await backend.put(values(MIB)):
            await anyio.sleep(0.05)
        await assert_works(backend)


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_replica_takes_over_from_a_killed_primary_of_a_cluster(
    kind: type[RedisServer], tmp_path: Path, secure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A primary, which is also the node in the URL, is killed during traffic: its replica takes over."""
    if secure and kind is not RedisServer:
        pytest.skip("the packaged Valkey is built without TLS")
    tls = make_certificate(tmp_path / "tls") if secure else None
    with ExitStack() as stack:
        cluster = Cluster(kind, tmp_path, stack, tls=tls, password="sesame" if secure else None)
        primary = cluster.nodes[1]
        replica = cluster.add_replica(primary)
        keys = [make_key(number) for number in range(60)]
        async with opened(cluster, deadline=2) as backend:
            await assert_works(backend)
            assert list(await backend.put(values(1000, keys))) == [OK] * 60
            assert "in a cluster of 3 primaries" in await backend.check()
            # Replication is asynchronous: what the replica does not have yet would be lost.
            written = info(primary)["master_repl_offset"]
            wait_until(lambda: info(replica)["slave_repl_offset"] >= written)
            await anyio.to_thread.run_sync(primary.kill)
            promoted = False
            while not promoted:
                items = buffers(1000, keys)
                outcomes = await backend.get(items)
                assert MISS not in outcomes
                for (key, view), outcome in zip(items, outcomes, strict=True):
                    assert outcome is FAILED or same(view, noise(key, 1000))
                promoted = FAILED not in outcomes
                await anyio.sleep(0.02)
            assert info(replica)["role"] == "master"
            while FAILED in await backend.put(values(1000)):
                await anyio.sleep(0.02)
            # The old primary comes back as a replica.
            await anyio.to_thread.run_sync(primary.start)
            wait_until(lambda: info(primary)["role"] == "slave")
            await assert_works(backend)
            assert "in a cluster of 3 primaries" in await backend.check()
    assert all("failed: " in message for message in caplog.messages)


async def test_cluster_without_all_slots_is_reported(
    kind: type[RedisServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kind(tmp_path, options=["--cluster-enabled", "yes", "--cluster-port", str(free_port())]) as node:
        url = f"{node.type}+cluster://{HOST}:{node.port}"
        message = f"{HOST}:{node.port} is not part of a cluster that has hash slots"
        async with opened(node, url=url) as backend:
            assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
            with pytest.raises(TierError, match=message):
                await backend.check()
        node.command("CLUSTER", "ADDSLOTSRANGE", "0", "9000")
        async with opened(node, url=url) as backend:
            with pytest.raises(TierError, match="7383 of 16384 hash slots of the cluster have no server"):
                await backend.check()
    assert caplog.messages == [f"pool: {message}"]


async def test_chunks_are_found_while_their_slot_migrates(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """All keys are in one slot. During the migration, each node holds half of them."""
    prefix = "kvtier{tag}:"
    slot = slot_of(prefix.encode())
    source = cluster.owner_of(slot)
    target = next(node for node in cluster.nodes if node is not source)
    async with opened(cluster, prefix=prefix) as backend:
        assert list(await backend.put(values(MIB, KEYS[:4]))) == [OK] * 4
        cluster.start_migration(slot, source, target)
        # Each command is redirected with -ASK.
        for _ in range(2):
            await assert_works(backend)
            assert (source.command("DBSIZE"), target.command("DBSIZE")) == (4, 4)
        await backend.delete(KEYS)
        assert (source.command("DBSIZE"), target.command("DBSIZE")) == (0, 0)
        cluster.finish_migration(slot, target)
        # The first command is redirected with -MOVED; then the new owner is known.
        for _ in range(2):
            await assert_works(backend)
        assert (source.command("DBSIZE"), target.command("DBSIZE")) == (0, 8)
    assert caplog.messages == []
