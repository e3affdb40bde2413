"""An instance in a process of its own, which does what it is told line by line until it is killed.

Its address as others are told it may be another than its own, so that a test can stand between them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from kvtier.agent.agent import Serving
from kvtier.instance import Instance
from tests.controller.holding import BUILT_IN, Holder, prompt, settings_of

ROOT = Path(__file__).parents[2]


class InstanceProcess:
    """One such process. Calls block."""

    def __init__(self, name: str, url: str, *, advertise: int | None = None, **settings: Any) -> None:
        self.name = name
        self._wanted = {"name": name, "url": url, "advertise": advertise, **settings}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, or another in its place; its peers reach it on the same port."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.controller.instance_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._ask(self._wanted)

    def store(self, chunks: int) -> None:
        self._ask({"do": "store", "chunks": chunks})

    def intact(self, chunks: int) -> bool:
        """Whether what its memory holds of the prompt is what was stored."""
        answer: bool = self._ask({"do": "intact", "chunks": chunks})
        return answer

    def at_rest(self) -> bool:
        """Whether it comes to rest, with nothing leased."""
        answer: bool = self._ask({"do": "at_rest"})
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """``kill -9``, and gone. Harmless when repeated."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


async def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    advertise = wanted.pop("advertise")
    if advertise is not None:
        Serving.address = lambda *_: f"127.0.0.1:{advertise}"  # type: ignore[method-assign]
    if wanted.get("disk") is not None:
        wanted["disk"] = Path(wanted["disk"])
    async with Instance.open(settings_of(**wanted), plugins=BUILT_IN) as instance:
        holder = Holder(instance)
        answer: object = True
        while True:
            print(json.dumps(answer), flush=True)
            line = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
            if not line:
                return
            answer = await _obey(holder, json.loads(line))


async def _obey(holder: Holder, question: dict[str, Any]) -> object:
    match question["do"]:
        case "store":
            await holder.store(prompt(question["chunks"]))
        case "intact":
            return holder.intact(prompt(question["chunks"]))
        case "at_rest":
            await holder.at_rest()
    return True


if __name__ == "__main__":
    anyio.run(main)
