"""Moves, prefetches, pins, unpins and clears of the same chunks at once, in real processes.

Each operation ends with a clear result, no byte is wrong, nothing stays leased, and what is listed as pinned
is what the instances protect.
"""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.memory.keys import split_keys
from tests.fleet.controller.test_faults import Controller
from tests.rigs.node_process import NodeProcess
from tests.rigs.nodes import TIMEOUT_SECONDS, prompt
from tests.rigs.waiting import wait_until

PROMPTS, CHUNKS = 4, 8
ROOM = PROMPTS * CHUNKS // 2
WORKERS = 6
KINDS = ("move", "copy", "prefetch", "pin", "unpin", "clear", "clear-all", "store", "read")
WEIGHTS = (6, 4, 4, 6, 2, 2, 0.5, 4, 4)
SHORTFALLS = ["the rest", "holds the", "some were removed in the meantime"]
"""Why an operation fails: chunks are evicted or cleared meanwhile, or all others are pinned."""
PLACES = [(instance, tier) for instance in "ab" for tier in ("ram", "ssd")]


class Fleet:
    """A controller and two instances, each with memory for half of the prompts and a disk."""

    def __init__(self, folder: Path) -> None:
        self.controller = Controller(folder)
        self.instances = {
            name: NodeProcess(name, self.controller.url, ram=PROMPTS * CHUNKS // 2, disk=str(folder / name))
            for name in "ab"
        }
        self._turns = {name: threading.Lock() for name in self.instances}
        self._killed: set[str] = set()
        self.results: Counter[str] = Counter()
        self.failed: list[str] = []

    def start(self) -> None:
        self.controller.start()
        for name in self.instances:
            self.restart(name)

    def restart(self, name: str) -> None:
        """Start an instance, also after :meth:`kill`, and store all prompts as far as there is room."""
        with self._turns[name]:
            self.instances[name].start()
            self._killed.discard(name)
        for number in range(PROMPTS):
            self._store(name, number, CHUNKS)
        wait_until(lambda: self._serves(name))

    def _serves(self, name: str) -> bool:
        """Whether an instance has reported all its chunks, and the model."""
        instances = self.controller.get("/instances")["instances"]
        return any(
            found["instance"] == name and found["up_to_date"] and found["models"] for found in instances
        )

    def kill(self, name: str) -> None:
        """Send SIGKILL to an instance between two of its own calls."""
        with self._turns[name]:
            self._killed.add(name)
            self.instances[name].kill()

    def work(self, seed: int, operations: int) -> None:
        """Run random operations, one after the other."""
        chance = random.Random(seed)
        with httpx.Client(base_url=self.controller.url, timeout=TIMEOUT_SECONDS, trust_env=False) as http:
            for _ in range(operations):
                [kind] = chance.choices(KINDS, WEIGHTS)
                number, chunks = chance.randrange(PROMPTS), chance.randint(1, CHUNKS)
                tokens = prompt(CHUNKS, number)[: len(prompt(chunks))]
                place, other = chance.sample(PLACES, 2)
                here = {"instance": place[0], "tier": place[1]}
                ttl = chance.choice(["1h", "2h", None])
                match kind:
                    case "store":
                        self._store(place[0], number, chunks)
                    case "read":
                        self._read(place[0], number, chunks)
                    case "move" | "copy":
                        body = {"old_position": place, "new_position": other, "copy": kind == "copy"}
                        self._run(http, kind, "/move", tokens=tokens, **body)
                    case "pin":
                        self._run(http, kind, "/pin", tokens=tokens, **here, **({"ttl": ttl} if ttl else {}))
                    case "clear-all":
                        self._run(http, kind, "/clear", **here)
                    case _:
                        self._run(http, kind, f"/{kind}", tokens=tokens, **here)

    def _run(self, http: httpx.Client, kind: str, path: str, **body: Any) -> None:
        answer = http.post(path, json=body)
        if answer.status_code != 200:
            assert answer.status_code in {404, 503}, answer.text
            assert answer.json()["detail"]
            self.results[f"{kind} {answer.status_code}"] += 1
            return
        query = {"wait": TIMEOUT_SECONDS}
        event = http.get(f"/events/{answer.json()['event_id']}", params=query).raise_for_status().json()
        self.results[f"{kind} {event['state']}"] += 1
        if event["state"] == "failed":
            self.failed.append(event["error"])
        assert event["error"] if event["state"] == "failed" else event["state"] == "done", event

    def _store(self, name: str, number: int, chunks: int) -> None:
        with self._turns[name]:
            if name not in self._killed:
                self.instances[name].call("store", number=number, chunks=chunks)

    def _read(self, name: str, number: int, chunks: int) -> None:
        with self._turns[name]:
            if name not in self._killed:
                assert self.instances[name].call("read", number=number, chunks=chunks), "wrong bytes"

    @contextmanager
    def running(self, seed: int, operations: int) -> Iterator[None]:
        """Run that many operations in each of some threads; raise what one of them raised."""
        with ThreadPoolExecutor(WORKERS) as threads:
            running = [threads.submit(self.work, seed + part, operations) for part in range(WORKERS)]
            yield
            for done in running:
                done.result(TIMEOUT_SECONDS)

    def check_failures(self, expected: list[str]) -> None:
        """Check that each failed operation has one of these reasons."""
        assert [reason for reason in self.failed if not any(part in reason for part in expected)] == []

    def check(self, restarted: str = "") -> None:
        """Check the state once nothing runs."""
        for name, instance in self.instances.items():
            instance.call("wait_until_idle")
            for number in range(PROMPTS):
                self._read(name, number, CHUNKS)
        self.controller.kill()  # It has its state file to itself.
        for name, listed in self._listed_pins().items():
            pinned = set(self.instances[name].call("pinned"))
            # After a restart, what is not stored again is not protected.
            assert pinned <= listed if name == restarted else pinned == listed

    def _listed_pins(self) -> dict[str, set[str]]:
        listed: dict[str, set[str]] = {name: set() for name in self.instances}
        with closing(sqlite3.connect(self.controller.state)) as database:
            for name, joined in database.execute("SELECT instance, keys FROM pins"):
                listed[name] |= {key.hex() for key in split_keys(joined)}
        return listed

    def close(self) -> None:
        for instance in self.instances.values():
            instance.kill()
        self.controller.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


def slow(seeds: range) -> list[Any]:
    return [pytest.param(seed, marks=pytest.mark.slow) for seed in seeds]


@pytest.mark.parametrize("seed", [1, *slow(range(2, 8))])
def test_operations_on_the_same_chunks(fleet: Fleet, seed: int) -> None:
    with fleet.running(100 * seed, 20 if seed == 1 else 100):
        pass
    fleet.check_failures(SHORTFALLS)
    fleet.check()


@pytest.mark.parametrize("seed", [1, *slow(range(2, 6))])
def test_operations_while_an_instance_is_killed(fleet: Fleet, seed: int) -> None:
    with fleet.running(100 * seed, 30):
        wait_until(lambda: fleet.results.total() > 30)
        fleet.kill("b")
        wait_until(lambda: fleet.results.total() > 60)
        fleet.restart("b")
    # As a peer, it is an address.
    fleet.check_failures([*SHORTFALLS, "disconnected", "'b'", "peer 127.0.0.1"])
    fleet.check("b")
