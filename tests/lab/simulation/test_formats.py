"""Readers of traces: what they yield, and what they refuse."""

from __future__ import annotations

import gzip
import lzma
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.catalog.hints import ChunkHints
from kvtier.errors import KVTierError
from kvtier.lab.simulation.formats import read_trace
from kvtier.lab.simulation.trace import Trace
from kvtier.observability.recording.format import (
    ID_BYTES,
    MAGIC,
    VERSION,
    EndRecord,
    Header,
    Record,
    encode_frame,
)
from kvtier.observability.recording.reader import TraceAnswerEnd, TraceRequest
from tests.lab.simulation.making import bailian_line, in_one_tier, mooncake_line

RECORDING_HEADER = encode_frame(Header(version=VERSION, id=bytes(ID_BYTES), started=1e9)) or b""
PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_traces_of_mooncake_are_read_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    content = mooncake_line(500, [1, 2, 3], session="s") + "\n" + mooncake_line(1500, [1, 2, 9])
    path = tmp_path / f"trace.jsonl{suffix}"
    path.write_bytes(PACK[suffix](content.encode()))
    requests, recorded = read_trace(path, 512)
    first, second = requests
    assert not recorded
    assert (first.time, list(first.chunks), first.tokens, first.output_tokens) == (0.5, [1, 2, 3], 1536, 7)
    assert (second.time, list(second.chunks)) == (1.5, [1, 2, 9])


