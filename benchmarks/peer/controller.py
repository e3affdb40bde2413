"""Process with LMCache's own controller, for :mod:`benchmarks.controller`.

Runs with the Python of LMCache's environment, in which fastapi and uvicorn must be installed. Has the same
commands as :mod:`benchmarks.controller_process`. ``python controller.py --push URL BATCHES`` sends updates to
such a controller, like LMCache's workers, after it has read a line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import zmq
from lmcache.v1.api_server.__main__ import create_app
from lmcache.v1.cache_controller.message import (
    BatchedKVOperationMsg,
    DeRegisterMsg,
    KVOpEvent,
    LookupMsg,
    OpType,
    RegisterMsg,
)

INSTANCES = 8
PROMPT_CHUNKS = 128
PROMPT_TOKENS = list(range(32_768))
BATCH_KEYS = 1024
LOCATION = "LocalCPUBackend"


def prompt_keys(prompt: int) -> list[int]:
    """Return the keys of a prompt: numbers of 63 bits, as LMCache computes them from tokens."""
    generator = random.Random(prompt)
    return [generator.getrandbits(63) for _ in range(PROMPT_CHUNKS)]


def operations_message(instance: int, keys: list[int], kind: OpType = OpType.ADMIT) -> BatchedKVOperationMsg:
    operations = [KVOpEvent(op_type=kind, key=key, seq_num=number) for number, key in enumerate(keys)]
    return BatchedKVOperationMsg(
        instance_id=f"instance-{instance}", worker_id=0, location=LOCATION, operations=operations
    )


def update_message(batch: int) -> bytes:
    """Return a message that adds keys without another holder."""
    keys = [key for number in range(8) for key in prompt_keys((1 << 40) + batch * 8 + number)]
    return msgspec.msgpack.encode(operations_message(0, keys))


class Commands:
    """Commands of the benchmark. Each method takes a number and returns one."""

    def __init__(self, manager: Any, port: int, pull: str) -> None:  # noqa: ANN401 - of LMCache
        self._manager = manager
        self._kv = manager.kv_controller
        self._registry = manager.kv_controller.registry
        self._port = port
        self.pull = pull
        self._prompts = 0

    async def fill(self, keys: int) -> float:
        for number in range(INSTANCES):
            await self._manager.reg_controller.register(
                RegisterMsg(f"instance-{number}", 0, "127.0.0.1", free_port(), None)
            )
        self._prompts = keys // PROMPT_CHUNKS
        before = resident_bytes()
        for prompt in range(self._prompts):
            self._registry.handle_batched_kv_operations(
                operations_message(prompt % INSTANCES, prompt_keys(prompt))
            )
        gc.collect()
        grown = resident_bytes() - before
        held = [key for _, _, key in self._kv.token_database.process_tokens(PROMPT_TOKENS, make_key=False)]
        self._registry.handle_batched_kv_operations(operations_message(1, held))
        return grown

    async def add_holder(self, _: int) -> float:
        before = resident_bytes()
        for prompt in range(self._prompts):
            self._registry.handle_batched_kv_operations(
                operations_message((prompt + 1) % INSTANCES, prompt_keys(prompt))
            )
        gc.collect()
        return resident_bytes() - before

    async def look_up(self, count: int) -> float:
        prompts = [prompt_keys(number * self._prompts // count) for number in range(count)]
        started = time.thread_time()
        for keys in prompts:
            # The work of its lookup besides hashing.
            for key in keys:
                if self._registry.find_kv(key) is None:
                    raise SystemExit("LMCache did not find a stored key")
        return time.thread_time() - started

    async def look_up_tokens(self, count: int) -> float:
        started = time.thread_time()
        for _ in range(count):
            found = await self._kv.lookup(LookupMsg(event_id="", tokens=PROMPT_TOKENS))
            if not found.layout_info:
                raise SystemExit("LMCache did not find a stored key")
        return time.thread_time() - started

    async def update(self, batches: int) -> float:
        bodies = [update_message(batch) for batch in range(batches)]
        started = time.thread_time()
        for body in bodies:
            message = msgspec.msgpack.decode(body, type=BatchedKVOperationMsg)
            await self._manager.handle_worker_message(message)
        seconds = time.thread_time() - started
        self._evict(batches)
        return seconds

    async def settle(self, _: int) -> float:
        return 0

    async def leave(self, number: int) -> float:
        started = time.thread_time()
        await self._manager.reg_controller.deregister(DeRegisterMsg(f"instance-{number}", 0, "127.0.0.1", 0))
        return time.thread_time() - started

    async def push(self, batches: int) -> float:
        """Return the seconds until that many messages with new keys from another process are in the index."""
        command = [sys.executable, __file__, "--push", self.pull, str(batches)]
        pusher = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
        assert pusher.stdin is not None
        assert pusher.stdout is not None
        await pusher.stdout.readline()
        expected = self._registry.get_total_kv_count() + batches * BATCH_KEYS
        started = time.perf_counter()
        pusher.stdin.write(b"\n")
        while self._registry.get_total_kv_count() < expected:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
        seconds = time.perf_counter() - started
        await pusher.communicate()
        self._evict(batches)
        return seconds

    async def port(self, _: int) -> float:
        return self._port

    def _evict(self, batches: int) -> None:
        for batch in range(batches):
            message = msgspec.msgpack.decode(update_message(batch), type=BatchedKVOperationMsg)
            keys = [operation.key for operation in message.operations]
            self._registry.handle_batched_kv_operations(operations_message(0, keys, OpType.EVICT))


def push(url: str, batches: int) -> None:
    bodies = [update_message(batch) for batch in range(batches)]
    context = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.set_hwm(0)
    sender.connect(url)
    print(flush=True)
    sys.stdin.readline()
    for body in bodies:
        sender.send(body)
    sender.close()
    context.term()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def main() -> None:
    # Output of LMCache goes to standard error, so that it is not read as an answer.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    urls = {name: f"127.0.0.1:{free_port()}" for name in ("pull", "reply")}
    app = create_app({**urls, "heartbeat": None}, -1, 3600)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error", access_log=False))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.01)
    commands = Commands(app.state.lmcache_controller_manager, port, f"tcp://{urls['pull']}")
    print(json.dumps(0), file=stdout)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command_name, *numbers = json.loads(line)
        print(json.dumps(await getattr(commands, command_name)(*numbers or [0])), file=stdout)
    del serving
    os._exit(0)  # LMCache has no way to stop its threads and sockets.


if __name__ == "__main__":
    if sys.argv[1:2] == ["--push"]:
        push(sys.argv[2], int(sys.argv[3]))
    else:
        asyncio.run(main())
