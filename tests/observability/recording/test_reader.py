"""What was recorded is read back, and a corrupt file gives one clear error."""

from __future__ import annotations

import gzip
import logging
import lzma
import tempfile
from array import array
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh32_intdigest

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.tenants import SALTED
from kvtier.errors import KVTierError
from kvtier.memory.keys import KEY_BYTES
from kvtier.observability.recording.file import LookedUp
from kvtier.observability.recording.format import (
    FRAME,
    MAGIC,
    MAX_BODY_BYTES,
    NUMBER_BYTES,
    VERSION,
    EndRecord,
    Header,
    Record,
    RecordingError,
    encode_frame,
)
from kvtier.observability.recording.reader import (
    TraceAnswerEnd,
    TraceRequest,
    is_recording,
    read_events,
    read_recording,
)

from .recordings import CHUNK_BYTES, CHUNK_TOKENS, AnswerEnded, looked_up, of_keys, write

FEW_KEYS = [bytes([number]) * KEY_BYTES for number in range(8)]

seconds = st.none() | st.floats(0, 1e9)
# Tenants that are derived from a salt are renamed: test_recorder.py.
tenants = st.text(max_size=20).filter(lambda name: not name.startswith(SALTED))
hints = st.none() | st.builds(ChunkHints, tenants, st.integers(-100, 100), seconds, seconds, seconds)


@st.composite
def lookups(draw: st.DrawFn) -> LookedUp:
    keys = draw(st.lists(st.sampled_from(FEW_KEYS), min_size=1, max_size=12))
    chunk_tokens = draw(st.integers(1, 1 << 20))
    tokens = (len(keys) - 1) * chunk_tokens + draw(st.integers(1, chunk_tokens))
    size = draw(st.integers(0, 1 << 40))
    return LookedUp(draw(st.floats(0, 1e9)), b"".join(keys), tokens, chunk_tokens, size, draw(hints))


def read(path: Path) -> tuple[list[TraceRequest], str]:
    """Return the requests before the first error, and the error."""
    found: list[TraceRequest] = []
    try:
        found.extend(read_recording(path))
    except RecordingError as error:
        return found, str(error)
    return found, ""


@given(st.lists(lookups(), max_size=10))
@settings(deadline=None, max_examples=100)
def test_what_was_looked_up_is_read_back(batch: list[LookedUp]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traffic"
        write(path, *batch)
        requests = list(read_recording(path))
    assert len(requests) == len(batch)
    numbers: dict[bytes, int] = {}
    for seen, request in zip(batch, requests, strict=True):
        assert (request.time, request.tokens, request.chunk_bytes) == (
            seen.time,
            seen.tokens,
            seen.chunk_bytes,
        )
        assert (request.hints, request.tenant) == (seen.hints, seen.hints.tenant if seen.hints else "")
        keys = [seen.keys[at : at + KEY_BYTES] for at in range(0, len(seen.keys), KEY_BYTES)]
        assert len(request.chunks) == len(keys)
        for key, number in zip(keys, request.chunks, strict=True):
            assert numbers.setdefault(key, number) == number
    assert len(set(numbers.values())) == len(numbers), "different chunks have different numbers"


def test_ends_are_read_back_between_the_requests(path: Path) -> None:
    keys, signature = b"".join(FEW_KEYS), [7, 0, (1 << 64) - 1]
    first, last = of_keys(keys, 1.0), of_keys(keys[:KEY_BYTES], 3.0)
    ends = [
        AnswerEnded(2.0, keys[-KEY_BYTES:], signature),
        AnswerEnded(4.0, keys[:KEY_BYTES], []),
        AnswerEnded(5.0, keys[-KEY_BYTES:], signature[:1]),
    ]
    write(path, first, ends[0], last, *ends[1:])
    asked, end, other, unknown, again = read_events(path)
    assert isinstance(asked, TraceRequest)
    assert isinstance(other, TraceRequest)
    assert (asked.time, other.time) == (1.0, 3.0)
    assert isinstance(end, TraceAnswerEnd)
    assert (end.time, end.chunk, len(end.signature)) == (2.0, asked.chunks[-1], 3)
    assert unknown == TraceAnswerEnd(4.0, other.chunks[-1], array("Q"))
    assert again == TraceAnswerEnd(5.0, asked.chunks[-1], end.signature[:1])
    assert list(read_recording(path)) == [asked, other]


def test_recording_without_ends_of_the_first_format_is_read(path: Path) -> None:
    path.write_bytes(MAGIC + frame(Header(1, bytes(16), 0.0)) + frame(VALID))
    [request] = read_events(path)
    assert request == TraceRequest(0.0, array("Q", [0]), CHUNK_TOKENS, chunk_bytes=CHUNK_BYTES)


def test_equal_with_and_without_the_native_core(path: Path, implementation: str) -> None:
    keys = b"".join(FEW_KEYS)
    write(path, of_keys(keys), of_keys(keys[: 3 * KEY_BYTES]))
    first, second = read_recording(path)
    assert list(first.chunks[:3]) == list(second.chunks)
    assert len(set(first.chunks)) == len(FEW_KEYS)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_compressed_file_is_read(path: Path, tmp_path: Path, compress: object) -> None:
    write(path, looked_up(3, 1.0), looked_up(2, 2.0))
    wanted = list(read_recording(path))
    packed = tmp_path / "packed"
    packed.write_bytes(compress(path.read_bytes()))  # type: ignore[operator]
    assert list(read_recording(packed)) == wanted
    assert is_recording(packed)


def test_cut_off_compressed_file_is_read_up_to_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, *(looked_up(100) for _ in range(50)))
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    with caplog.at_level(logging.WARNING, "kvtier"):
        assert 10 < len(list(read_recording(path))) < 50
    assert f"{path}: the compressed file was cut off" in caplog.messages


