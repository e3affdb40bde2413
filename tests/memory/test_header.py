"""The chunk header: its format, and detection of any other content."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from kvtier.errors import CorruptChunk
from kvtier.memory.header import (
    HEADER_BYTES,
    IDENTITY,
    MAGIC,
    OBJECT_ALIGNMENT,
    ChunkHeader,
    StoredHeader,
    object_bytes,
    parent_and_block_tags,
)
from kvtier.memory.keys import BLOCK_HASH_BYTES, MAX_BLOCK_HASHES, ChunkKey
from kvtier.testing.backend import noise

KEY = ChunkKey(bytes(range(32)))
PARENT = ChunkKey(bytes(range(32, 64)))
OTHER = ChunkKey(bytes(range(1, 33)))
SPACE = b"n" * 32
PAYLOAD = b"hello"


def sealed(
    payload: bytes = PAYLOAD, *, checksum: bool = True, block_hashes: bytes = b"", tokens: int = 0
) -> bytearray:
    chunk = bytearray(object_bytes(len(payload)))
    chunk[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    header = ChunkHeader(KEY, PARENT, SPACE, len(payload), block_hashes, tokens)
    header.seal(memoryview(chunk), checksum=checksum)
    return chunk


def verify(chunk: bytes | bytearray | memoryview, key: ChunkKey = KEY) -> ChunkHeader:
    return ChunkHeader.verify(memoryview(chunk), key)


@given(st.binary(max_size=10_000), st.booleans())
def test_sealed_chunk_verifies_and_keeps_its_payload(payload: bytes, checksum: bool) -> None:
    chunk = sealed(payload, checksum=checksum)
    header = ChunkHeader(KEY, PARENT, SPACE, len(payload))
    assert verify(chunk) == header
    assert ChunkHeader.parse(bytes(chunk[:HEADER_BYTES])) == header
    assert chunk[HEADER_BYTES : HEADER_BYTES + len(payload)] == payload


@pytest.mark.parametrize(
    ("payload_bytes", "pages"), [(0, 1), (3648, 1), (3649, 2), (7744, 2), (7745, 3), (4 << 20, 1025)]
)
def test_objects_are_whole_pages(payload_bytes: int, pages: int) -> None:
    assert object_bytes(payload_bytes) == pages * OBJECT_ALIGNMENT


def test_format_is_stable() -> None:
    hashes = bytes(range(32))
    fields = (
        MAGIC.hex(),
        "0300010000000200",
        "0500000000000000",
        "0500000000000000",
        KEY.hex(),
        PARENT.hex(),
        SPACE.hex(),
        "b5e9c1ad071b3e7fc779cfaa5e523818",
        hashes.hex(),
    )
    chunk = sealed(block_hashes=hashes, tokens=0x01020304)
    assert bytes(chunk[:176]).hex() == "".join(fields)
    assert not any(chunk[176:400])
    assert bytes(chunk[400:404]).hex() == "04030201"
    assert bytes(chunk[412:]) == bytes(36) + PAYLOAD + bytes(OBJECT_ALIGNMENT - HEADER_BYTES - len(PAYLOAD))


@pytest.mark.parametrize("count", [0, 1, MAX_BLOCK_HASHES])
def test_block_hashes_come_back(count: int) -> None:
    hashes = noise(b"hashes", count * BLOCK_HASH_BYTES)
    chunk = sealed(block_hashes=hashes)
    assert verify(chunk).block_hashes == hashes
    assert parent_and_block_tags(memoryview(chunk)) == (PARENT, hashes[::BLOCK_HASH_BYTES])


@pytest.mark.parametrize("tokens", [0, 1, 241, 2**32 - 1])
def test_number_of_tokens_comes_back(tokens: int) -> None:
    assert verify(sealed(tokens=tokens)).tokens == tokens


def test_too_many_block_hashes_are_rejected() -> None:
    chunk = sealed()
    chunk[14] = MAX_BLOCK_HASHES + 1
    chunk[404:412] = xxh3_64_digest(chunk[:404])
    with pytest.raises(CorruptChunk, match="has 17 block hashes, more than 16"):
        verify(chunk)


def test_plain_payload_of_two_lengths_is_rejected() -> None:
    chunk = sealed()
    chunk[24] += 1
    chunk[404:412] = xxh3_64_digest(chunk[:404])
    with pytest.raises(CorruptChunk, match="has 5 bytes of payload, stored as 6"):
        verify(chunk)


# Tampering.


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_change_of_the_header_is_detected(flip: int) -> None:
    accepted = []
    for position in range(HEADER_BYTES):
        chunk = sealed()
        chunk[position] ^= flip
        for check in (ChunkHeader.parse, verify):
            with suppress(CorruptChunk):
                check(memoryview(chunk))
                accepted.append(position)
    assert not accepted


@given(st.binary(min_size=1, max_size=9000), st.data())
def test_any_change_of_the_payload_is_detected(payload: bytes, data: st.DataObject) -> None:
    chunk = sealed(payload)
    position = data.draw(st.integers(0, len(payload) - 1))
    chunk[HEADER_BYTES + position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptChunk, match="payload that does not match"):
        verify(chunk)


def test_header_is_checked_without_a_checksum() -> None:
    chunk = sealed(checksum=False)
    chunk[HEADER_BYTES] ^= 1
    assert verify(chunk).payload_bytes == len(PAYLOAD)
    chunk[32] ^= 1
    with pytest.raises(CorruptChunk):
        verify(chunk)


def test_chunk_of_another_key_is_rejected() -> None:
    with pytest.raises(CorruptChunk, match=f"holds chunk {KEY.hex()[:16]}, not {OTHER.hex()[:16]}"):
        verify(sealed(), OTHER)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_less_than_a_header_is_rejected(length: int) -> None:
    with pytest.raises(CorruptChunk, match="shorter than a header"):
        ChunkHeader.parse(bytes(sealed()[:length]))


@pytest.mark.parametrize("length", [HEADER_BYTES, OBJECT_ALIGNMENT, 3 * OBJECT_ALIGNMENT])
def test_object_of_wrong_length_is_rejected(length: int) -> None:
    chunk = sealed(bytes(5000)).ljust(length, b"\0")[:length]
    with pytest.raises(CorruptChunk, match=f"is {length} bytes for a payload of 5000"):
        verify(chunk)


@given(st.binary(min_size=HEADER_BYTES, max_size=2 * HEADER_BYTES))
def test_noise_is_rejected(found: bytes) -> None:
    with pytest.raises(CorruptChunk):
        ChunkHeader.parse(found)
    with pytest.raises(CorruptChunk):
        ChunkHeader.parse(MAGIC + found)


def test_mix_of_two_chunks_is_rejected() -> None:
    one, other = sealed(b"a" * 8000), sealed(b"b" * 8000)
    with pytest.raises(CorruptChunk, match="payload that does not match"):
        verify(one[:OBJECT_ALIGNMENT] + other[OBJECT_ALIGNMENT:])


def test_unwritten_memory_is_rejected() -> None:
    with pytest.raises(CorruptChunk, match="magic"):
        verify(bytes(OBJECT_ALIGNMENT))


# Encoded payloads.


def encoded(payload: bytes = PAYLOAD, stored: bytes = b"olleh", *, checksum: bool = True) -> bytearray:
    chunk = bytearray(object_bytes(len(stored)))
    chunk[HEADER_BYTES : HEADER_BYTES + len(stored)] = stored
    header = ChunkHeader(KEY, PARENT, SPACE, len(payload))
    StoredHeader.seal(memoryview(chunk), header, 7, len(stored), checksum=checksum)
    return chunk


@pytest.mark.parametrize("checksum", [True, False])
def test_encoded_chunk_verifies(checksum: bool) -> None:
    payload, stored = bytes(20_000), b"x" * 5000
    chunk = memoryview(encoded(payload, stored, checksum=checksum))
    found = StoredHeader.verify(chunk, KEY)
    assert found == StoredHeader.parse(bytes(chunk[:HEADER_BYTES]))
    assert (found.chunk, found.codec) == (ChunkHeader(KEY, PARENT, SPACE, 20_000), 7)
    assert (found.stored_bytes, found.object_bytes) == (5000, object_bytes(5000))
    assert (found.checksum is None) is not checksum


def test_encoded_chunk_is_never_taken_for_a_plain_one() -> None:
    chunk = memoryview(encoded())
    for check in (ChunkHeader.parse, verify):
        with pytest.raises(CorruptChunk, match="is encoded by codec 7"):
            check(chunk)


def test_plain_chunk_has_the_identity_code() -> None:
    found = StoredHeader.verify(memoryview(sealed()), KEY)
    assert (found.codec, found.stored_bytes) == (IDENTITY, len(PAYLOAD))


def test_any_change_of_an_encoded_header_is_detected() -> None:
    accepted = []
    for position in range(HEADER_BYTES):
        chunk = encoded()
        chunk[position] ^= 0x01
        with suppress(CorruptChunk):
            StoredHeader.parse(memoryview(chunk))
            accepted.append(position)
    assert not accepted


def test_any_change_of_an_encoded_payload_is_detected() -> None:
    chunk = encoded()
    chunk[HEADER_BYTES + 4] ^= 1
    with pytest.raises(CorruptChunk, match="payload that does not match"):
        StoredHeader.verify(memoryview(chunk), KEY)
    with pytest.raises(CorruptChunk, match="is 8192 bytes for a payload of 5"):
        StoredHeader.verify(memoryview(encoded().ljust(8192, b"\0")), KEY)
