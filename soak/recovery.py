"""Checks at the end of a phase: all processes have recovered, chunks are hit, and nothing leaks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx

from kvtier.errors import ChannelError
from soak import leaks
from soak.findings import Record
from soak.lane import Lane
from soak.oracle import Oracle
from soak.stack import DISK_BYTES, Host, Stack, children, is_running

RECOVERY_SECONDS = 60.0
"""How long a recovery may take."""
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0


class Open(NamedTuple):
    """The open descriptors and tasks of a cache process."""

    descriptors: Counter[str]
    tasks: Mapping[str, int]


class Recovery:
    """Checks of the processes of a phase while no faults are injected. Methods block."""

    def __init__(self, stack: Stack, lanes: Sequence[Lane], oracle: Oracle, record: Record) -> None:
        self._stack = stack
        self._lanes = lanes
        self._oracle = oracle
        self._record = record
        self._before: list[Open] = []

    def prepare(self, probes: Sequence[int]) -> None:
        """Use everything once, and record the open descriptors and tasks."""
        self.wait_for(self._is_back, "start")
        self._probe(probes)
        self._check_idle()
        self._before = [self._open(host) for host in self._stack.hosts]

    def check(self, probes: Sequence[int]) -> None:
        """Report processes that have exited or do not answer, missing hits, and leaks."""
        for name, pid in self._stack.pids().items():
            if pid is None or not is_running(pid):
                self._record.find("dead process", f"{name} is not running")
        self.wait_for(self._is_back, "recover")
        self._probe(probes)
        self.wait_for(self._tiers, "be available")
        self.wait_for(self.pins_left, "be without pins")
        self.check_unlisted()
        self.wait_for(self.beyond_capacity, "keep its capacity")
        for suspect in [suspect for lane in self._lanes for suspect in lane.suspects]:
            for lane in (*self._lanes, *self._lanes):
                lane.retry(suspect)
        self._check_idle()
        for host, before in zip(self._stack.hosts, self._before, strict=True):
            after = self._open(host)
            for kind, how in leaks.grown(before.descriptors, after.descriptors).items():
                self._record.find("leaked descriptors", f"cache-{host.number}, {kind}: {how}")
            for name, how in leaks.more_tasks(before.tasks, after.tasks).items():
                self._record.find("leaked tasks", f"cache-{host.number}, {name}: {how}")
            dead = [pid for pid in children(host.cache.pid or 0) if not is_running(pid)]
            if dead:
                self._record.find("zombies", f"cache-{host.number} has not reaped {leaks.describe(dead)}")
        self._record.notes.setdefault("open", []).append(
            [
                {"before": before, "after": self._open(host)}
                for host, before in zip(self._stack.hosts, self._before, strict=True)
            ]
        )

    def stop(self) -> None:
        """Shut down engines and cache processes cleanly, and report failures."""
        for lane in self._lanes:
            try:
                lane.close()
            except Exception as error:
                self._record.find("dead engine", f"engine {lane.number} does not shut down: {error!r}")
        for host in self._stack.hosts:
            below = children(host.cache.pid or 0)
            self._record.add_instance(host.cache)
            try:
                host.cache.stop()
            except Exception as error:
                self._record.find("failed recovery", f"cache-{host.number} does not stop: {error!r}")
            if left := [pid for pid in below if is_running(pid)]:
                what = f"cache-{host.number} left child processes behind: {leaks.describe(left)}"
                self._record.find("process left behind", what)

    def _open(self, host: Host) -> Open:
        status = host.cache.status()
        return Open(leaks.descriptors(status["pid"]), status["tasks"])

    def wait_for(self, missing: Callable[[], str], what: str) -> None:
        """Wait until ``missing`` returns an empty text; otherwise report that it failed to do ``what``."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while why := missing():
            if time.monotonic() > deadline:
                self._record.find("failed recovery", f"does not {what}: {why}")
                return
            time.sleep(POLL_SECONDS)

    def _is_back(self) -> str:
        """Return which process does not answer yet, and why; empty if all do."""
        for host in self._stack.hosts:
            try:
                status = host.cache.status()
            except ChannelError as error:
                return f"cache-{host.number}: {error}"
            if not status["controller"]["up_to_date"]:
                return f"cache-{host.number} is not registered: {status['controller']}"
            configured = f"127.0.0.1:{host.link.port}"
            peer = next(peer for peer in status["peers"] if peer["address"] == configured)
            if peer["state"] != "connected":
                return f"cache-{host.number}'s peer: {peer}"
        try:
            httpx.get(f"{self._stack.controller.url}/healthz", timeout=5.0, trust_env=False)
            self._stack.redis.command("PING")
        except (httpx.HTTPError, OSError) as error:
            return repr(error)
        return ""

    def _tiers(self) -> str:
        """Return the first tier that is not available; empty if all are."""
        for host in self._stack.hosts:
            for tier in host.cache.status()["tiers"]:
                if not tier["available"]:
                    return f"cache-{host.number}'s tier {tier['name']}: {tier}"
        return ""

    def check_unlisted(self) -> None:
        """Report connections to the address that requests have named, and if none was refused."""
        if connections := self._stack.unlisted.accepted:
            what = f"{connections} connections to an address that only requests have named"
            self._record.find("connection to an unlisted address", what)
        address = f"127.0.0.1:{self._stack.unlisted.port} refused"
        if not any(address in host.cache.log.read_text(errors="replace") for host in self._stack.hosts):
            self._record.find("fault without effect", "no cache process has refused a connection")

    def pins_left(self) -> str:
        """Return what is pinned; empty if nothing is."""
        try:
            answer = httpx.get(f"{self._stack.controller.url}/pins", timeout=5.0, trust_env=False)
        except httpx.HTTPError as error:
            return repr(error)
        pins = answer.json()["pins"]
        return f"the controller has {pins}" if pins else ""

    def beyond_capacity(self) -> str:
        """Return the first disk with more chunks than it may have, or an empty text."""
        for host in self._stack.hosts:
            if (used := host.disk.used()) > DISK_BYTES:
                return f"cache-{host.number}'s chunks take {used} of {DISK_BYTES} bytes on disk"
        return ""

    def _probe(self, probes: Sequence[int]) -> None:
        """Check that each engine hits the chunks stored by itself and by the other."""
        for number, conversation in enumerate(probes):
            own = self._lanes[number % len(self._lanes)]
            other = self._lanes[1 - number % len(self._lanes)]
            self.wait_for(partial(self._ask, own, conversation), f"hit on engine {own.number}")
            what = f"hit on engine {other.number} what engine {own.number} has stored"
            self.wait_for(partial(self._ask, other, conversation), what)

    def _ask(self, lane: Lane, conversation: int) -> str:
        question = self._oracle.question(conversation, 0)
        lane.engine.reset_prefix_cache()
        answer = lane.engine.generate(question.tokens, len(question.answer))
        lane.check(question, answer, f"conversation {conversation}")
        return "" if answer.cached else f"nothing of {len(question.tokens)} tokens is cached"

    def _check_idle(self) -> None:
        for lane in self._lanes:
            try:
                lane.engine.wait_until_free()
            except AssertionError as error:
                self._record.find("leaked blocks", f"engine {lane.number}: {error}")
        for host in self._stack.hosts:
            held: dict[str, int] | str
            try:
                held = leaks.wait_until_idle(host.cache.status)
            except ChannelError as error:
                held = str(error)
            if held:
                self._record.find("leak", f"cache-{host.number} holds {held}")


def log_errors(logs: Sequence[Path], record: Record) -> None:
    """Report errors in the logs."""
    for log in logs:
        for lines in leaks.errors_in(log):
            record.find("error in a log", f"{log}:\n{lines}")
