"""What travels over a connection of the transport ``tcp``, cut into requests or refused."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backends.base import Outcome
from kvtier.sockets.connection import ProtocolViolation
from kvtier.transports.base import Access, RemoteSpan
from kvtier.transports.tcp.wire import (
    MAX_NUMBER,
    MAX_REQUEST_BYTES,
    MAX_SPANS,
    RequestReader,
    answer_bytes,
    can_be_asked,
    decode_answer,
    encode_answer,
    encode_request,
)

numbers = st.integers(0, MAX_NUMBER)
spans = st.lists(
    st.builds(RemoteSpan, numbers, numbers, st.integers(0, MAX_REQUEST_BYTES // 8)), min_size=1, max_size=8
)
requests = st.tuples(st.sampled_from(Access), spans)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The same bytes, as a network may bring them."""
    at = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in pairwise(at)]


@given(st.lists(requests, max_size=6), st.lists(st.integers(0, 1 << 16), max_size=8))
def test_requests_come_whole_however_they_are_cut(
    sent: list[tuple[Access, list[RemoteSpan]]], places
) -> None:
    reader = RequestReader()
    found = []
    for data in cut(b"".join(encode_request(access, spans) for access, spans in sent), places):
        reader.feed(data)
        while (request := reader.next()) is not None:
            found.append(request)
    assert found == sent
    assert reader.held == 0


@given(requests, st.binary(max_size=500), st.lists(st.integers(0, 1000), max_size=5))
def test_bytes_to_be_written_are_no_request(request, payload: bytes, places: list[int]) -> None:
    reader = RequestReader()
    taken = b""
    heads = 0
    for data in cut(encode_request(*request) + payload + encode_request(*request), places):
        reader.feed(data)
        if not heads and reader.next() is not None:
            heads += 1
        if heads:
            taken += reader.take(len(payload) - len(taken))
        if heads == 1 and len(taken) == len(payload) and reader.next() is not None:
            heads += 1
    assert (taken, heads, reader.held) == (payload, 2, 0)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_garbage_is_refused_or_waited_for(pieces: list[bytes]) -> None:
    reader = RequestReader()
    for data in pieces:
        reader.feed(data)
        try:
            request = reader.next()
        except ProtocolViolation:
            return
        assert request is None or sum(span.length for span in request.spans) <= MAX_REQUEST_BYTES
        assert reader.held <= sum(map(len, pieces))


@given(requests, st.integers(0, 7), st.integers(0, 255))
def test_a_head_with_one_wrong_byte(request, at: int, byte: int) -> None:
    """Whatever it says then, nothing of more than the bounds allow is believed."""
    data = bytearray(encode_request(*request))
    data[at] = byte
    reader = RequestReader()
    reader.feed(bytes(data))
    try:
        found = reader.next()
    except ProtocolViolation:
        return
    assert found is None or len(found.spans) <= len(request[1])


@pytest.mark.parametrize("length", [MAX_REQUEST_BYTES + 1, 1 << 63, MAX_NUMBER])
def test_lengths_that_no_request_has(length: int) -> None:
    reader = RequestReader()
    reader.feed(encode_request(Access.WRITE, [RemoteSpan(1, 2, length)]))
    with pytest.raises(ProtocolViolation, match=str(length)):
        reader.next()


@pytest.mark.parametrize("count", [0, MAX_SPANS + 1, 65_535])
def test_numbers_of_spans_that_no_request_has(count: int) -> None:
    head = bytearray(encode_request(Access.READ, [RemoteSpan(1, 2, 3)])[:8])
    struct.pack_into("<H", head, 6, count)
    reader = RequestReader()
    reader.feed(bytes(head))
    with pytest.raises(ProtocolViolation, match=str(count)):
        reader.next()


def test_many_lengths_that_are_too_much_together() -> None:
    reader = RequestReader()
    reader.feed(encode_request(Access.READ, [RemoteSpan(1, 2, MAX_REQUEST_BYTES // 2)] * 3))
    with pytest.raises(ProtocolViolation):
        reader.next()


@given(st.sampled_from(Access), st.lists(st.booleans(), min_size=1, max_size=MAX_SPANS))
def test_answers(access: Access, granted: list[bool]) -> None:
    data = encode_answer(access, granted)
    assert len(data) == answer_bytes(len(granted))
    expected = [Outcome.OK if one else Outcome.MISS for one in granted]
    assert decode_answer(data, access, len(granted)) == expected


@given(st.binary(min_size=64, max_size=64))
def test_answers_that_are_none(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_answer(data, Access.READ, 56)


@given(st.integers(2, 255))
def test_an_outcome_that_there_is_not(outcome: int) -> None:
    data = encode_answer(Access.READ, [True])[:8] + bytes([outcome]) + bytes(55)
    with pytest.raises(ProtocolViolation):
        decode_answer(data, Access.READ, 1)


@pytest.mark.parametrize("span", [RemoteSpan(-1, 0, 1), RemoteSpan(0, 1 << 64, 1), RemoteSpan(1 << 64, 0, 1)])
def test_numbers_that_cannot_be_sent(span: RemoteSpan) -> None:
    assert not can_be_asked(span)
