"""Access to one model's chunks by token IDs, for programs other than vLLM."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias, runtime_checkable

import msgspec
from anyio import to_thread

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.catalog.tenants import tenant_of_salt
from kvtier.errors import CorruptChunk, KVTierError, LayoutError
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
from kvtier.pipeline.query import Expected, Query

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier.cache import TieredCache


@runtime_checkable
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


@runtime_checkable
class HostArray(Protocol):
    """An array of numpy. Before Python 3.12, type checkers do not know that it is a buffer."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Rows: TypeAlias = "Buffer | HostArray | HostTensor"
"""KV of consecutive tokens: a C-contiguous buffer, such as an array of numpy, or a CPU tensor.

Of elements of any type. Tokens are the first dimension.
"""


class ModelCache:
    """View of a :class:`~kvtier.cache.TieredCache` for one model and one tenant.

    The KV of a token is ``token_bytes`` opaque bytes. The end of a prompt is a shorter chunk, unless
    ``partial_chunks`` is off. Prefixes are found in steps of :attr:`ChunkLayout.granularity` tokens.
    Raises :class:`LayoutError` unless ``token_bytes`` is a positive integer. All methods raise
    :class:`KVTierError` once the cache is closed, and for token IDs that are not integers from 0 to
    2**32 - 1.
    """

    def __init__(self, cache: TieredCache, name: str, *, token_bytes: int, salt: str = "") -> None:
        # SupportsIndex: an integer of numpy, but no float.
        if not isinstance(token_bytes, SupportsIndex) or token_bytes < 1:  # type: ignore[redundant-expr]
            raise LayoutError(
                f"token_bytes is {token_bytes!r}: set it to the bytes of KV per token, of all layers together"
            )
        settings = cache.settings
        self._cache = cache
        chunk_tokens = CHUNK_TOKENS if settings.chunk_tokens == "auto" else settings.chunk_tokens
        self._layout = ChunkLayout(chunk_tokens, (GroupLayout(1, (int(token_bytes),)),), platform="rows")
        self._namespace = namespace(name, self._layout)
        cache.layouts.add(self._namespace, self._layout)
        self._root = root_key(self._namespace, salt)
        self._tenant = tenant_of_salt(salt) if cache.settings.tenants else ""
        self._token_bytes = token_bytes
        self._partial = settings.partial_chunks
        self._hashes_bytes = chunk_tokens // self._layout.granularity * BLOCK_HASH_BYTES
        """Of the block hashes of a whole chunk."""

    @property
    def namespace(self) -> bytes:
        """What identifies the model and its layout in keys."""
        return self._namespace

    @property
    def layout(self) -> ChunkLayout:
        """How the KV of its chunks is laid out."""
        return self._layout

    def keys(self, tokens: Sequence[int] | bytes) -> list[ChunkKey]:
        """Return the keys of a prompt's chunks in prefix order."""
        return chunk_keys(self._root, self._encode(tokens), self._layout.chunk_tokens, tail=self._partial)

    async def store(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """Store the KV of a prompt. Return the number of tokens held afterwards, including those held before.

        Copies in a worker thread. Skips chunks for which there is no memory. ``hints`` are for the eviction
        policies of the tiers. Raises :class:`LayoutError` if ``rows`` is not as :data:`Rows` describes, or is
        smaller than the KV of all ``tokens``.
        """
        encoded, view = self._encode(tokens), self._view(rows, len(tokens))
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
        return self._tokens(len(self._cache.catalog.prefix(keys)), len(tokens))

    async def retrieve(self, tokens: Sequence[int], rows: Rows, hints: ChunkHints | None = None) -> int:
        """Fill ``rows`` with the KV of the longest held prefix. Return its length in tokens.

        ``hints`` replace those of the chunks that are found. Raises :class:`LayoutError` as :meth:`store`
        does, also if less is held than ``rows`` has room for, and if it is read-only.
        """
        encoded, view = self._encode(tokens), self._view(rows, len(tokens))
        if view.readonly:
            raise LayoutError("the memory for the KV is read-only: pass memory that can be written to")
        keys, hashes = self.keys(encoded), self._hashes(encoded)
        block_tags = PromptTags(self._root, block_tags_of(hashes), self._hashes_bytes // BLOCK_HASH_BYTES)
        query = Query(keys, len(tokens), hints=self._owned(hints), block_tags=block_tags)
        found = self._cache.look_up(query, self._expected(len(tokens)))
        try:
            await self._cache.settle(found)
            copies, filled = [], 0
            for index, chunk in enumerate(found.chunks):
                stop = self._tokens(index + 1, len(tokens))
                if found.partial and index == found.count - 1:
                    stop = filled + self._equal(chunk.lease.view, hashes[index * self._hashes_bytes :])
                target = view[filled * self._token_bytes : stop * self._token_bytes]
                copies.append((target, chunk.lease.view[HEADER_BYTES : HEADER_BYTES + len(target)]))
                filled = stop
            await to_thread.run_sync(_copy_all, copies)
            return filled
        finally:
            found.release()

    def _encode(self, tokens: Sequence[int] | bytes) -> bytes:
        """Encode token IDs. Every method that takes some calls this first, so it checks whether it may."""
        self._cache._check_open()
        try:
            return encode_tokens(tokens)
        except (OverflowError, TypeError, ValueError) as error:
            raise KVTierError(f"token IDs must be integers from 0 to 4294967295: {error}") from error

    def _view(self, rows: Rows, tokens: int) -> memoryview:
        """Return the bytes of ``rows``, which must have room for the KV of ``tokens``."""
        view = _bytes_of(rows)
        if len(view) < tokens * self._token_bytes:
            raise LayoutError(
                f"{tokens} tokens with {self._token_bytes} bytes of KV each do not fit {len(view)} bytes: "
                "pass fewer tokens or a larger buffer"
            )
        return view

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
        return self._tokens(len(self._cache.catalog.prefix(self.keys(tokens))), len(tokens))

    async def prefetch(self, tokens: Sequence[int]) -> int:
        """Prefetch a prompt's chunks. Return the number of leading tokens in memory afterwards."""
        query = Query(self.keys(tokens), len(tokens))
        ready = await self._cache.prefetch(query, self._expected(len(tokens)))
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
        return Expected(self._namespace, lengths)

    def _slice(self, view: memoryview, index: int, tokens: int) -> memoryview:
        start = index * self._layout.chunk_tokens
        stop = min(start + self._layout.chunk_tokens, tokens)
        return view[start * self._token_bytes : stop * self._token_bytes]

    def _tokens(self, chunks: int, tokens: int) -> int:
        return min(chunks * self._layout.chunk_tokens, tokens)


def _bytes_of(rows: Rows) -> memoryview:
    if isinstance(rows, HostTensor):
        if not rows.is_contiguous():
            raise LayoutError("the KV tensor is not contiguous: pass tensor.contiguous()")
        if str(getattr(rows, "device", "cpu")) != "cpu":
            raise LayoutError("the KV tensor is not in host memory: pass tensor.cpu()")
        return _memory(rows.data_ptr(), rows.nbytes)
    if isinstance(rows, HostArray):
        return _bytes_of_array(rows)
    try:
        view = memoryview(rows)
    except TypeError as error:
        raise LayoutError(f"a {type(rows).__name__} is no KV: pass a buffer, an array or a tensor") from error
    if not view.c_contiguous:
        raise LayoutError("the KV buffer is not contiguous: pass a copy, such as bytes(buffer)")
    try:
        return view.cast("B")
    except TypeError:  # Elements that it cannot cast, such as those of ctypes.
        if view.readonly:
            return memoryview(view.tobytes())
        return memoryview((ctypes.c_char * view.nbytes).from_buffer(view)).cast("B")


def _bytes_of_array(array: Any) -> memoryview:  # noqa: ANN401 - numpy need not be installed
    """Return the bytes of an array of numpy, which exports no buffer of some types, such as bfloat16."""
    if array.dtype.hasobject:
        raise LayoutError("the KV array has Python objects as elements: pass an array of numbers")
    if not array.flags.c_contiguous:
        raise LayoutError("the KV array is not contiguous: pass numpy.ascontiguousarray(array)")
    view = _memory(array.ctypes.data, array.nbytes)
    return view if array.flags.writeable else view.toreadonly()


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _copy_all(copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    for target, source in copies:
        target[: len(source)] = source
