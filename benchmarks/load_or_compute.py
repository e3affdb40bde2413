"""Compare the time to the first token if chunks are always loaded, never, and if it is decided per request.

::

    python -m benchmarks.load_or_compute --folder /dev/shm       # needs 2 GiB there, two minutes
    python -m benchmarks.load_or_compute --small

The hooks of the connector are called as by vLLM, with a real cache process. What holds the prompts, its disk
or a peer on the same machine, is throttled to a multiple of the speed at which the engine computes. Computing
is sleeping, so that these speeds are exact. Before, the engine has computed some prompts, and loaded some
others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.cold_loads import CHUNK_MIB, CHUNK_TOKENS, MIB, Engine, Prompts, cache_process
from benchmarks.common import parse, show
from benchmarks.peers_process import settings_of
from kvtier.bridge.client import status
from kvtier.testing.servers import free_port
from tests.rigs.stepping import Request, make_request

SPEEDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Of the medium, as multiples of the speed of computing."""
LEARNED = 4
"""Prompts before the measured ones."""
READ_ONLY = {"kvtier": {"cache": "read"}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare always loading, never loading, and deciding.")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write; default: current folder")
    parser.add_argument("--mib", type=int, default=96, help="of KV per prompt, default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.8, help="to compute it, default: %(default)s")
    parser.add_argument("--runs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--media", nargs="+", choices=MEDIA, default=list(MEDIA), help="default: all")
    options = parse(parser)
    speeds: Sequence[float] = SPEEDS
    if options.small:
        options.mib, options.runs, options.seconds, speeds = 12, 1, 0.05, (4.0,)
    chunks = options.mib // CHUNK_MIB
    for medium in options.media:
        requests = [
            make_request(chunks * CHUNK_TOKENS, kv_transfer_params=READ_ONLY)
            for _ in range(LEARNED + options.runs)
        ]
        rows: list[tuple[object, ...]] = []
        with (
            tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder,
            MEDIA[medium](Path(folder), requests, chunks) as prompts,
        ):
            for multiple in speeds:
                speed = multiple * options.mib * MIB / options.seconds
                always, _, never = first_tokens(prompts, requests, speed, options.seconds, adaptive=False)
                decided, hits, _ = first_tokens(prompts, requests, speed, options.seconds, adaptive=True)
                better = min(always, never)
                row = always * 1e3, never * 1e3, decided * 1e3, decided / better
                rows.append((f"{multiple} x computing", *row, f"{hits:.0%}"))
        columns = (medium, "always ms", "never ms", "decided ms", "decided : better of both", "loaded")
        show(f"first token of prompts of {options.mib} MiB, medians of {options.runs}", columns, rows)


@contextmanager
def on_disk(folder: Path, requests: Sequence[Request], chunks: int) -> Iterator[Prompts]:
    """Yield the prompts, stored on the disk of the engine's cache process."""
    prompts = Prompts(folder, requests, chunks)
    prompts.store()
    yield prompts


@contextmanager
def at_peer(folder: Path, requests: Sequence[Request], chunks: int) -> Iterator[Prompts]:
    """Yield the prompts, stored in the memory of another cache process."""
    port, capacity = free_port(), 2 * len(requests) * chunks * CHUNK_MIB * MIB
    with cache_process(folder / "peer", 0, **settings_of("tcp", port, [], capacity, checksum=True)):
        holder = Engine(folder / "peer", chunks)
        for request in requests:
            holder.store(request)
        yield PeerPrompts(folder, requests, chunks, port)
        holder.close()


class PeerPrompts(Prompts):
    """Prompts whose chunks are in the memory of a peer."""

    def __init__(self, folder: Path, requests: Sequence[Request], chunks: int, port: int) -> None:
        super().__init__(folder, requests, chunks)
        self._port = port

    @contextmanager
    def engine(self, bytes_per_second: float, **settings: object) -> Iterator[Engine]:
        """Run a cache process that fetches from the peer, and the hooks of an engine."""
        socket = self._folder / "socket"
        own = settings_of("tcp", free_port(), [self._port], 3 * self._bytes, checksum=True)
        with cache_process(socket, bytes_per_second, **own, **settings):
            while not any(peer["state"] == "connected" for peer in status(socket)["peers"]):
                time.sleep(0.02)
            engine = Engine(socket, self._chunks, **settings)
            yield engine
            engine.close()


MEDIA: dict[str, Callable[[Path, Sequence[Request], int], AbstractContextManager[Prompts]]] = {
    "disk": on_disk,
    "peer": at_peer,
}


def first_tokens(
    prompts: Prompts, requests: Sequence[Request], speed: float, seconds: float, *, adaptive: bool
) -> tuple[float, float, float]:
    """Return the median seconds to the first token, the fraction of tokens loaded, and that of a miss."""
    with prompts.engine(speed, prefetch={"adaptive": adaptive, "deadline": "30s"}) as engine:
        fresh = [
            make_request(requests[0].num_prompt_tokens, kv_transfer_params=READ_ONLY) for _ in range(LEARNED)
        ]
        misses = [first_token(engine, request, seconds)[0] for request in fresh]
        measured = [first_token(engine, request, seconds) for request in requests]
    times, hits = zip(*measured[LEARNED:], strict=True)
    return statistics.median(times), statistics.median(hits), statistics.median(misses)


def first_token(engine: Engine, request: Request, seconds: float) -> tuple[float, float]:
    """Run a request. Return the seconds to its first token, and the fraction of tokens that were loaded."""
    started = time.perf_counter()
    request.num_computed_tokens, request.num_tokens = 0, request.num_prompt_tokens
    hit = engine.start(request)
    request.num_computed_tokens = hit
    rest = request.num_tokens - hit
    engine.step(request, count=max(1, rest))
    time.sleep(seconds * rest / request.num_tokens)
    elapsed = time.perf_counter() - started
    request.num_tokens += 1
    engine.finish(request)
    return elapsed, hit / request.num_prompt_tokens


if __name__ == "__main__":
    main()
