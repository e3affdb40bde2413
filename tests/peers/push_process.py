"""An instance in its own process, which pushes chunks on command until it is killed.

The program reads one line of JSON (settings), then one command per line, and answers each with a line:
``compute`` makes chunks READY, ``kv_transfer`` starts to push a prompt, ``resume`` unblocks the writes,
``finish`` ends the KV transfer.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread

from kvtier.instance import Instance
from kvtier.peers.kv_transfer import KVTransfer
from kvtier.peers.source import Read, Source
from kvtier.testing.backend import make_key
from tests.rigs.forks import Forked

from .peer_process import python_in_thread, settings_of, store

CAPACITY = 256 << 20


class PushProcess:
    """The test's handle of the process, which may be killed or stopped at any time."""

    def __init__(self, kind: str, payload: int, blocks_after: int | None = None) -> None:
        """After ``blocks_after`` batches, block in the middle of the next one until :meth:`resume`."""
        self._config = {"payload": payload, "peer": {"transport": kind}, "blocks_after": blocks_after}
        self._process: Forked | None = None
        self.address = ""

    async def __aenter__(self) -> PushProcess:
        self._process = await python_in_thread("tests.peers.push_process")
        self.address = f"127.0.0.1:{await self._request(self._config)}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def compute(self, numbers: Sequence[int]) -> None:
        await self._request({"do": "compute", "numbers": list(numbers)})

    async def transfer_kv(self, to: str, numbers: Sequence[int]) -> None:
        """Start a KV transfer, and return once it is announced."""
        await self._request({"do": "kv_transfer", "to": to, "numbers": list(numbers)})

    async def resume(self) -> None:
        """Unblock the writes."""
        await self._request({"do": "resume"})

    async def finish(self) -> int:
        """Finish the KV transfer; return the number of leading chunks that the receiver holds."""
        leading: int = await self._request({"do": "finish"})
        return leading

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process with SIGKILL and reap it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await anyio.to_thread.run_sync(process.wait)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    async def _request(self, message: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        with anyio.fail_after(60):
            reply = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
        assert reply, "the process has ended"
        return json.loads(reply)


def block_after(batches: int) -> anyio.Event:
    """Block ``Source.write`` in the middle of a batch after so many; return the event that unblocks it."""
    write_all, remaining, resume = Source.write, iter(range(batches)), anyio.Event()

    async def write(self: Source, writes: list[Read]) -> Any:
        if next(remaining, None) is None and not resume.is_set():
            await write_all(self, writes[: len(writes) // 2])
            await resume.wait()
        return await write_all(self, writes)

    Source.write = write  # type: ignore[assignment, method-assign]
    return resume


async def main() -> None:
    config = json.loads(sys.stdin.readline())
    settings = settings_of("127.0.0.1:0", [], CAPACITY, **config["peer"])
    resume = anyio.Event()
    if config["blocks_after"] is not None:
        resume = block_after(config["blocks_after"])
    transfer: KVTransfer | None = None
    async with Instance.open(settings) as instance:
        assert instance.server is not None
        reply: Any = instance.server.address[1]
        while True:
            print(json.dumps(reply, default=str), flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.readline)
            if not line:
                return
            reply, command = None, json.loads(line)
            match command["do"]:
                case "compute":
                    store(instance, command["numbers"], config["payload"])
                case "kv_transfer":
                    keys = [make_key(number) for number in command["numbers"]]
                    transfer = instance.transfer_kv(command["to"], keys)
                    await transfer.announced.wait()
                case "resume":
                    resume.set()
                case "finish":
                    assert transfer is not None
                    reply = (await transfer.finish(60)).leading


if __name__ == "__main__":
    anyio.run(main)