def test_corrupt_compressed_file_is_an_error(path: Path) -> None:
    write(path, *(looked_up(100) for _ in range(50)))
    packed = bytearray(lzma.compress(path.read_bytes()))
    packed[len(packed) // 2] ^= 1
    path.write_bytes(packed)
    with pytest.raises(RecordingError, match=rf"^{path}: record \d+: Corrupt input data"):
        list(read_recording(path))


def test_every_truncation_keeps_the_records_before_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path)
    ends = [path.stat().st_size]
    path.unlink()
    batch = [looked_up(chunks, float(chunks)) for chunks in (1, 2, 3)]
    write(path, *batch)
    content = path.read_bytes()
    for _ in batch:
        ends.append(ends[-1] + FRAME.size + FRAME.unpack_from(content, ends[-1])[0])
    assert ends[-1] == len(content)
    for length in range(ends[0], len(content) + 1):
        path.write_bytes(content[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvtier"):
            times = [request.time for request in read_recording(path)]
        whole = sum(end <= length for end in ends) - 1
        assert times == [1.0, 2.0, 3.0][:whole]
        rest = length - ends[whole]
        incomplete = f"{path}: record {whole + 1} is incomplete: its {rest} bytes are ignored"
        assert caplog.messages == ([incomplete] if rest else [])


def test_no_flipped_bit_changes_what_is_read(path: Path) -> None:
    write(path, looked_up(1, 1.0, ChunkHints("tenant")), looked_up(1, 2.0))
    wanted = list(read_recording(path))
    content = path.read_bytes()
    errors = []
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        found, error = read(path)
        if error:
            errors.append(error)
        else:  # A length has grown, so that the record seems to be incomplete.
            assert found in (wanted[:1], [])
    assert len(errors) > len(content) // 2
    assert all(error.startswith(str(path)) for error in errors)


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_an_error_or_a_recording(rest: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traffic"
        write(path)
        path.write_bytes(path.read_bytes() + rest)
        found, error = read(path)
    assert found == []
    assert not error or error.startswith(f"{path}: record 1: ")


def frame(record: Record | Header | EndRecord) -> bytes:
    encoded = encode_frame(record)
    assert encoded is not None
    return encoded


VALID = Record(0.0, CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_BYTES, bytes(8))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunks": bytes(12)}, "12 bytes are not a whole number of chunks"),
        ({"chunks": b""}, f"{CHUNK_TOKENS} tokens do not fit 0 chunks of {CHUNK_TOKENS}"),
        ({"tokens": CHUNK_TOKENS + 1}, f"{CHUNK_TOKENS + 1} tokens do not fit 1 chunks of {CHUNK_TOKENS}"),
        ({"tokens": -1}, "Expected `int` >= 0"),
        ({"chunk_tokens": 0}, "Expected `int` >= 1"),
        ({"chunk_bytes": 1 << 60}, "Expected `int` <"),
        ({"time": -1.0}, "Expected `float` >= 0"),
        ({"time": 4e9}, "Expected `float` <"),
        ({"time": float("nan")}, "Expected `float`"),
        ({"time": float("inf")}, "Expected `float` <"),
        ({"hints": 1}, "Expected `array | null`"),
    ],
)
def test_invalid_record_is_an_error(path: Path, change: dict[str, object], reason: str) -> None:
    write(path, looked_up(1))
    path.write_bytes(path.read_bytes() + frame(msgspec.structs.replace(VALID, **change)))
    requests = read_recording(path)
    assert isinstance(next(requests), TraceRequest)
    with pytest.raises(KVTierError) as error:
        next(requests)
    assert str(error.value).startswith(f"{path}: record 2: ")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "body", [b"\x81\xa1\xff\x01", b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90"], ids=["text", "depth"]
)
@pytest.mark.parametrize("in_header", [True, False])
def test_body_of_no_format_is_an_error(path: Path, body: bytes, *, in_header: bool) -> None:
    header = b"" if in_header else frame(Header(VERSION, bytes(16), 0.0))
    path.write_bytes(MAGIC + header + FRAME.pack(len(body), xxh32_intdigest(body)) + body)
    with pytest.raises(RecordingError, match="the header: " if in_header else "record 1: "):
        list(read_events(path))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (EndRecord(-1.0, bytes(8), b""), "Expected `float` >= 0"),
        (EndRecord(4e9, bytes(8), b""), "Expected `float` <"),
        (EndRecord(0.0, bytes(7), b""), "Expected `bytes` of length >= 8"),
        (EndRecord(0.0, bytes(16), b""), "Expected `bytes` of length <= 8"),
        (EndRecord(0.0, bytes(8), bytes(12)), "12 bytes are not a whole number of chunks"),
        (EndRecord(0.0, bytes(8), bytes(9 * NUMBER_BYTES)), "Expected `bytes` of length <= 64"),
    ],
)
def test_invalid_end_is_an_error(path: Path, end: EndRecord, reason: str) -> None:
    write(path, looked_up(1))
    path.write_bytes(path.read_bytes() + frame(end))
    found, error = read(path)
    assert len(found) == 1
    assert error.startswith(f"{path}: record 2: ")
    assert reason in error


