"""A trace in memory, to be replayed many times: 4 bytes for each chunk of each request.

Chunks have ids of 64 bits in a file, numbers in memory, and keys when they are replayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path

from blake3 import blake3

from kvtier import native
from kvtier.catalog.hints import ChunkHints
from kvtier.lab.simulation.formats import TraceError, read_trace
from kvtier.memory.keys import KEY_BYTES, TOKEN_BYTES, ChunkKey, split_keys
from kvtier.observability.recording.reader import TraceAnswerEnd, TraceEvent

TOKEN_SECONDS = 0.02
"""Of an answer whose duration is unknown."""
MAX_VACANT = 4
"""Numbers are ids as they are in the trace, if the highest is below this multiple of their count."""


@dataclass(slots=True)
class Trace:
    """Requests in the order of their time, as columns."""

    name: str
    chunks: array[int]
    """The chunks of all requests, numbered from 0 (u32)."""
    ends: array[int]
    """Where the chunks of each request end."""
    times: array[float]
    """In seconds since the trace began."""
    tokens: array[int]
    hints: dict[int, ChunkHints]
    """By request, where there are any."""
    answer_seconds: array[float]
    """From each request to the end of its answer; 0 if unknown."""
    signatures: dict[int, Sequence[int]]
    """How answers ended, by request, where it is known."""
    order: Sequence[int]
    """The requests in the order of their time."""
    chunk_tokens: int
    chunk_bytes: int
    """Size of a chunk object; 0 if the trace does not contain it."""
    unique: int
    """Distinct chunks."""
    numbers: int
    """All chunks have numbers below this one."""
    repeated: int
    """Chunks that occurred before in the same prompt. They are dropped: chained hashes do not repeat."""

    @classmethod
    def read(
        cls, path: Path, chunk_tokens: int, limit: int | None = None, seconds_per_token: float = TOKEN_SECONDS
    ) -> Trace:
        """Read the first ``limit`` requests of a file. For the rest, and for errors: :func:`read_trace`."""
        events, recorded = read_trace(path, chunk_tokens, seconds_per_token)
        return cls.load(str(path), events, None if recorded else chunk_tokens, limit)

    @classmethod
    def load(
        cls, name: str, events: Iterable[TraceEvent], chunk_tokens: int | None, limit: int | None = None
    ) -> Trace:
        """Take all requests, or the first ``limit`` and the ends of answers among them.

        Raises :class:`TraceError` without any, and what ``events`` raises.
        ``name``: the path of the file, of which the trace keeps the last part, or another name.
        ``chunk_tokens``: if ``None``, the least with which every prompt fits into its chunks. This is exact,
        unless all prompts are short.
        """
        ids, ends, times, tokens = array("Q"), array("Q"), array("d"), array("Q")
        hints: dict[int, ChunkHints] = {}
        answer_seconds = array("d")
        signatures: dict[int, Sequence[int]] = {}
        latest: dict[int, int] = {}  # The request by its last chunk.
        chunk_bytes = 0
        for event in events:
            if isinstance(event, TraceAnswerEnd):
                # Without its request, that was in a file that is deleted.
                if (request := latest.get(event.chunk)) is not None:
                    answer_seconds[request] = max(0.0, event.time - times[request])
                    signatures[request] = event.signature
                continue
            request = len(ends)
            if event.hints is not None:
                hints[request] = event.hints
            elif event.tenant:
                hints[request] = ChunkHints(tenant=event.tenant)
            if event.signature:
                signatures[request] = event.signature
            if event.chunks:
                latest[event.chunks[-1]] = request
            ids.extend(event.chunks)
            ends.append(len(ids))
            times.append(event.time)
            tokens.append(event.tokens)
            answer_seconds.append(event.seconds)
            chunk_bytes = max(chunk_bytes, event.chunk_bytes)
            if len(ends) == limit:
                break
        if not ids:
            raise TraceError(f"{name}: has no requests")
        chunks, numbers, unique = number_chunks(ids, ends)
        monotonic = all(earlier <= later for earlier, later in pairwise(times))
        order = range(len(ends)) if monotonic else array("I", sorted(range(len(ends)), key=times.__getitem__))
        return cls(
            name=Path(name).name,
            chunks=chunks,
            ends=ends,
            times=times,
            tokens=tokens,
            hints=hints,
            answer_seconds=answer_seconds,
            signatures=signatures,
            order=order,
            chunk_tokens=chunk_tokens or _chunk_tokens(ends, tokens),
            chunk_bytes=chunk_bytes,
            unique=unique,
            numbers=numbers,
            repeated=len(ids) - len(chunks),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def without_ends(self) -> Trace:
        """Return the same requests, without the ends of their answers."""
        return replace(self, answer_seconds=array("d", bytes(8 * len(self))), signatures={})

    def span(self, request: int) -> tuple[int, int]:
        """Return where the chunks of a request start and end."""
        return self.ends[request - 1] if request else 0, self.ends[request]


def _chunk_tokens(ends: array[int], tokens: array[int]) -> int:
    """Return the least tokens of a chunk with which every prompt fits into its chunks."""
    prompts = zip(chain((0,), ends), ends, tokens, strict=False)
    return max(1, max(-(-count // max(1, stop - start)) for start, stop, count in prompts))


def number_chunks(ids: array[int], ends: array[int]) -> tuple[array[int], int, int]:
    """Return the chunks of all requests as u32, a number that all of them are below, and how many differ.

    Chunks that a request had before are dropped. ``ends``: where the chunks of each request end, which is
    corrected. Takes 5 ns per chunk (0.2 µs without the native core), and 4 bytes for each number meanwhile.
    """
    if not native.available():
        return _numbered(ids, ends)
    chunks = array("I", [0]) * len(ids)
    kept, numbers, unique = native.core.number_chunks(ids, ends, MAX_VACANT, chunks)
    del chunks[kept:]
    return chunks, numbers, unique


def _numbered(ids: array[int], ends: array[int]) -> tuple[array[int], int, int]:
    kept, start = array("Q"), 0
    for request, stop in enumerate(ends):
        kept.extend(dict.fromkeys(ids[start:stop]))
        ends[request], start = len(kept), stop
    count = max(kept) + 1
    if count <= MAX_VACANT * len(kept) and count < 1 << 32:
        return array("I", kept), count, len(set(kept))
    numbers: dict[int, int] = {}
    numbered = array("I", [numbers.setdefault(chunk, len(numbers)) for chunk in kept])
    return numbered, len(numbers), len(numbers)


def chunk_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return the key of each u32 number: its BLAKE3 hash.

    Policies take parts of keys as hashes, and sample by them: the numbers themselves would mislead these.
    """
    if native.available():
        return split_keys(native.core.block_hashes(numbers, 1, KEY_BYTES))
    encoded = array("I", numbers).tobytes()
    starts = range(0, len(encoded), TOKEN_BYTES)
    return [ChunkKey(blake3(encoded[at : at + TOKEN_BYTES]).digest()) for at in starts]
