"""Access to one model's chunks by token IDs, for programs other than vLLM."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from anyio import to_thread

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.siblings import PromptMarks, marks_of
from kvtier.catalog.tenants import tenant_of_salt
from kvtier.errors import CorruptChunk, LayoutError
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import (
    BLOCK_HASH_BYTES,
    ChunkKey,
    block_hashes,
    chunk_keys,
    encode_tokens,
    equal_blocks,
    root_key,
)
from kvtier.memory.layout import CHUNK_TOKENS, ChunkLayout, GroupLayout, namespace
from kvtier.pipeline.discover import Expected

if TYPE_CHECKING:
    from kvtier.cache import TieredCache


class HostTensor(Protocol):
    """The part of the tensor interface needed to access its bytes without importing torch."""

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous in C order."""
        ...


Rows = bytes | bytearray | memoryview | HostTensor
"""KV of consecutive tokens: a C-contiguous buffer or CPU tensor, tokens in the first dimension."""


class ModelCache:
    """View of a :class:`~kvtier.cache.TieredCache` for one model and one tenant.

    The KV of a token is ``token_bytes`` opaque bytes. The end of a prompt is a shorter chunk, unless
    ``partial_chunks`` is off. Prefixes are found in steps of :attr:`ChunkLayout.granularity` tokens.
    """

    def __init__(self, cache: TieredCache, name: str, *, token_bytes: int, salt: str = "") -> None:
        settings = cache.settings
        self._cache = cache
        chunk_tokens = CHUNK_TOKENS if settings.chunk_tokens == "auto" else settings.chunk_tokens
        self._layout = ChunkLayout(chunk_tokens, (GroupLayout(1, (token_bytes,)),), platform="rows")
        self._namespace = namespace(name, self._layout)
        cache.hierarchy.layouts.add(self._namespace, self._layout)
        self._root = root_key(self._namespace, salt)
        self._tenant = tenant_of_salt(salt) if cache.settings.tenants else ""
        self._token_bytes = token_bytes
        self._partial = settings.partial_chunks
        self._hashes_bytes = chunk_tokens // self._layout.granularity * BLOCK_HASH_BYTES
        """Of the block hashes of a whole chunk."""

    def keys(self, tokens: Sequence[int] | bytes) -> list[ChunkKey]:
        """Return the keys of a prompt's chunks in prefix order."""
        return chunk_keys(self._root, tokens, self._layout.chunk_tokens, tail=self._partial)

    async def store(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """Store the KV of a prompt. Return the number of tokens held afterwards, including those held before.

        Copies in a worker thread. Skips chunks for which there is no memory. ``hints`` are for the eviction
        policies of the tiers.
        """
        view = _bytes_of(rows)
        if len(view) < len(tokens) * self._token_bytes:
            raise LayoutError(
                f"{len(tokens)} tokens with {self._token_bytes} bytes of KV each do not fit {len(view)} bytes"
            )
        encoded = encode_tokens(tokens)
        keys, hashes = self.keys(encoded), self._hashes(encoded)
        parents = [self._root, *keys]
        headers, sources = [], []
        for index, key in enumerate(keys):
            source = self._slice(view, index, len(tokens))
            blocks = hashes[index * self._hashes_bytes : (index + 1) * self._hashes_bytes]
            length = len(source) // self._token_bytes
            headers.append(ChunkHeader(key, parents[index], self._namespace, len(source), blocks, length))
            sources.append(source)
        reservations, copies = [], []
        room = self._cache.reserve_all(headers, [self._owned(hints)] * len(headers))
        for reservation, source in zip(room, sources, strict=True):
            if reservation is not None:
                reservations.append(reservation)
                copies.append((reservation.lease.view[HEADER_BYTES:], source))
        try:
            await to_thread.run_sync(_copy_all, copies)
        except BaseException:
            self._cache.abandon(reservations)
            raise
        self._cache.commit(reservations)
        for header in [reservation.header for reservation in reservations]:
            self._cache.supersede_tails(header.key, whole=len(header.block_hashes) == self._hashes_bytes)
        return self._tokens(len(self._cache.hierarchy.catalog.prefix(keys)), len(tokens))

    async def retrieve(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """Fill ``rows`` with the KV of the longest held prefix. Return its length in tokens.

        ``hints`` replace those of the chunks that are found.
        """
        view, encoded = _bytes_of(rows), encode_tokens(tokens)
        keys, hashes = self.keys(encoded), self._hashes(encoded)
        marks = PromptMarks(self._root, marks_of(hashes), self._hashes_bytes // BLOCK_HASH_BYTES)
        found = self._cache.look_up(keys, self._expected(len(tokens)), hints=self._owned(hints), marks=marks)
        try:
            await self._cache.settle(found)
            fits = min(len(tokens), len(view) // self._token_bytes)
            copies, filled = [], 0
            for index, chunk in enumerate(found.chunks):
                stop = self._tokens(index + 1, len(tokens))
                if found.partial and index == found.count - 1:
                    stop = filled + self._equal(chunk.lease.view, hashes[index * self._hashes_bytes :])
                if stop > fits:
                    break
                target = view[filled * self._token_bytes : stop * self._token_bytes]
                copies.append((target, chunk.lease.view[HEADER_BYTES : HEADER_BYTES + len(target)]))
                filled = stop
            await to_thread.run_sync(_copy_all, copies)
            return filled
        finally:
            found.release()

    def _owned(self, hints: ChunkHints | None) -> ChunkHints | None:
        """Return hints with the tenant whom the salt names, if they name none."""
        if not self._tenant or (hints is not None and hints.tenant):
            return hints
        return msgspec.structs.replace(hints or ChunkHints(), tenant=self._tenant)

    def _hashes(self, tokens: bytes) -> bytes:
        return block_hashes(tokens, self._layout.granularity)

    def _equal(self, chunk: memoryview, hashes: bytes) -> int:
        """Return how many leading tokens of a chunk have these block hashes."""
        try:
            stored = ChunkHeader.parse(chunk).block_hashes
        except CorruptChunk:
            return 0
        return equal_blocks(stored, hashes) * self._layout.granularity

    def held_tokens(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens in the catalog. Moves no data and queries no pool."""
        return self._tokens(len(self._cache.hierarchy.catalog.prefix(self.keys(tokens))), len(tokens))

    async def prefetch(self, tokens: Sequence[int]) -> int:
        """Prefetch a prompt's chunks. Return the number of leading tokens in memory afterwards."""
        ready = await self._cache.prefetch(self.keys(tokens), self._expected(len(tokens)))
        return self._tokens(ready, len(tokens))

    async def move(self, tokens: Sequence[int], source: str, target: str, *, copy: bool = False) -> int:
        """Move a prompt's chunks between tiers. Return the number of tokens in ``target`` afterwards."""
        return self._tokens(await self._cache.move(self.keys(tokens), source, target, copy=copy), len(tokens))

    def pin(self, tokens: Sequence[int], seconds: float | None = None) -> int:
        """Protect a prompt's chunks from eviction. Return the number of leading tokens pinned."""
        return self._tokens(self._cache.pin(self.keys(tokens), seconds), len(tokens))

    def unpin(self, tokens: Sequence[int]) -> None:
        """Undo :meth:`pin`."""
        self._cache.unpin(self.keys(tokens))

    async def clear(self, tokens: Sequence[int] | None = None) -> int:
        """Remove a prompt's chunks, or all chunks of this model. Return the number of chunks removed."""
        if tokens is None:
            return (await self._cache.clear(namespace=self._namespace)).chunks
        return (await self._cache.clear(self.keys(tokens))).chunks

    def _expected(self, tokens: int) -> Expected:
        whole = self._layout.chunk_tokens
        chunks = [min(whole, tokens - start) for start in range(0, tokens, whole)]
        lengths = [object_bytes(chunk * self._token_bytes) for chunk in chunks]
        return Expected(self._namespace, lengths, tokens=tokens)

    def _slice(self, view: memoryview, index: int, tokens: int) -> memoryview:
        start = index * self._layout.chunk_tokens
        stop = min(start + self._layout.chunk_tokens, tokens)
        return view[start * self._token_bytes : stop * self._token_bytes]

    def _tokens(self, chunks: int, tokens: int) -> int:
        return min(chunks * self._layout.chunk_tokens, tokens)


def _bytes_of(rows: Rows) -> memoryview:
    if isinstance(rows, bytes | bytearray | memoryview):
        return memoryview(rows).cast("B")
    if not rows.is_contiguous():
        raise LayoutError("the KV tensor is not contiguous: pass tensor.contiguous()")
    if str(getattr(rows, "device", "cpu")) != "cpu":
        raise LayoutError("the KV tensor is not in host memory: pass tensor.cpu()")
    return memoryview((ctypes.c_char * rows.nbytes).from_address(rows.data_ptr())).cast("B")


def _copy_all(copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    for target, source in copies:
        target[: len(source)] = source
