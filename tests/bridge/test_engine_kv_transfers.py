"""KV transfers started by an engine, with real instances and transports, and scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from kvtier.bridge.protocol import (
    Cancel,
    Commit,
    EndKVTransfer,
    Found,
    KVTransfer,
    KVTransferResult,
)
from kvtier.catalog.catalog import State
from kvtier.memory.header import HEADER_BYTES
from kvtier.memory.keys import join_keys
from kvtier.memory.layout import ChunkLayout
from kvtier.rpc.frames import Refused
from kvtier.testing.servers import free_port
from tests.rigs.scripted_engine import CHUNK_TOKENS, KEYS, LAYOUT, ROOT, TOKENS, Host, Peer, open_host, store
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio


PEER = {"listen": "127.0.0.1:0", "secret": "sixteen or more characters", "share": 0.9}
IDLE = [{"name": "engine", "weights_id": "", "leases": 0, "reservations": 0, "tickets": 0}]
ALL = join_keys(KEYS)


class Pair(NamedTuple):
    """A prefill host with scheduler and workers of its engine, and a decode host with a scheduler."""

    prefill_host: Host
    decode_host: Host
    scheduler: Peer
    workers: list[Peer]
    decode_scheduler: Peer
    receiver: str

    async def transfer_kv(self, ticket: int = 1) -> None:
        await self.scheduler.send(KVTransfer(ticket, self.receiver, ROOT, ALL, TOKENS))
        await until(lambda: pushed_counts(self.decode_host)["announced"] == len(KEYS))

    async def expect(self, ticket: int = 1) -> Found:
        """Look the prompt up at the decode host, before all of it has arrived."""
        found = await self.decode_scheduler.look_up(
            KEYS, ticket, expect_chunks=len(KEYS), expect_seconds=60.0
        )
        assert len(found.leases) + found.fetching == len(KEYS)
        assert found.fetching
        return found


def pushed_counts(host: Host) -> dict[str, int]:
    """Return the counts of pushed chunks of a host."""
    status: Any = host.server.status()
    return dict(status["pushed"])


def is_idle(host: Host) -> bool:
    """Whether no transfer, reservation or wait is open, and only the chunks of the first tier are leased."""
    status: Any = host.server.status()
    cache = host.server.cache
    reserving = status["serving"]["reserving"]
    counts = (
        status["kv_transfers"]["open"],
        status["kv_transfers"]["leased_bytes"],
        status["pushed"]["announced"],
        status["pushed"]["waiting"],
        reserving["reserved_bytes"],
        reserving["announcements"],
        status["serving"]["grants"],
        cache.pending_bytes,
        cache.arena.leases - cache.catalog.count(0),
    )
    return not any(counts)


@asynccontextmanager
async def open_pair(tmp_path: Path, **more: Any) -> AsyncIterator[Pair]:
    """Open a prefill and a decode host. Check on exit that nothing is held."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    receiver = f"127.0.0.1:{free_port()}"
    more = {"kv_transfer": {"targets": [receiver]}, **more}
    async with (
        open_host(folders[0], peer=PEER, **more) as prefill_host,
        open_host(folders[1], peer={**PEER, "listen": receiver}) as decode_host,
    ):
        async with (
            prefill_host.engine() as (scheduler, workers),
            decode_host.peer("scheduler") as decode_scheduler,
        ):
            assert decode_host.server.peer == receiver
            yield Pair(prefill_host, decode_host, scheduler, workers, decode_scheduler, receiver)
        await prefill_host.wait_until_idle()
        await decode_host.wait_until_idle()
        await until(lambda: is_idle(prefill_host) and is_idle(decode_host))


async def test_chunks_are_pushed_once_every_rank_has_committed(tmp_path: Path) -> None:
    """Existing chunks are pushed immediately, and chunks committed after the end of the prompt as well."""
    async with open_pair(tmp_path) as pair:
        await store(pair.scheduler, pair.workers, KEYS[:2])
        await pair.transfer_kv()
        first = await pair.expect()
        reserved = await pair.scheduler.reserve(KEYS[2:], KEYS[1], ticket=2)
        last = reserved.offsets[-1] + HEADER_BYTES
        pair.workers[0].arena.view(last, 32)[:] = KEYS[-1]
        await pair.workers[0].commit(reserved.leases)
        # Not those for which room is reserved ahead.
        await until(lambda: pair.decode_host.server.cache.catalog.state(KEYS[1], 0) is State.READY)
        await until(lambda: not pair.prefill_host.instance.status()["kv_transfers"]["leased_bytes"])  # type: ignore[index]
        await pair.scheduler.send(EndKVTransfer(1, complete=True))
        await pair.scheduler.status()
        await anyio.wait_all_tasks_blocked()
        assert await pair.scheduler.status(), "its next message is this answer, not yet the result"
        assert pushed_counts(pair.decode_host)["waiting"] == 1, "one rank has not committed yet"
        await pair.workers[1].send(Commit(reserved.leases))
        assert await pair.scheduler.receive() == KVTransferResult(1, TOKENS, "")
        found = await pair.decode_scheduler.receive(Found)
        assert (len(first.leases + found.leases), found.fetching) == (6, 0)
        assert bytes(pair.decode_scheduler.arena.view(found.offsets[-1] + HEADER_BYTES, 32)) == KEYS[-1]
        await pair.decode_scheduler.send(Cancel(1))


