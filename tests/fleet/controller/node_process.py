"""An instance in its own process, which executes one command per line until it is killed.

It can advertise another peer address than its own, so that a test can place a relay in between.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from kvtier.fleet.member.controller_client import Serving
from kvtier.instance import Instance
from tests.fleet.controller.nodes import BUILT_IN, TOKEN_BYTES, Node, prompt, rows, settings_of
from tests.rigs.forks import Forked, python


class NodeProcess:
    """The process of an instance. Calls block."""

    def __init__(self, name: str, url: str, *, advertise: int | None = None, **settings: Any) -> None:
        self.name = name
        self._settings = {"name": name, "url": url, "advertise": advertise, **settings}
        self._process: Forked | None = None

    def start(self) -> None:
        """Start the process, or restart it on the same port."""
        program = "tests.fleet.controller.node_process"
        self._process = python(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._call(self._settings)

    def store(self, chunks: int) -> None:
        self._call({"do": "store", "chunks": chunks})

    def is_intact(self, chunks: int) -> bool:
        """Whether memory holds the chunks of the prompt as they were stored."""
        answer: bool = self._call({"do": "is_intact", "chunks": chunks})
        return answer

    def pinned(self) -> set[str]:
        """Return the keys of the chunks that it does not evict."""
        return set(self._call({"do": "pinned"}))

    def store_prompt(self, number: int, chunks: int) -> None:
        """Store a prompt, as far as there is room."""
        self._call({"do": "store_prompt", "number": number, "chunks": chunks})

    def read(self, number: int, chunks: int) -> bool:
        """Whether what it retrieves of a prompt, from any tier and from peers, is what was stored."""
        answer: bool = self._call({"do": "read", "number": number, "chunks": chunks})
        return answer

    def wait_until_idle(self) -> bool:
        """Wait until nothing is in flight and nothing is leased."""
        answer: bool = self._call({"do": "wait_until_idle"})
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, and wait. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    def _call(self, command: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the process has exited"
        return json.loads(line)


async def main() -> None:
    settings = json.loads(sys.stdin.readline())
    advertise = settings.pop("advertise")
    if advertise is not None:
        Serving.address = lambda *_: f"127.0.0.1:{advertise}"  # type: ignore[method-assign]
    if settings.get("disk") is not None:
        settings["disk"] = Path(settings["disk"])
    async with Instance.open(settings_of(**settings), plugins=BUILT_IN) as instance:
        node = Node(instance)
        answer: object = True
        while True:
            print(json.dumps(answer), flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            if not line:
                return
            answer = await _execute(node, json.loads(line))


async def _execute(node: Node, command: dict[str, Any]) -> object:
    match command["do"]:
        case "store":
            await node.store(prompt(command["chunks"]))
        case "is_intact":
            return node.is_intact(prompt(command["chunks"]))
        case "wait_until_idle":
            await node.wait_until_idle()
        case "store_prompt":
            tokens = prompt(command["chunks"], command["number"])
            await node.model.store(tokens, rows(tokens))
        case "read":
            tokens = prompt(command["chunks"], command["number"])
            found = bytearray(len(rows(tokens)))
            length = await node.model.retrieve(tokens, found) * TOKEN_BYTES
            return found[:length] == rows(tokens)[:length]
        case "pinned":
            catalog, now = node.cache.catalog, time.monotonic()
            held = {key for tier in node.cache.tiers for key in catalog.keys(tier.index)}
            pinned = [key.hex() for key in held if catalog.pins.holds(key, now)]
            assert len(pinned) == catalog.pinned, "nothing else is pinned"
            return pinned
    return True


if __name__ == "__main__":
    anyio.run(main)
