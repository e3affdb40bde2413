"""An instance that is registered with a controller, and runs commands until its standard input ends.

Its arguments are its settings as JSON, and the bytes per token. Each line of JSON is a command, ``[name,
number]``, whose answer is a number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.commands import CommandProcess
from benchmarks.common import filled
from benchmarks.peers_process import opened
from kvtier.backends.base import Outcome
from kvtier.fleet.member.served_models import EngineModel
from kvtier.instance import Instance
from kvtier.peers.source import Source

MODEL = "benchmark"
CHUNK_TOKENS = 256
Call = Callable[[str, int], float]


def prompt(chunks: int) -> list[int]:
    """Return the tokens of that many whole chunks."""
    return list(range(chunks * CHUNK_TOKENS))


@contextmanager
def instance_process(settings: dict[str, Any], token_bytes: int) -> Iterator[Call]:
    """Run an instance; yield a function that runs a command in it."""
    command = [sys.executable, "-m", __name__, json.dumps(settings), str(token_bytes)]
    with CommandProcess("an instance", command) as process:
        yield process.ask


class Commands:
    """Commands of the benchmark. Each method takes a number of chunks and returns a number."""

    def __init__(self, instance: Instance, token_bytes: int) -> None:
        self._instance = instance
        self._token_bytes = token_bytes
        self._model = instance.cache.model(MODEL, token_bytes=token_bytes)
        instance.served.add("engine", self._model.namespace, self._model.layout, EngineModel([MODEL]))

    async def store(self, chunks: int) -> float:
        """Store a prompt; return how many of its tokens are held."""
        tokens = prompt(chunks)
        return await self._model.store(tokens, filled(len(tokens) * self._token_bytes))

    async def clear(self, _: int) -> float:
        """Clear the cache; return the number of removed chunks."""
        return (await self._instance.cache.clear()).chunks

    async def wait_for_link(self, _: int) -> float:
        """Wait for the link to the peer."""
        while not (sources := self._sources()) or not sources[0].linked:  # noqa: ASYNC110 - no event
            await anyio.sleep(0.01)
        return 1

    async def read_directly(self, chunks: int) -> float:
        """Read a prompt from the peer with the transport alone, outside any tier; return the seconds."""
        (source,) = self._sources()
        keys = self._model.keys(prompt(chunks))
        await source.look_up(keys, prefix=False)
        remotes = [remote for key in keys if (remote := source.leases.take(key)) is not None]
        await source.readable([remote for remote in remotes if not remote.ready])
        leases = [self._instance.cache.arena.allocate(remote.length) for remote in remotes]
        reads = [
            (remote, lease.view) for remote, lease in zip(remotes, leases, strict=True) if lease is not None
        ]
        started = perf_counter()
        outcomes = await source.read(reads)
        seconds = perf_counter() - started
        if list(outcomes) != [Outcome.OK] * chunks:
            raise SystemExit(f"the transport did not read {chunks} chunks: {outcomes}")
        source.release(remotes)
        reads.clear()
        for lease in leases:
            if lease is not None:
                lease.release()
        return seconds

    def _sources(self) -> list[Source]:
        assert self._instance.peers is not None
        clients = self._instance.peers.clients
        return [client.source for client in clients if client.source is not None]


async def main() -> None:
    # Output of libraries goes to standard error, so that it is not read as an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    async with opened(json.loads(sys.argv[1])) as instance:
        commands = Commands(instance, int(sys.argv[2]))
        answer = 0.0
        while True:
            print(answer, file=answers, flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.readline)
            if not line:
                return
            command_name, number = json.loads(line)
            answer = await getattr(commands, command_name)(number)


if __name__ == "__main__":
    anyio.run(main)