@pytest.mark.parametrize("length", [0, MAX_BODY_BYTES + 1, (1 << 32) - 1])
def test_length_is_bounded(path: Path, length: int) -> None:
    write(path)
    path.write_bytes(path.read_bytes() + FRAME.pack(length, 0))
    with pytest.raises(RecordingError, match=f"{path}: record 1: its length is {length} bytes, of at most"):
        list(read_recording(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "{} is not a recording"),
        (b"dear", "{} is not a recording"),
        (MAGIC, "{} has no complete header"),
        (MAGIC + frame(Header(3, bytes(16), 0.0)), "{} has format 3: this version reads 1 to 2"),
        (MAGIC + frame(Header(0, bytes(16), 0.0)), "{} has format 0: this version reads 1 to 2"),
        (MAGIC + frame(Header(1, bytes(15), 0.0)), "{}: the header: Expected `bytes` of length >= 16"),
        (MAGIC + frame(VALID), "{}: the header: Expected `object`, got `array`"),
    ],
)
def test_other_file_is_an_error(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RecordingError) as error:
        list(read_recording(path))
    assert str(error.value).startswith(reason.format(path))


def test_missing_file_is_an_error(path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*: No such file or directory"):
        list(read_recording(path))


def test_recordings_are_distinguished_from_other_files_by_their_first_bytes(path: Path) -> None:
    write(path)
    assert is_recording(path)
    for other in (
        b"",
        MAGIC[:-1],
        b"{}",
        b"\x1f\x8b",
        gzip.compress(b"{}", mtime=0),
        b"\xfd7zXZ\0",
        lzma.compress(b"{}"),
    ):
        path.write_bytes(other)
        assert not is_recording(path)
