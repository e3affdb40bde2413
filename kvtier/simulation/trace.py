"""A trace in memory, to be replayed many times: 4 bytes for each chunk of each request."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from kvtier.catalog.hints import ChunkHints
from kvtier.recording.request import TraceRequest
from kvtier.simulation.errors import TraceError
from kvtier.simulation.traces import read_trace

MAX_VACANT = 4
"""Numbers are used as they are in the trace, if the highest is below this multiple of their count."""


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
    order: Sequence[int]
    """The requests in the order of their time."""
    chunk_tokens: int
    chunk_bytes: int
    """Size of a chunk object; 0 if the trace does not tell."""
    unique: int
    """Distinct chunks."""
    numbers: int
    """All chunks have numbers below this one."""
    repeated: int
    """Chunks that occurred before in the same prompt. They are left out: chained hashes do not repeat."""

    @classmethod
    def read(cls, path: Path, chunk_tokens: int, limit: int | None = None) -> Trace:
        """Read the first ``limit`` requests of a file. Blocks. Raises :class:`KVTierError`.

        ``chunk_tokens``: tokens of a chunk, unless the file is a recording, whose chunks have a size.
        """
        requests, recorded = read_trace(path, chunk_tokens)
        return cls.load(path.name, islice(requests, limit), None if recorded else chunk_tokens)

    @classmethod
    def load(cls, name: str, requests: Iterable[TraceRequest], chunk_tokens: int | None) -> Trace:
        """Take all requests. Raises :class:`TraceError` if there is none, and what ``requests`` raises.

        ``chunk_tokens``: if ``None``, the least with which every prompt fits into its chunks. This is exact,
        unless all prompts are short.
        """
        raw, ends, times, tokens = array("Q"), array("Q"), array("d"), array("Q")
        hints: dict[int, ChunkHints] = {}
        repeated = chunk_bytes = whole = 0
        for request in requests:
            chunks = request.chunks
            if len(set(chunks)) < len(chunks):
                repeated += len(chunks)
                chunks = list(dict.fromkeys(chunks))
                repeated -= len(chunks)
            if request.hints is not None:
                hints[len(ends)] = request.hints
            elif request.tenant:
                hints[len(ends)] = ChunkHints(tenant=request.tenant)
            raw.extend(chunks)
            ends.append(len(raw))
            times.append(request.time)
            tokens.append(request.tokens)
            chunk_bytes = max(chunk_bytes, request.chunk_bytes)
            whole = max(whole, -(-request.tokens // max(1, len(chunks))))
        if not raw:
            raise TraceError(f"{name}: has no requests")
        numbered, numbers = _numbered(raw)
        monotonic = all(earlier <= later for earlier, later in pairwise(times))
        order = range(len(ends)) if monotonic else array("I", sorted(range(len(ends)), key=times.__getitem__))
        return cls(
            name=name,
            chunks=numbered,
            ends=ends,
            times=times,
            tokens=tokens,
            hints=hints,
            order=order,
            chunk_tokens=chunk_tokens or max(1, whole),
            chunk_bytes=chunk_bytes,
            unique=_count(numbered, numbers),
            numbers=numbers,
            repeated=repeated,
        )

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, request: int) -> tuple[int, int]:
        """Return where the chunks of a request start and end."""
        return self.ends[request - 1] if request else 0, self.ends[request]


def _numbered(ids: array[int]) -> tuple[array[int], int]:
    """Return the ids as u32 numbers, and the highest one plus 1."""
    highest = max(ids) + 1
    if highest <= MAX_VACANT * len(ids) and highest < 1 << 32:
        return array("I", ids), highest
    numbers: dict[int, int] = {}
    numbered = array("I", [numbers.setdefault(chunk, len(numbers)) for chunk in ids])
    return numbered, len(numbers)


def _count(chunks: array[int], numbers: int) -> int:
    """Return how many different numbers there are."""
    seen = bytearray(numbers)
    for chunk in chunks:
        seen[chunk] = 1
    return seen.count(1)
