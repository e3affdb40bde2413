"""Measure three controllers that share their state while one of them, or the server of the state, fails.

::

    python -m benchmarks.controller_failover
    python -m benchmarks.controller_failover --busy

Two instances move a prompt to and fro. A client asks the controllers in turns, one request after the other,
and repeats a request that it may repeat: one that was refused with 503, or whose connection was refused. An
operation is lost if it was acknowledged, and its event has not ended as done at the end. Everything runs in
processes of its own, with a Redis that appends each write to its file.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import parse, show
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.node_process import NodeProcess
from tests.rigs.nodes import prompt
from tests.rigs.servers.redis import RedisServer
from tests.rigs.waiting import wait_until

CHUNKS = 20
TOKENS = prompt(CHUNKS)
PLACES = ["a", "ram"], ["b", "ram"]
PAUSE_SECONDS = 8.0
RETRY_SECONDS = 0.02
LIMIT_SECONDS = 60.0


class Setup:
    """Three controllers, two instances and the server of the state."""

    def __init__(self, folder: Path) -> None:
        options = ["--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(folder)]
        self.redis = RedisServer(folder, options=options)
        self.redis.start()
        state = self.redis.tier()["url"]
        self.controllers = [ControllerProcess(folder, state=state) for _ in range(3)]
        urls = [each.url for each in self.controllers]
        self.instances = [NodeProcess(name, urls, ram=64) for name in "ab"]
        processes: list[ControllerProcess | NodeProcess] = [*self.controllers, *self.instances]
        for process in processes:
            process.start()
        self.instances[0].call("store", chunks=CHUNKS)
        wait_until(lambda: all(held(each) == CHUNKS for each in self.controllers))

    def leader(self) -> ControllerProcess:
        """Return the one that leads, once there is one."""
        found: list[ControllerProcess] = []

        def is_found() -> bool:
            found[:] = [each for each in self.controllers if asked(each, "leads")]
            return len(found) == 1

        wait_until(is_found)
        return found[0]

    def close(self) -> None:
        for instance in self.instances:
            instance.kill()
        for controller in self.controllers:
            controller.close()
        self.redis.kill()


def asked(controller: ControllerProcess, field: str) -> int:
    """Return a field of ``/healthz``; 0 without an answer."""
    with suppress(httpx.HTTPError):
        return int(controller.get("/healthz")[field])
    return 0


def held(controller: ControllerProcess) -> int:
    """Return how many chunks are in the index of this very controller."""
    [keys] = re.findall(r"^kvtier_controller_keys (\S+)$", controller.metrics(), re.MULTILINE)
    return int(float(keys))


def restarted(process: ControllerProcess | RedisServer) -> None:
    process.kill()
    process.start()


def paused(process: ControllerProcess | RedisServer, seconds: float) -> None:
    process.pause()
    time.sleep(seconds)
    process.resume()


def faults(seconds: float) -> dict[str, Callable[[Setup], None]]:
    """Return what happens to a setup, by name."""
    return {
        "none": lambda _: None,
        "leader killed (-9), started again": lambda setup: restarted(setup.leader()),
        "leader stopped (SIGTERM)": lambda setup: setup.leader().stop(),
        "leader paused": lambda setup: paused(setup.leader(), seconds),
        "another one killed": lambda setup: restarted(
            next(each for each in setup.controllers if each is not setup.leader())
        ),
        "Redis killed, started again": lambda setup: restarted(setup.redis),
        "Redis paused for 1 s": lambda setup: paused(setup.redis, 1.0),
    }


class Client:
    """Asks the controllers in turns, until told to stop."""

    def __init__(self, setup: Setup) -> None:
        self._urls = itertools.cycle([each.url for each in setup.controllers])
        self.accepted: list[str] = []
        self.seconds: list[float] = []
        self.lookups: list[float] = []

    def run_for(self, seconds: float) -> None:
        """Move the prompt, and look it up."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            source, target = PLACES if len(self.accepted) % 2 == 0 else PLACES[::-1]
            body = {"old_position": source, "new_position": target, "tokens": TOKENS}
            self.accepted.append(self._until_answered("/move", body, self.seconds)["event_id"])
            self._until_answered("/lookup", {"tokens": TOKENS}, self.lookups)

    def lost(self) -> int:
        """Return how many acknowledged operations have not ended as done."""
        return sum(self._state(each) != "done" for each in self.accepted)

    def _state(self, event: str) -> str:
        for url in self._urls:
            with suppress(httpx.TransportError), httpx.Client(trust_env=False, timeout=LIMIT_SECONDS) as http:
                return str(http.get(f"{url}/events/{event}", params={"wait": 30}).json().get("state"))
        raise AssertionError

    def _until_answered(self, path: str, body: object, seconds: list[float]) -> dict[str, Any]:
        began = time.monotonic()
        while time.monotonic() < began + LIMIT_SECONDS:
            # A new connection each time, and a client that gives up: a paused process never answers.
            with suppress(httpx.TransportError), httpx.Client(trust_env=False, timeout=5.0) as http:
                answer = http.post(next(self._urls) + path, json=body)
                if answer.status_code == 200:
                    seconds.append(time.monotonic() - began)
                    return dict(answer.json())
                # A controller that has just started knows no model until its instances have registered.
                assert answer.status_code == 503 or answer.json().get("known") == [], answer.text
            time.sleep(RETRY_SECONDS)
        raise TimeoutError(f"{path}: no answer within {LIMIT_SECONDS:g} s")


def measure(cause: Callable[[Setup], None], seconds: float) -> list[object]:
    """Return the figures of one fault."""
    import threading

    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        setup = Setup(Path(folder))
        try:
            setup.leader()
            client = Client(setup)
            thread = threading.Timer(seconds / 4, cause, [setup])
            thread.start()
            client.run_for(seconds)
            thread.join()
            lost = client.lost()
        finally:
            setup.close()
    median = statistics.median(client.seconds) * 1e3
    return [len(client.accepted), lost, f"{median:.0f}", max(client.seconds), max(client.lookups)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure three controllers while one fails.")
    options = parse(parser)
    seconds = 1.0 if options.small else 12.0
    chosen = faults(0.5 if options.small else PAUSE_SECONDS)
    names = list(chosen)[:2] if options.small else list(chosen)
    rows = [[name, *measure(chosen[name], seconds)] for name in names]
    columns = ["fault", "operations", "lost", "median ms", "slowest answer, s", "slowest lookup, s"]
    title = "three controllers" + " on a busy machine" * bool(options.busy)
    show(title, columns, rows)


if __name__ == "__main__":
    main()
