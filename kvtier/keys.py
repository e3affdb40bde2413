"""Chunk keys: the same for the same tokens on every host, in every process, in every run.

A key is BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs) over the parent's key, the number of
tokens, the token ids as little-endian u32, and whatever else the KV depends on (LoRA, images). The
chain starts from a root made of the namespace and the tenant's salt, so equal keys mean an equal
whole prefix in one namespace of one tenant. No hash is ever cut short.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import NewType

import msgspec
from blake3 import blake3

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


def encode_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def chunk_key(parent: ChunkKey, tokens: bytes, extra: bytes = b"") -> ChunkKey:
    """The key of one chunk from its parent's key and its encoded tokens."""
    count = (len(tokens) // TOKEN_BYTES).to_bytes(4, "little")
    return ChunkKey(blake3(parent + count + tokens + extra).digest())


def chunk_keys(
    root: ChunkKey,
    tokens: Sequence[int],
    chunk_tokens: int,
    *,
    extra: ExtraKeys | None = None,
    tail: bool = False,
) -> list[ChunkKey]:
    """The keys of a prompt's chunks, in prefix order.

    With ``tail``, a last chunk shorter than ``chunk_tokens`` gets a key too.
    """
    encoded = encode_tokens(tokens)
    full = len(tokens) // chunk_tokens
    count = full + 1 if tail and len(tokens) % chunk_tokens else full
    stride = chunk_tokens * TOKEN_BYTES
    keys: list[ChunkKey] = []
    parent = root
    for index in range(count):
        start = index * chunk_tokens
        more = extra(start, min(start + chunk_tokens, len(tokens))) if extra else b""
        parent = chunk_key(parent, encoded[index * stride : (index + 1) * stride], more)
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