async def test_chunks_never_stored_are_not_waited_for(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as pair:
        await pair.transfer_kv()
        await pair.expect()
        await store(pair.scheduler, pair.workers, KEYS[:4])
        await pair.scheduler.send(EndKVTransfer(1, complete=True))
        assert await pair.scheduler.receive() == KVTransferResult(1, 4 * CHUNK_TOKENS, "")
        found = await pair.decode_scheduler.receive(Found)
        assert (len(found.leases), found.fetching) == (4, 0)
        await pair.decode_scheduler.send(Cancel(1))


@pytest.mark.parametrize("ending", ["end message", "disconnect"])
async def test_aborted_kv_transfer_ends_the_lookup(tmp_path: Path, ending: str) -> None:
    async with open_pair(tmp_path) as pair:
        await pair.transfer_kv()
        await pair.expect()
        if ending == "end message":
            await pair.scheduler.send(EndKVTransfer(1, complete=False))
            result = await pair.scheduler.receive(KVTransferResult)
            assert result.tokens == 0
        else:
            await pair.scheduler.stream.aclose()
        found = await pair.decode_scheduler.receive()
        assert found == Found(1, [], [], [], 0)


async def test_cancelled_lookup_is_released_immediately(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as pair:
        await store(pair.scheduler, pair.workers, KEYS[:2])
        await pair.transfer_kv()
        await pair.expect()
        await until(lambda: pair.decode_host.server.cache.catalog.count(0) == 2)
        await pair.decode_scheduler.send(Cancel(1))
        await until(lambda: pushed_counts(pair.decode_host)["waiting"] == 0)
        await until(lambda: pair.decode_host.server.status()["engines"] == IDLE)


async def test_kv_transfer_without_credentials_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        for ticket in (1, 2):
            result = await scheduler.request(
                KVTransfer(ticket, "127.0.0.1:1", ROOT, ALL, TOKENS), KVTransferResult
            )
            assert (result.ticket, result.tokens) == (ticket, 0)
            assert "set peer.secret" in result.reason
        await scheduler.send(EndKVTransfer(1, complete=True))
    assert caplog.text.count("KV transfer to 127.0.0.1:1 failed") == 1


async def test_layout_mismatch_is_reported_with_both_layouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(tmp_path) as pair:
        other = ChunkLayout(CHUNK_TOKENS, LAYOUT.groups, ranks=1, platform="bfloat16")
        await pair.decode_scheduler.stream.aclose()
        await pair.decode_host.wait_until_idle()
        async with pair.decode_host.peer("scheduler", layout=other, namespace=bytes(32)) as decode_scheduler:
            await store(pair.scheduler, pair.workers, KEYS)
            for ticket in (1, 2):
                await pair.scheduler.send(KVTransfer(ticket, pair.receiver, ROOT, ALL, TOKENS))
                result = await pair.scheduler.receive(KVTransferResult)
                assert (result.ticket, result.tokens) == (ticket, 0)
            assert f"{other}; here: {LAYOUT}" in result.reason
            assert await decode_scheduler.look_up(KEYS) == Found(1, [], [], [], 0)
    assert "1 rank, bfloat16" in caplog.text
    assert caplog.text.count(f"KV transfer to {pair.receiver} failed") == 1


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (KVTransfer(1, "a:1", ROOT, ALL[:-1], TOKENS), "malformed keys"),
        (KVTransfer(1, "a:1", ROOT, ALL, TOKENS + 1), "tokens do not match its keys"),
        (KVTransfer(1, "a:1", ROOT, ALL, 0), "tokens do not match its keys"),
        (KVTransfer(1, "a:1", ROOT, b"", 1), "tokens do not match its keys"),
    ],
    ids=["cut-short", "too-many-tokens", "no-tokens", "no-keys"],
)
async def test_invalid_kv_transfer_is_refused(tmp_path: Path, message: KVTransfer, reason: str) -> None:
    async with open_host(tmp_path) as host, host.peer("scheduler") as engine:
        refused = await engine.request(message, Refused)
    assert reason in refused.reason


async def test_kv_transfer_from_a_worker_is_refused(tmp_path: Path) -> None:
    async with open_host(tmp_path) as host, host.peer("worker", 0) as worker:
        refused = await worker.request(KVTransfer(1, "a:1", ROOT, ALL, TOKENS), Refused)
    assert refused.reason == "unexpected KVTransfer: only schedulers send it"