def test_blocks_of_mooncake_are_folded_into_longer_chunks(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", mooncake_line(0, [1, 2, 3, 4, 5]), mooncake_line(1, [1, 2, 3, 8]))
    first, second = read_trace(path, 1024)[0]
    assert list(first.chunks) == [2, 4, 5]
    assert list(second.chunks) == [2, 8]


def test_chunks_of_bailian_are_equal_only_after_equal_prefixes(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace",
        bailian_line(1.25, [7, 7, 7, 7, 7]),
        bailian_line(2.5, [7, 7, 7, 7, 8]),
        bailian_line(3.5, [9, 7, 7, 7]),
    )
    first, second, third = read_trace(path, 32)[0]
    assert (first.time, first.tokens, len(first.chunks)) == (1.25, 80, 3)
    assert len(set(first.chunks)) == 3, "each chunk has another prefix"
    assert first.chunks[:2] == second.chunks[:2]
    assert first.chunks[2] != second.chunks[2]
    assert not set(first.chunks).intersection(third.chunks)


def test_recording_has_its_own_chunks(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    hints = ChunkHints(tenant="a")
    chunks = array("Q", [1 << 63, 5]).tobytes()
    records = [Record(1.5, 250, 128, 4096, chunks), Record(2.5, 256, 128, 4096, chunks, hints)]
    frames = [RECORDING_HEADER, *map(encode_frame, records)]
    path.write_bytes(MAGIC + b"".join(frame for frame in frames if frame is not None))
    trace = Trace.read(path, 512)
    assert (trace.chunk_tokens, trace.chunk_bytes, trace.unique) == (128, 4096, 2)
    assert (list(trace.times), list(trace.tokens), trace.hints) == ([1.5, 2.5], [250, 256], {1: hints})


def number(chunk: int) -> bytes:
    return chunk.to_bytes(8, "little")


def test_ends_of_a_recording_are_those_of_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    long, short = number(5) + number(6), number(5)
    events = [
        EndRecord(0.5, number(6), number(9)),
        Record(1.0, 250, 128, 4096, long),
        Record(2.0, 100, 128, 4096, short),
        EndRecord(4.0, number(6), number(7) + number(8)),
        Record(6.0, 250, 128, 4096, long),
        Record(7.0, 100, 128, 4096, short),
        EndRecord(7.5, number(6), b""),
        EndRecord(8.0, number(99), number(1)),
    ]
    frames = [RECORDING_HEADER, *map(encode_frame, events)]
    path.write_bytes(MAGIC + b"".join(frame for frame in frames if frame is not None))
    trace = Trace.read(path, 512)
    assert list(trace.answer_seconds) == [3.0, 0.0, 1.5, 0.0]
    assert {request: list(signature) for request, signature in trace.signatures.items()} == {0: [7, 8], 2: []}
    assert list(Trace.read(path, 512, 2).answer_seconds) == [0.0, 0.0], "it is read up to the second request"
    assert list(Trace.read(path, 512, 3).answer_seconds) == [3.0, 0.0, 0.0]


def test_ends_of_other_traces(tmp_path: Path) -> None:
    """By their duration, or estimated by the length of the answer."""
    path = written(
        tmp_path / "trace",
        mooncake_line(0, [1], duration=1500, stop="tool_use"),
        mooncake_line(1, [1], duration=0, stop="", output_length=50),
        mooncake_line(2, [1], stop="end_turn", output_length=0),
        mooncake_line(3, [1], stop="tool_use", output_length=100),
    )
    trace = Trace.read(path, 512)
    assert list(trace.answer_seconds) == [1.5, 1.0, 0.0, 2.0]
    assert list(Trace.read(path, 512, seconds_per_token=0.5).answer_seconds) == [1.5, 25.0, 0.0, 50.0]
    assert sorted(trace.signatures) == [0, 2, 3]
    assert trace.signatures[0] == trace.signatures[3] != trace.signatures[2]
    assert [len(signature) for signature in trace.signatures.values()] == [1, 1, 1]
    other = Trace.read(written(tmp_path / "other", bailian_line(0, [1], output_length=10)), 512)
    assert list(other.answer_seconds) == [0.2]
    bare = trace.without_ends()
    assert (list(bare.answer_seconds), bare.signatures, bare.times) == ([0.0] * 4, {}, trace.times)


def test_requests_are_read_one_after_the_other(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", mooncake_line(0, [1]), "{")
    requests, _ = read_trace(path, 512)
    assert list(next(requests).chunks) == [1]
    with pytest.raises(KVTierError, match="line 2"):
        next(requests)


def test_limit_leaves_the_rest_unread(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", mooncake_line(0, [1]), mooncake_line(1, [1]), "{")
    assert len(Trace.read(path, 512, 2)) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"hello\n", "line 1: is neither a JSON object"),
        (b"\xff\xfe\x00\n", "line 1: is neither a JSON object"),
        (b"[1, 2]\n", "line 1: is neither a JSON object"),
        pytest.param(b'{"chat_id": ' + b"[" * 100_000, "line 1: is neither a JSON object", id="nested"),
        (b'{"time": 3}\n', "line 1: has no hash_ids"),
        (b'{"hash_ids": [1], "timestamp": 3}\n', "line 1: .*input_length"),
        (mooncake_line(0, [1]).encode() + b'{"timest', "line 2: "),
        (mooncake_line(0, [1]).encode() + mooncake_line(1, [1 << 64]).encode(), "line 2: "),
        ((mooncake_line(0, [1]) + bailian_line(1, [1])).encode(), "line 2: is in the format of Bailian"),
        ((bailian_line(0, [1]) + mooncake_line(1, [1])).encode(), "line 2: .*chat_id"),
        (MAGIC + RECORDING_HEADER, "has no requests"),
        (mooncake_line(0, [1], hash_ids="abc").encode(), "line 1: .*hash_ids"),
        (gzip.compress(mooncake_line(0, [1]).encode() * 99, mtime=0)[:-30], "truncated"),
        (lzma.compress(mooncake_line(0, [1]).encode() * 99)[:-30], "truncated"),
        (gzip.compress(mooncake_line(0, [1]).encode(), mtime=0)[:5], "after line 0: .*truncated"),
        (lzma.compress(mooncake_line(0, [1]).encode())[:8], "after line 0: .*truncated"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (
            gzip.compress(mooncake_line(0, [1]).encode() * 9, mtime=0)[:-8] + bytes(8),
            "after line 9: .*corrupt",
        ),
        (gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, "corrupt"),
        (lzma.compress(mooncake_line(0, [1]).encode())[:20] + b"\xff" * 90, "corrupt"),
    ],
)
def test_malformed_input_is_one_error_with_file_and_reason(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(KVTierError, match=reason) as raised:
        Trace.read(path, 512)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("make_line", [mooncake_line, bailian_line])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timestamp": -0.5}, "Expected `float` >= 0.*timestamp"),
        ({"timestamp": True}, "got `bool`.*timestamp"),
        ({"timestamp": None}, "got `null`.*timestamp"),
        ({"timestamp": 10**20}, "Expected `float` <.*timestamp"),
        ({"timestamp": 4e12}, "Expected `float` <.*timestamp"),
        ({"duration": 4e12}, "Expected `float` <.*duration"),
        ({"timestamp": float("nan")}, "invalid character"),
        ({"input_length": -1}, "Expected `int` >= 0.*input_length"),
        ({"input_length": 1 << 63}, "Expected `int` <=.*input_length"),
        ({"input_length": 10**400}, "Expected `int` <=.*input_length"),
        ({"output_length": "7"}, "got `str`.*output_length"),
        ({"hash_ids": [1, 2.5]}, r"got `float`.*hash_ids\[1\]"),
        ({"hash_ids": [10**400]}, "hash_ids has an id that is not between 0 and"),
        ({"hash_ids": [1, -2]}, "hash_ids has an id that is not between 0 and"),
        ({"hash_ids": {"1": 2}}, "got `object`.*hash_ids"),
        ({"hash_ids": []}, "hash_ids is empty"),
    ],
)
def test_wrong_value_in_a_later_line_is_named(
    tmp_path: Path, make_line: Callable[..., str], change: dict[str, object], reason: str
) -> None:
    path = written(tmp_path / "trace", make_line(0, [1]), "\n", make_line(1, [1], **change))
    with pytest.raises(KVTierError, match=reason) as raised:
        Trace.read(path, 512)
    assert str(raised.value).startswith(f"{path}: line 3: ")


NESTED = pytest.param('{"other": ' + "[" * 100_000, id="nested")


@pytest.mark.parametrize("make_line", [mooncake_line, bailian_line])
@pytest.mark.parametrize(
    "rest", ["[1]\n", '"text"\n', "{}\n", "not JSON\n", "\0\n", '{"hash_ids": [1', NESTED]
)
def test_line_that_is_no_request_is_named(tmp_path: Path, make_line: Callable[..., str], rest: str) -> None:
    path = written(tmp_path / "trace", make_line(0, [1]), make_line(1, [1]), rest)
    with pytest.raises(KVTierError) as raised:
        Trace.read(path, 512)
    assert str(raised.value).startswith(f"{path}: line 3: ")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("make_line", [mooncake_line, bailian_line])
def test_requests_before_a_truncation_are_read(
    tmp_path: Path, make_line: Callable[..., str], suffix: str
) -> None:
    """A trace that is cut off is an error, which says where: its hit rates would be those of another one."""
    path = tmp_path / f"trace{suffix}"
    content = "".join(make_line(at, [at]) for at in range(20_000)).encode()
    packed = PACK[suffix](content)
    path.write_bytes(packed[: len(packed) // 2])
    requests: list[TraceRequest | TraceAnswerEnd] = []
    with pytest.raises(KVTierError) as raised:
        requests.extend(read_trace(path, 512)[0])
    assert 0 < len(requests) < 20_000
    message = f"{path}: after line {len(requests)}: the compressed file is truncated"
    assert str(raised.value).startswith(message)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(KVTierError, match="cannot be read"):
            Trace.read(path, 512)


@pytest.mark.parametrize(("line", "tokens"), [(mooncake_line(0, [1]), 256), (bailian_line(0, [1]), 24)])
def test_chunks_that_are_no_multiple_of_the_blocks_are_refused(
    tmp_path: Path, line: str, tokens: int
) -> None:
    with pytest.raises(KVTierError, match="use a multiple of"):
        Trace.read(written(tmp_path / "trace", line), tokens)


def test_requests_are_sorted_by_time(tmp_path: Path) -> None:
    lines = [mooncake_line(time, [time]) for time in (3000, 1000, 2000)]
    trace = Trace.read(written(tmp_path / "trace", *lines), 512)
    assert [trace.times[request] for request in trace.order] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("line", [mooncake_line(4e12 - 1, [1, 2]), bailian_line(4e9 - 1, [1, 2])])
def test_the_latest_time_can_be_replayed(tmp_path: Path, line: str) -> None:
    """The catalog counts the seconds of chunks in 32 bits."""
    outcome = in_one_tier(Trace.read(written(tmp_path / "trace", line * 2), 512), 100)
    assert outcome.hits == outcome.asked // 2


def test_large_ids_are_renumbered(tmp_path: Path) -> None:
    ids = [(1 << 64) - 1, 1 << 40, 0]
    trace = Trace.read(written(tmp_path / "trace", mooncake_line(0, ids), mooncake_line(1, ids[::-1])), 512)
    assert trace.chunks == array("I", [0, 1, 2, 2, 1, 0])
    assert (trace.unique, trace.numbers) == (3, 3)
