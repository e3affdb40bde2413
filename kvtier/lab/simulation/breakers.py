"""Where the prompts of a trace part, counted as a cache process counts them while it serves."""

from __future__ import annotations

from kvtier.lab.simulation.trace import Trace
from kvtier.memory.keys import ChunkKey
from kvtier.observability.breakers import Breaker, Breakers

ROOT = ChunkKey(b"")


def breakers_of(trace: Trace, tokens_per_second: float = 0.0) -> list[Breaker]:
    """Return the places that cost most, as a cache sees them that keeps everything.

    A trace has no tokens: positions are exact to a chunk, and only whole chunks are compared. What parts
    within the first chunk is not seen. ``tokens_per_second``: how fast prompts are computed; 0 if unknown.
    """
    now = 0.0
    breakers = Breakers(lambda: now)
    seen, continued = bytearray(trace.numbers), bytearray(trace.numbers)
    for request in trace.order:
        start, stop = trace.span(request)
        whole = trace.tokens[request] // trace.chunk_tokens
        chunks = trace.chunks[start : min(stop, start + whole)]
        keys = [ChunkKey(chunk.to_bytes(4, "big")) for chunk in chunks]
        now = trace.times[request]
        breakers.passed(ROOT, keys)
        new = next((at for at, chunk in enumerate(chunks) if not seen[chunk]), len(chunks))
        if 0 < new < len(chunks) and continued[chunks[new - 1]]:
            position = new * trace.chunk_tokens
            behind = trace.tokens[request] - position
            seconds = behind / tokens_per_second if tokens_per_second else 0.0
            breakers.parted(keys[new - 1], position, behind, seconds)
        for chunk in chunks:
            seen[chunk] = 1
        for chunk in chunks[:-1]:
            continued[chunk] = 1
    return [breaker for breaker, _ in breakers.report()]
