"""Chunk keys, deterministic across hosts, processes and runs.

A key is the BLAKE3 hash (https://github.com/BLAKE3-team/BLAKE3-specs) of the parent's key, the BLAKE3 hash of
the token IDs as little-endian u32, and other inputs of the KV (LoRA, images). The chain starts at a root
derived from namespace and tenant salt, so equal keys imply an equal prefix in one namespace of one tenant.
Hashes are never truncated. Tokens are hashed separately because this can run in parallel for all chunks;
the sequential part of the chain is then one block per chunk.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import NewType, cast

import msgspec
from blake3 import blake3

from kvtier import native
from kvtier.errors import ProtocolError

ChunkKey = NewType("ChunkKey", bytes)
"""The 32-byte key of a chunk."""

KEY_BYTES = 32
TOKEN_BYTES = 4
BLOCK_HASH_BYTES = 16
"""Too long to find two blocks with the same hash, which would be taken for each other."""
MAX_BLOCK_HASHES = 16
"""Per chunk."""
BEGINNING_TOKENS = 256
"""As many as a chunk usually has."""

_KEY = struct.Struct(f"{KEY_BYTES}s")

ExtraKeys = Callable[[int, int], bytes]
"""Returns the encoded inputs, other than tokens, that the KV of tokens ``[start, stop)`` depends on."""


def root_key(namespace: bytes, salt: str = "", adapter: bytes = b"") -> ChunkKey:
    """Return the parent key of the first chunk of every prompt in a namespace of a tenant.

    ``adapter`` identifies what all KV of a prompt depends on besides its tokens, such as a LoRA adapter.
    """
    root = ChunkKey(blake3(namespace + salt.encode(), derive_key_context="kvtier root v1").digest())
    if not adapter:
        return root
    return ChunkKey(blake3(root + adapter, derive_key_context="kvtier adapter v1").digest())


def encode_extra(parts: Sequence[object]) -> bytes:
    """Encode the inputs, other than tokens, that a chunk's KV depends on. No inputs encode as ``b""``."""
    return msgspec.msgpack.encode(parts) if parts else b""


def encode_tokens(tokens: Sequence[int] | bytes, start: int = 0, stop: int | None = None) -> bytes:
    """Encode the token IDs in ``[start, stop)`` as little-endian u32. ``bytes`` already are.

    Takes 1 µs per 1000 tokens of a list (20 µs without the native core), and creates no slice of it: encode
    tokens once to hash them several times. Raises ``OverflowError`` if a token does not fit a u32,
    ``TypeError`` if it is not an integer, and ``ValueError`` if ``bytes`` are not a multiple of 4 long.
    """
    total = _count_tokens(tokens)
    stop = total if stop is None else min(stop, total)
    if isinstance(tokens, bytes):
        return tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES]
    if native.available():
        return native.core.encode_tokens(tokens, start, stop)
    words = array("I", tokens[start:stop])
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def chunk_key(parent: ChunkKey, tokens: bytes, extra: bytes = b"") -> ChunkKey:
    """Return the key of one chunk from its parent's key and its encoded tokens."""
    return ChunkKey(blake3(parent + blake3(tokens).digest() + extra).digest())


def state_key(chunk: ChunkKey) -> ChunkKey:
    """Return the key of the state at the end of a chunk."""
    return ChunkKey(blake3(chunk, derive_key_context="kvtier state v1").digest())


