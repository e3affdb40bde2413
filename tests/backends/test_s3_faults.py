"""Faults of the store and the network result in misses or failures: no hangs, no leftovers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.backends.base import Backend, Outcome, PutItem
from kvtier.backends.s3 import S3Settings
from kvtier.backends.s3.errors import StoreError
from kvtier.backends.s3.store import ChunkStore
from kvtier.testing.backend import blank, is_poisoned, make_key, poison, same
from kvtier.testing.cancelling import cancelled_at
from tests.rigs.s3_proxy import FaultyProxy
from tests.rigs.s3_stores import FAILED, LONG, MISS, OK, found, opened, values
from tests.rigs.servers.s3 import BUCKET, READER_KEY, SECRET_KEY, S3Server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def proxy(s3: S3Server) -> AsyncIterator[FaultyProxy]:
    """A proxy in front of the server."""
    async with FaultyProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture
def tier(s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> dict[str, Any]:
    """A tier with its own prefix, through the proxy."""
    return {**s3.tier(), "url": f"s3://{BUCKET}/{tmp_path.name}", "endpoint": proxy.url}


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """A server for this test only, which the test may kill or pause."""
    if reason := S3Server.missing():
        pytest.skip(reason)
    folder = tmp_path / "server"
    folder.mkdir()
    with S3Server(folder, small=getattr(request, "param", "") == "small") as server:
        yield server


async def in_thread(work: Callable[[], object]) -> None:
    await anyio.to_thread.run_sync(work)


async def put_eventually(backend: Backend, items: Sequence[PutItem]) -> None:
    """Retry ``put`` until it succeeds: a restarted server may need some time."""
    with anyio.fail_after(60):
        while set(await backend.put(items)) != {OK}:
            await anyio.sleep(0.1)


async def unfinished(s3: S3Server) -> list[str]:
    return await anyio.to_thread.run_sync(s3.unfinished)


@pytest.mark.parametrize("part", ["uploads", "partNumber=1", "partNumber=2", "partNumber=3", "POST"])
async def test_an_upload_with_a_failed_part_is_aborted(
    tier: dict[str, Any], proxy: FaultyProxy, s3: S3Server, part: str
) -> None:
    old, new = await values(1, LONG, seed=1), await values(1, LONG, seed=2)
    async with opened(**tier) as backend:
        assert await backend.put(old) == [OK]
        if part == "POST":
            proxy.cut = lambda line: line.startswith("POST") and "uploadId=" in line
        else:
            proxy.cut = lambda line: f"?{part}" in line
        assert await backend.put(new) == [FAILED]
        proxy.cut = lambda _: False
        assert await unfinished(s3) == []
        assert await found(backend, old) == [OK]
        assert await backend.put(new) == [OK]
        assert await found(backend, new) == [OK]


@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
async def test_one_lost_connection_is_retried(tier: dict[str, Any], proxy: FaultyProxy, method: str) -> None:
    cut: list[str] = []

    def first(line: str) -> bool:
        if line.startswith(method) and not cut:
            cut.append(line)
            return True
        return False

    items = await values(1, 4000)
    proxy.cut = first
    async with opened(**tier) as backend:
        assert await backend.put(items) == [OK]
        assert await backend.contains([items[0][0]]) == [True]
        assert await found(backend, items) == [OK]
    assert len(cut) == 1


async def test_one_failing_key_does_not_affect_the_others(tier: dict[str, Any], proxy: FaultyProxy) -> None:
    items = await values(5, 4000)
    keys = [key for key, _ in items]
    bad = keys[2].hex()
    proxy.cut = lambda line: bad in line
    async with opened(**tier) as backend:
        assert await backend.put(items) == [OK, OK, FAILED, OK, OK]
        assert await backend.contains(keys) == [True, True, False, True, True]
        assert await found(backend, items) == [OK, OK, FAILED, OK, OK]
        await backend.delete(keys)
        assert await backend.contains(keys) == [False] * 5


async def test_a_value_that_is_replaced_between_its_parts_is_a_miss(
    tier: dict[str, Any], proxy: FaultyProxy
) -> None:
    old, new = await values(1, LONG, seed=1), await values(1, LONG, seed=2)
    gets = 0
    async with opened(**tier, requests=1) as backend, opened(**tier) as other:

        async def replace(line: str) -> None:
            nonlocal gets
            gets += line.startswith("GET")
            if gets == 2:
                gets += 1
                assert await other.put(new) == [OK]

        assert await backend.put(old) == [OK]
        proxy.before = replace
        assert await found(backend, old) == [MISS]
        assert await found(backend, new) == [OK]


@pytest.mark.parametrize("size", [0, 1, 3000, LONG + 1])
async def test_a_large_view_and_a_value_of_another_length(tier: dict[str, Any], size: int) -> None:
    view = await anyio.to_thread.run_sync(blank, LONG)
    async with opened(**tier) as backend:
        assert await backend.put([(make_key(0), memoryview(bytes(size)))]) == [OK]
        assert await backend.get([(make_key(0), view)]) == [MISS]


async def test_the_limit_of_concurrent_requests(tier: dict[str, Any], proxy: FaultyProxy) -> None:
    items = await values(60, 2000)
    keys = [key for key, _ in items]
    three, waiting, peak = asyncio.Barrier(3), 0, 0

    async def wait_for_two_more(_line: str) -> None:
        nonlocal waiting, peak
        waiting += 1
        peak = max(peak, waiting)
        await three.wait()
        waiting -= 1

    proxy.before = wait_for_two_more
    async with opened(**tier, requests=3) as backend:
        assert await backend.put(items) == [OK] * 60
        assert await backend.contains(keys) == [True] * 60
        assert await found(backend, items) == [OK] * 60
    assert (len(proxy.requests), peak) == (180, 3)


@pytest.mark.parametrize("through", ["scope", "task"])
async def test_an_upload_that_is_cancelled_leaves_no_parts(
    tier: dict[str, Any], proxy: FaultyProxy, s3: S3Server, through: Any
) -> None:
    old, new = await values(1, LONG, seed=1), await values(1, LONG, seed=2)
    async with opened(**tier) as backend:
        assert await backend.put(old) == [OK]
        view = memoryview(bytearray(new[0][1]))
        # Its only await is for the threads. 200 event loop iterations later, parts are in flight.
        assert await cancelled_at(1, lambda: backend.put([(old[0][0], view)]), through=through, lag=200)
        await anyio.to_thread.run_sync(poison, view)
        assert await unfinished(s3) == []
        view = await anyio.to_thread.run_sync(blank, LONG)
        assert await backend.get([(old[0][0], view)]) == [OK]
        assert same(view, old[0][1]) or same(view, new[0][1])


@pytest.mark.slow
async def test_a_server_that_is_killed_in_mid_upload(server: S3Server) -> None:
    async with FaultyProxy(server.port) as proxy:
        dead = threading.Event()

        async def kill(line: str) -> None:
            if "partNumber=3" in line and not dead.is_set():
                dead.set()
                await in_thread(server.kill)

        items = await values(3, LONG)
        keys = [key for key, _ in items]
        async with opened(**{**server.tier(), "endpoint": proxy.url}) as backend:
            proxy.before = kill
            assert FAILED in await backend.put(items)
            assert dead.is_set()
            with pytest.raises(StoreError, match="cannot be reached"):
                await backend.contains(keys)
            with pytest.raises(StoreError, match="cannot be reached"):
                await backend.delete(keys)
            assert await found(backend, items) == [FAILED] * 3
            await in_thread(server.start)
            assert await backend.contains(keys) == [False] * 3
            await put_eventually(backend, items)
            assert await unfinished(server) == []
        async with opened(**server.tier()) as backend:
            assert await found(backend, items) == [OK] * 3


@pytest.mark.parametrize("size", [4000, LONG])
async def test_a_view_is_not_read_after_the_deadline(tier: dict[str, Any], s3: S3Server, size: int) -> None:
    (item,) = await values(1, size)
    given = {"name": "pool", "part_size": "5MiB", **tier}
    store = ChunkStore(S3Settings(**given), request_seconds=20)
    with pytest.raises(Exception, match="deadline has elapsed"):
        await in_thread(lambda: store.write(item, time.monotonic() - 1))
    assert not await anyio.to_thread.run_sync(store.length, item[0])
    assert await unfinished(s3) == []
    await in_thread(lambda: store.write(item, time.monotonic() + 60))
    assert await anyio.to_thread.run_sync(store.length, item[0])


@pytest.mark.slow
async def test_a_server_that_is_killed_in_mid_download(server: S3Server) -> None:
    """After half of the bytes. What it had sent of the others is lost, too."""
    (item,) = await values(1, LONG)
    async with FaultyProxy(server.port) as proxy:
        left = LONG // 2

        async def kill(length: int) -> None:
            nonlocal left
            alive = left > 0
            left -= length
            if left <= 0:
                if alive:
                    await in_thread(server.kill)
                raise ConnectionResetError

        async with opened(**{**server.tier(), "endpoint": proxy.url, "deadline": 4}) as backend:
            await put_eventually(backend, [item])
            view = await anyio.to_thread.run_sync(blank, LONG)
            proxy.between = kill
            began = time.monotonic()
            assert await backend.get([(item[0], view)]) == [FAILED]
            assert left <= 0
            # Another chunk may be there now.
            await anyio.to_thread.run_sync(poison, view)
            await anyio.sleep(max(0.0, began + 8 - time.monotonic()))
            assert await anyio.to_thread.run_sync(is_poisoned, view)


@pytest.mark.slow
async def test_a_server_that_stalls_beyond_the_deadline(server: S3Server) -> None:
    short, long = await values(40, 4000), await values(2, LONG)
    keys = [key for key, _ in short]
    async with opened(**server.tier(), deadline=2, requests=4) as backend:
        await put_eventually(backend, short)
        await in_thread(server.pause)
        # The server resumes only after all of these calls: none may wait for it.
        assert await backend.put(short) == [FAILED] * 40
        assert await backend.put(long) == [FAILED] * 2
        view = blank(4000)
        assert await backend.get([(keys[0], view)]) == [FAILED]
        assert is_poisoned(view)
        with pytest.raises(StoreError, match="does not answer in time"):
            await backend.contains(keys)
        with pytest.raises(StoreError, match="does not answer in time"):
            await backend.delete(keys)
        await in_thread(server.resume)
        await put_eventually(backend, short)
        # Only the server knows of uploads whose start it read after it was resumed.
        assert await anyio.to_thread.run_sync(server.orphans) == []


@pytest.mark.slow
async def test_a_server_that_stalls_in_mid_upload(server: S3Server) -> None:
    old, new = await values(1, LONG, seed=1), await values(1, LONG, seed=2)
    async with FaultyProxy(server.port) as proxy, opened(**server.tier()) as other:
        paused: list[str] = []

        async def pause(line: str) -> None:
            if "partNumber=2" in line and not paused:
                paused.append(line)
                await in_thread(server.pause)

        assert await other.put(old) == [OK]
        proxy.before = pause
        async with opened(**{**server.tier(), "endpoint": proxy.url, "deadline": 4}) as backend:
            # The server resumes only after this call.
            assert await backend.put(new) == [FAILED]
        await in_thread(server.resume)
        assert paused
        assert await found(other, old) == [OK]


@pytest.mark.parametrize("server", ["small"], indirect=True)
async def test_a_server_without_room(server: S3Server) -> None:
    outcomes: list[Outcome] = []
    async with opened(**server.tier()) as backend:
        # SeaweedFS checks its free space periodically, and reports a generic internal error.
        with anyio.fail_after(60):
            while FAILED not in outcomes:
                items = await values(len(outcomes) + 1, 4_000_000)
                outcomes += await backend.put(items[-1:])
        assert outcomes[:1] == [OK]
        assert await found(backend, items) == [OK] * (len(items) - 1) + [MISS]


async def test_a_port_without_a_server(
    tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with FaultyProxy(s3.port) as proxy:
        url = proxy.url
    items = await values(2, 4000)
    async with opened(**{**s3.tier(), "endpoint": url}, deadline=2) as backend:
        assert await backend.put(items) == [FAILED] * 2
        with pytest.raises(StoreError, match=f"^s3://kvtier/chunks at {url} cannot be reached: check url"):
            await backend.contains([make_key(0)])
    (record,) = caplog.records
    assert f"tier 'pool': s3://kvtier/chunks at {url} cannot be reached: check url and" in record.message


async def test_wrong_credentials_are_logged_once_and_never_shown(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    tier = s3.tier()
    tier["credentials"] = {**tier["credentials"], "secret_access_key": "hunter2-hunter2"}
    async with opened(**tier) as backend:
        outcomes: list[list[Outcome]] = [list(await backend.put(await values(3, 4000))) for _ in range(3)]
        assert outcomes == [[FAILED] * 3] * 3
        assert await found(backend, await values(1, 4000)) == [FAILED]
        with pytest.raises(StoreError, match="refuses these credentials") as refused:
            await backend.contains([make_key(0)])
        assert refused.value.refused
        assert refused.value.__suppress_context__ or refused.value.__context__ is None
        assert "hunter2" not in repr(refused.value)
        assert "hunter2" not in repr(backend._settings) + repr(vars(backend._store))
    (record,) = caplog.records
    assert (
        "refuses these credentials (403 Forbidden, SignatureDoesNotMatch): check credentials"
        in record.message
    )
    assert "hunter2" not in caplog.text
    assert SECRET_KEY not in caplog.text


async def test_credentials_that_may_only_read(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    items = await values(2, 4000)
    tier = {**s3.tier(), "url": f"s3://{BUCKET}/reading"}
    async with opened(**tier) as backend:
        assert await backend.put(items) == [OK] * 2
    tier["credentials"] = {**tier["credentials"], "access_key_id": READER_KEY}
    async with opened(**tier) as backend:
        assert await backend.contains([make_key(0), make_key(7)]) == [True, False]
        assert await found(backend, items) == [OK] * 2
        assert caplog.records == []
        # If this raised, kvtier would retry it before every other call.
        await backend.delete([make_key(0)])
        assert await backend.put(items) == [FAILED] * 2
    (record,) = caplog.records
    assert "refuses these credentials (403 Forbidden, AccessDenied)" in record.message
