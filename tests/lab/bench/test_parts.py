"""Parts of `kvtier bench`: turns, ratios, percentiles, tables, error messages, raw limits."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.backends.redis.settings import RedisSettings
from kvtier.lab.bench.limits import RawFiles, limit_of
from kvtier.lab.bench.raw_resp import LogIn, RawRESP
from kvtier.lab.bench.report import remarks_of, table_of
from kvtier.lab.bench.rows import Direction, Extent, Row, Samples, percentile, ratios, rotated
from kvtier.lab.bench.run import describe_error
from kvtier.lab.bench.sides import BenchFailed, Chunk, Side, make_chunks, random_keys
from kvtier.memory.arena import Arena
from tests.rigs.chunks import DictBackend
from tests.rigs.servers.redis import RedisServer

pytestmark = pytest.mark.anyio


def test_percentile_is_the_nearest_rank_and_the_median() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 50.5
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0


def test_ratios_are_of_the_same_turn() -> None:
    assert ratios([1.0, 2.0, 4.0], [2.0, 2.0, 2.0]) == [2.0, 1.0, 0.5]


def test_order_rotates_by_turn() -> None:
    assert [rotated(["a", "b"], turn) for turn in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_samples_without_a_limit_have_no_ratio() -> None:
    samples = Samples()
    samples.turns["kvtier"] = [1.0, 2.0, 4.0]
    samples.singles = [0.001, 0.003]
    direction = samples.direction(4_000_000_000)
    assert (direction.gb_s, direction.p50_ms, direction.p99_ms) == (2.0, 2.0, 3.0)
    assert direction.ratio is direction.limit_gb_s is None


def test_table_shows_a_dash_for_missing_values() -> None:
    def direction(**turns: list[float]) -> Direction:
        samples = Samples()
        samples.turns |= turns
        samples.singles = [0.0005]
        return samples.direction(10**9)

    both, alone = direction(kvtier=[2.0], limit=[1.0]), direction(kvtier=[2.0])
    rows = [
        Row("ram", "cpu", "memcpy", both, both, 1e6),
        Row("shelf", "shelf", None, alone, both, None),
        Row("pool", "redis", error="Connection refused [not markup]"),
    ]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table_of(rows, Extent()))
        for remark in remarks_of(rows):
            console.print(remark)
    lines = captured.get().splitlines()
    assert "0.50" in lines[2]
    assert "1,000,000" in lines[2]
    assert lines[3].count("—") == 3
    assert "failed" in lines[4]
    assert lines[5] == "pool: Connection refused [not markup]"


def test_errors_are_described_for_the_user() -> None:
    assert describe_error(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
    assert describe_error(ExceptionGroup("several", [BenchFailed("it is full")])) == "it is full"
    assert describe_error(ValueError("odd")) == "ValueError: odd"
    missing = ModuleNotFoundError("No module named 'nixl'")
    assert "install the package that provides it" in describe_error(missing)


@pytest.fixture
def chunks() -> Iterator[list[Chunk]]:
    """Three chunks in an arena."""
    arena = Arena.create(1 << 20)
    chunks = make_chunks(arena, random_keys(3), 8192)
    yield chunks
    chunks.clear()
    arena.close()


async def put_and_get(side: Side, chunks: Sequence[Chunk]) -> None:
    """Put chunks, and get them back into cleared views."""
    content = [bytes(view) for _, view in chunks]
    await side.put(chunks)
    for _, view in chunks:
        view[:] = bytes(len(view))
    await side.get(chunks)
    assert [bytes(view) for _, view in chunks] == content


async def test_raw_files_return_what_they_were_given_and_are_deleted(
    chunks: list[Chunk], tmp_path: Path
) -> None:
    side, keys = RawFiles(tmp_path, 2), [key for key, _ in chunks]
    await put_and_get(side, chunks)
    await side.forget(keys)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        await side.get(chunks)
    await side.close()


async def test_raw_resp_logs_in_and_deletes_its_keys(chunks: list[Chunk], tmp_path: Path) -> None:
    if missing := RedisServer.missing():
        pytest.skip(missing)
    with RedisServer(tmp_path, password="secret") as server:
        side = RawRESP(("127.0.0.1", server.port), 2, LogIn(None, "secret", 3))
        await put_and_get(side, chunks)
        assert server.command("DBSIZE") == 0, "the keys are in database 3"
        await side.forget([key for key, _ in chunks])
        server.command("SWAPDB", "0", "3")
        assert server.command("DBSIZE") == 0
        await side.close()
        with pytest.raises(BenchFailed, match="WRONGPASS"):
            RawRESP(("127.0.0.1", server.port), 1, LogIn(None, "guess"))


async def test_raw_resp_times_out(chunks: list[Chunk]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        side = RawRESP(listener.getsockname()[:2], 1, timeout=0.05)
        with pytest.raises(TimeoutError):
            await side.put(chunks)
        await side.close()


@pytest.mark.parametrize(
    "url", ["rediss://127.0.0.1:1", "redis+cluster://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/main"]
)
def test_no_limit_for_unsupported_connections(url: str) -> None:
    tier = RedisSettings(name="pool", type="redis", url=url)
    arena = Arena.create(1 << 20)
    assert limit_of(tier, DictBackend({}), arena, 1 << 20) is None
    arena.close()
