"""Process with kvtier's controller, for :mod:`benchmarks.controller`.

Reads commands as lines of JSON, ``[name, number]``, and answers each with a line: seconds, bytes, or a port.
:mod:`benchmarks.peer.controller` runs the same commands with LMCache's controller.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
from blake3 import blake3
from starlette.websockets import WebSocket

from benchmarks.catalog import resident_bytes
from kvtier.fleet.controller.prompts import PromptChunks
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.controller.serve import run_controller
from kvtier.fleet.controller.settings import ServiceSettings
from kvtier.fleet.member.protocol import (
    VERSION,
    Changed,
    Hello,
    Model,
    Serves,
    TierDescription,
    decode_from_instance,
)
from kvtier.memory.keys import KEY_BYTES, ChunkKey, join_keys, split_keys
from kvtier.memory.layout import ChunkLayout, GroupLayout, namespace
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.frames import encode_body
from kvtier.rpc.websocket import ServerWire

INSTANCES = 8
PROMPT_CHUNKS = 128
PROMPT_TOKENS = list(range(32_768))
BATCH_KEYS = 1024
LAYOUT = ChunkLayout(256, (GroupLayout(32, (4096,)),))
MODEL = Model(["benchmark"], namespace("benchmark", LAYOUT), LAYOUT, False)


def prompt_keys(prompt: int) -> list[ChunkKey]:
    """Return the keys of a prompt, as new objects, so that neither CPU caches nor a cached hash helps."""
    return split_keys(blake3(prompt.to_bytes(8, "little")).digest(KEY_BYTES * PROMPT_CHUNKS))


def hello(number: int) -> Hello:
    tier = TierDescription("ram", "cpu", 1 << 40, False)
    return Hello(
        VERSION, f"instance-{number}", number, "benchmark", "host", 1, f"host:{8200 + number}", "tcp", [tier]
    )


def unconnected() -> Endpoint:
    """Return an endpoint that queues what is sent to it."""
    websocket = WebSocket({"type": "websocket"}, None, None)  # type: ignore[arg-type]
    return Endpoint(ServerWire(websocket), decode_from_instance)


def update_message(batch: int) -> bytes:
    """Return a message that adds keys without another holder."""
    joined = join_keys(list(itertools.chain(*(prompt_keys((1 << 40) + batch * 8 + n) for n in range(8)))))
    return encode_body(Changed(0, joined, b""))


class Commands:
    """Commands of the benchmark. Each method takes a number and returns one."""

    def __init__(self, registry: Registry, port: int) -> None:
        self._registry = registry
        self._port = port
        self._prompts = 0

    async def fill(self, keys: int) -> float:
        """Add that many keys, each held by one instance; return the memory used in bytes."""
        members = [await self._registry.admit(hello(number), unconnected()) for number in range(INSTANCES)]
        self._registry.report(members[0], Serves([MODEL]))
        self._prompts = keys // PROMPT_CHUNKS
        before = resident_bytes()
        for prompt in range(self._prompts):
            self._registry.stored(members[prompt % INSTANCES], 0, prompt_keys(prompt))
        gc.collect()
        grown = resident_bytes() - before
        # One prompt of real tokens, for look_up_tokens.
        held = PromptChunks.of(MODEL, PROMPT_TOKENS)
        self._registry.stored(members[1], 0, held.keys)
        return grown

    async def add_holder(self, _: int) -> float:
        """Add a second holder of each key; return the memory used in bytes."""
        members = list(self._registry.members.values())
        before = resident_bytes()
        for prompt in range(self._prompts):
            self._registry.stored(members[(prompt + 1) % INSTANCES], 0, prompt_keys(prompt))
        gc.collect()
        return resident_bytes() - before

    async def look_up(self, count: int) -> float:
        """Return the seconds for that many lookups of prompts from all over the index, by key."""
        prompts = [prompt_keys(number * self._prompts // count) for number in range(count)]
        started = time.thread_time()
        for keys in prompts:
            assert self._registry.holders.prefixes(keys)
        return time.thread_time() - started

    async def look_up_tokens(self, count: int) -> float:
        """Return the seconds for that many lookups of one prompt, by its tokens."""
        started = time.thread_time()
        for _ in range(count):
            prompt = PromptChunks.of(MODEL, PROMPT_TOKENS)
            assert self._registry.holders.prefixes(prompt.keys)
        return time.thread_time() - started

    async def update(self, batches: int) -> float:
        """Return the seconds to decode and index that many messages with new keys."""
        bodies = [update_message(batch) for batch in range(batches)]
        member = self._registry.find("instance-0")
        started = time.thread_time()
        for body in bodies:
            changed = decode_from_instance(body)
            assert isinstance(changed, Changed)
            self._registry.stored(member, changed.tier, split_keys(changed.stored))
        seconds = time.thread_time() - started
        for batch in range(batches):
            changed = decode_from_instance(update_message(batch))
            assert isinstance(changed, Changed)
            self._registry.removed(member, 0, split_keys(changed.stored))
        return seconds

    async def settle(self, _: int) -> float:
        """Finish the background work of earlier commands."""
        while self._registry.holders.needs_sweep:
            self._registry.holders.sweep()
        return 0

    async def leave(self, number: int) -> float:
        """Remove an instance and its keys; return the longest time that this blocks the loop, in seconds."""
        started = time.thread_time()
        self._registry.leave(self._registry.find(f"instance-{number}"), "removed by the benchmark")
        longest = time.thread_time() - started
        while self._registry.holders.needs_sweep:
            started = time.thread_time()
            self._registry.holders.sweep()
            longest = max(longest, time.thread_time() - started)
        return longest

    async def port(self, _: int) -> float:
        """Return the port of the controller."""
        return self._port


async def main() -> None:
    logging.disable()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        settings = ServiceSettings.of(
            listen="127.0.0.1:0", state=Path(folder, "state.sqlite"), heartbeat=600, instance_timeout=3600
        )
        async with run_controller(settings) as controller:
            commands = Commands(controller.registry, controller.address[1])
            print(json.dumps(0), flush=True)
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                command_name, *numbers = json.loads(line)
                print(json.dumps(await getattr(commands, command_name)(*numbers or [0])), flush=True)


def command() -> Sequence[str]:
    """Return the command line of this process."""
    return [sys.executable, "-m", "benchmarks.controller_process"]


if __name__ == "__main__":
    anyio.run(main)
