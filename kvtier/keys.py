"""Chunk keys: the same for the same tokens on every host, in every process, in every run.

A key is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) over the parent's key, the BLAKE3 of the
token ids as little-endian u32, and whatever else the KV depends on (LoRA, images). The chain starts
from a root made of the namespace and the tenant's salt, so equal keys mean an equal whole prefix in
one namespace of one tenant. No hash is ever cut short. Tokens are hashed by themselves first since
those of all chunks can be side by side: what waits for the chunk before is then one block.
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

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name one chunk."""

KEY_BYTES = 32
TOKEN_BYTES = 4

_KEY = struct.Struct(f"{KEY_BYTES}s")

ExtraKeys = Callable[[int, int], bytes]
"""Given a chunk's token range ``[start, stop)``: what besides its tokens its KV depends on, encoded."""


def root_key(namespace: bytes, salt: str = "") -> ChunkKey:
    """The parent of every first chunk of one namespace and one tenant."""
    return ChunkKey(blake3(namespace + salt.encode(), derive_key_context="kvtier root v1").digest())


def encode_extra(parts: Sequence[object]) -> bytes:
    """Encode what a chunk's KV depends on besides tokens; nothing encodes to nothing."""
    return msgspec.msgpack.encode(parts) if parts else b""


def encode_tokens(tokens: Sequence[int] | bytes) -> bytes:
    """Token ids as little-endian u32; ``bytes`` are that already.

    Raises ``OverflowError`` for what is no u32, ``TypeError`` for what is no integer and ``ValueError`` for
    half a word.
    """
    if isinstance(tokens, bytes):
        _count_tokens(tokens)
        return tokens
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def chunk_key(parent: ChunkKey, tokens: bytes, extra: bytes = b"") -> ChunkKey:
    """The key of one chunk from its parent's key and its encoded tokens."""
    return ChunkKey(blake3(parent + blake3(tokens).digest() + extra).digest())


def chunk_keys(
    root: ChunkKey,
    tokens: Sequence[int] | bytes,
    chunk_tokens: int,
    *,
    extra: ExtraKeys | None = None,
    tail: bool = False,
) -> list[ChunkKey]:
    """The keys of a prompt's chunks, in prefix order.

    ``root`` is the key before the first. ``tokens`` are a list, an array (of numpy's, too) or, encoded
    already, ``bytes``. With ``tail``, a last chunk shorter than ``chunk_tokens`` gets a key too. Blocks for
    some 3 µs a thousand tokens, 14 without the native core. Raises what :func:`encode_tokens` does.
    """
    total = _count_tokens(tokens)
    count = -(-total // chunk_tokens) if tail else total // chunk_tokens
    starts = range(0, count * chunk_tokens, chunk_tokens)
    extras = [extra(start, min(start + chunk_tokens, total)) for start in starts] if extra else []
    if native.available():
        keys = native.core.chunk_keys(root, tokens, chunk_tokens, tail, extras)
        return cast("list[ChunkKey]", keys)
    return _chain(root, encode_tokens(tokens), chunk_tokens * TOKEN_BYTES, extras or [b""] * count)


def _count_tokens(tokens: Sequence[int] | bytes) -> int:
    if not isinstance(tokens, bytes):
        return len(tokens)
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are not a whole number of {TOKEN_BYTES}-byte token ids")
    return len(tokens) // TOKEN_BYTES


def _chain(parent: ChunkKey, tokens: bytes, stride: int, extras: Sequence[bytes]) -> list[ChunkKey]:
    """The keys of as many chunks of ``stride`` bytes of encoded tokens as there are ``extras``."""
    keys: list[ChunkKey] = []
    for index, extra in enumerate(extras):
        parent = chunk_key(parent, tokens[index * stride : (index + 1) * stride], extra)
        keys.append(parent)
    return keys


def join_keys(keys: Sequence[ChunkKey]) -> bytes:
    """Keys as one run of bytes, as they travel."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[ChunkKey]:
    """The inverse of :func:`join_keys`. Raises ``ValueError`` for a length that is no multiple of a key."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes are not a whole number of {KEY_BYTES}-byte keys")
    # A third of what slicing takes: an instance tells its controller of millions.
    return [key for (key,) in _KEY.iter_unpack(joined)]
