"""The wire format of the transport ``tcp``: parsing requests and answers, and refusing invalid ones."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.base import Outcome
from kvtier.concurrency.sockets.connection import ProtocolViolation
from kvtier.transports.base import Access, RemoteSpan
from kvtier.transports.tcp.wire import (
    MAX_NUMBER,
    MAX_REQUEST_BYTES,
    MAX_SPANS,
    RequestReader,
    answer_bytes,
    decode_answer,
    encode_answer,
    encode_request,
    is_encodable,
)

numbers = st.integers(0, MAX_NUMBER)
spans = st.lists(
    st.builds(RemoteSpan, numbers, numbers, st.integers(0, MAX_REQUEST_BYTES // 8)), min_size=1, max_size=8
)
requests = st.tuples(st.sampled_from(Access), spans)


def cut(data: bytes, offsets: list[int]) -> list[bytes]:
    """Split the bytes as a network might."""
    at = [0, *sorted(offset % (len(data) + 1) for offset in offsets), len(data)]
    return [data[start:stop] for start, stop in pairwise(at)]


@given(st.lists(requests, max_size=6), st.lists(st.integers(0, 1 << 16), max_size=8))
def test_requests_are_reassembled_from_any_pieces(
    sent: list[tuple[Access, list[RemoteSpan]]], offsets
) -> None:
    reader = RequestReader()
    result = []
    for data in cut(b"".join(encode_request(access, spans) for access, spans in sent), offsets):
        reader.feed(data)
        while (request := reader.next()) is not None:
            result.append(request)
    assert result == sent
    assert reader.buffered == 0


@given(requests, st.binary(max_size=500), st.lists(st.integers(0, 1000), max_size=5))
def test_payload_is_not_parsed_as_request(request, payload: bytes, offsets: list[int]) -> None:
    reader = RequestReader()
    received = b""
    headers = 0
    for data in cut(encode_request(*request) + payload + encode_request(*request), offsets):
        reader.feed(data)
        if not headers and reader.next() is not None:
            headers += 1
        if headers:
            received += reader.take(len(payload) - len(received))
        if headers == 1 and len(received) == len(payload) and reader.next() is not None:
            headers += 1
    assert (received, headers, reader.buffered) == (payload, 2, 0)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_garbage_is_refused_or_incomplete(pieces: list[bytes]) -> None:
    reader = RequestReader()
    for data in pieces:
        reader.feed(data)
        try:
            request = reader.next()
        except ProtocolViolation:
            return
        assert request is None or sum(span.length for span in request.spans) <= MAX_REQUEST_BYTES
        assert reader.buffered <= sum(map(len, pieces))


@given(requests, st.integers(0, 7), st.integers(0, 255))
def test_header_with_one_wrong_byte(request, at: int, byte: int) -> None:
    """A corrupt header is refused, or stays within the limits."""
    data = bytearray(encode_request(*request))
    data[at] = byte
    reader = RequestReader()
    reader.feed(bytes(data))
    try:
        result = reader.next()
    except ProtocolViolation:
        return
    assert result is None or len(result.spans) <= len(request[1])


@pytest.mark.parametrize("length", [MAX_REQUEST_BYTES + 1, 1 << 63, MAX_NUMBER])
def test_length_beyond_limit_is_refused(length: int) -> None:
    reader = RequestReader()
    reader.feed(encode_request(Access.WRITE, [RemoteSpan(1, 2, length)]))
    with pytest.raises(ProtocolViolation, match=str(length)):
        reader.next()


@pytest.mark.parametrize("count", [0, MAX_SPANS + 1, 65_535])
def test_span_count_beyond_limits_is_refused(count: int) -> None:
    header = bytearray(encode_request(Access.READ, [RemoteSpan(1, 2, 3)])[:8])
    struct.pack_into("<H", header, 6, count)
    reader = RequestReader()
    reader.feed(bytes(header))
    with pytest.raises(ProtocolViolation, match=str(count)):
        reader.next()


def test_total_length_beyond_limit_is_refused() -> None:
    reader = RequestReader()
    reader.feed(encode_request(Access.READ, [RemoteSpan(1, 2, MAX_REQUEST_BYTES // 2)] * 3))
    with pytest.raises(ProtocolViolation):
        reader.next()


@given(st.sampled_from(Access), st.lists(st.booleans(), min_size=1, max_size=MAX_SPANS))
def test_answer_is_decoded_as_it_was_encoded(access: Access, granted: list[bool]) -> None:
    data = encode_answer(access, granted)
    assert len(data) == answer_bytes(len(granted))
    expected = [Outcome.OK if is_granted else Outcome.MISS for is_granted in granted]
    assert decode_answer(data, access, len(granted)) == expected


@given(st.binary(min_size=64, max_size=64))
def test_invalid_answer_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_answer(data, Access.READ, 56)


@given(st.integers(2, 255))
def test_unknown_outcome_is_refused(outcome: int) -> None:
    data = encode_answer(Access.READ, [True])[:8] + bytes([outcome]) + bytes(55)
    with pytest.raises(ProtocolViolation):
        decode_answer(data, Access.READ, 1)


@pytest.mark.parametrize("span", [RemoteSpan(-1, 0, 1), RemoteSpan(0, 1 << 64, 1), RemoteSpan(1 << 64, 0, 1)])
def test_out_of_range_span_is_not_encodable(span: RemoteSpan) -> None:
    assert not is_encodable(span)