def chunk_keys(
    root: ChunkKey,
    tokens: Sequence[int] | bytes,
    chunk_tokens: int,
    *,
    extra: ExtraKeys | None = None,
    tail: bool = False,
) -> list[ChunkKey]:
    """Return the keys of a prompt's chunks, in prefix order.

    ``root`` is the parent of the first chunk. ``tokens`` is a list, an array (also of numpy) or encoded
    ``bytes``. With ``tail``, a last chunk shorter than ``chunk_tokens`` gets a key as well. Blocks for about
    3 µs per 1000 tokens (14 µs without the native core). Raises the errors of :func:`encode_tokens`.
    """
    total = _count_tokens(tokens)
    count = -(-total // chunk_tokens) if tail else total // chunk_tokens
    starts = range(0, count * chunk_tokens, chunk_tokens)
    extras = [extra(start, min(start + chunk_tokens, total)) for start in starts] if extra else []
    if native.available():
        keys = native.core.chunk_keys(root, tokens, chunk_tokens, tail, extras)
        return cast("list[ChunkKey]", keys)
    return _chain(root, encode_tokens(tokens), chunk_tokens * TOKEN_BYTES, extras or [b""] * count)


def block_hashes(tokens: Sequence[int] | bytes, block_tokens: int) -> bytes:
    """Return the joined hashes of all whole blocks of ``block_tokens`` tokens.

    The hash of a block is the beginning of the BLAKE3 hash of its encoded tokens. It does not depend on what
    is before the block: a chunk and a prompt that follow the same key share as many tokens as they have equal
    leading block hashes. Raises the errors of :func:`encode_tokens`.
    """
    if native.available():
        return native.core.block_hashes(tokens, block_tokens, BLOCK_HASH_BYTES)
    encoded, stride = encode_tokens(tokens), block_tokens * TOKEN_BYTES
    starts = range(0, len(encoded) - stride + 1, stride)
    return b"".join(blake3(encoded[at : at + stride]).digest(BLOCK_HASH_BYTES) for at in starts)


def beginning_of(tokens: Sequence[int] | bytes, block_tokens: int) -> bytes:
    """Return the hashes of the first block, and of the first and second :data:`BEGINNING_TOKENS` tokens.

    Joined, without those of more tokens than there are. The latter two do not depend on a layout, so prompts
    of engines with other blocks or chunks can be compared. Takes some microseconds. Raises the errors of
    :func:`encode_tokens`.
    """
    block = block_hashes(encode_tokens(tokens, 0, block_tokens), block_tokens)
    return block + block_hashes(encode_tokens(tokens, 0, 2 * BEGINNING_TOKENS), BEGINNING_TOKENS)


def extend_block_hash(block_hash: bytes, extra: bytes) -> bytes:
    """Return the hash of a block whose KV also depends on other inputs than tokens."""
    return blake3(block_hash + extra).digest(BLOCK_HASH_BYTES)


def equal_blocks(hashes: bytes, others: bytes) -> int:
    """Return how many leading blocks are equal, given joined block hashes."""
    for at in range(0, min(len(hashes), len(others)), BLOCK_HASH_BYTES):
        if hashes[at : at + BLOCK_HASH_BYTES] != others[at : at + BLOCK_HASH_BYTES]:
            return at // BLOCK_HASH_BYTES
    return min(len(hashes), len(others)) // BLOCK_HASH_BYTES


def _count_tokens(tokens: Sequence[int] | bytes) -> int:
    if not isinstance(tokens, bytes):
        return len(tokens)
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are not a whole number of {TOKEN_BYTES}-byte token IDs")
    return len(tokens) // TOKEN_BYTES


def _chain(parent: ChunkKey, tokens: bytes, stride: int, extras: Sequence[bytes]) -> list[ChunkKey]:
    """Return one key for each of ``extras``, for chunks of ``stride`` bytes of encoded tokens."""
    keys: list[ChunkKey] = []
    for index, extra in enumerate(extras):
        parent = chunk_key(parent, tokens[index * stride : (index + 1) * stride], extra)
        keys.append(parent)
    return keys


def join_keys(keys: Sequence[ChunkKey]) -> bytes:
    """Concatenate keys, as they are sent over the wire."""
    return b"".join(keys)


def count_keys(joined: bytes) -> int:
    """Return how many keys are joined. Raises :class:`ProtocolError` if one is cut off."""
    if len(joined) % KEY_BYTES:
        raise ProtocolError(
            f"malformed keys: {len(joined)} bytes are not a whole number of {KEY_BYTES}-byte keys"
        )
    return len(joined) // KEY_BYTES


def split_keys(joined: bytes) -> list[ChunkKey]:
    """Split the keys of a message. Raises :class:`ProtocolError` if the length is no multiple of a key's."""
    count_keys(joined)
    if native.available():
        return cast("list[ChunkKey]", native.core.split_keys(joined))
    # Three times as fast as slicing: an instance reports millions of keys to its controller.
    return [key for (key,) in _KEY.iter_unpack(joined)]
