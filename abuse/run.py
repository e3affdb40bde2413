"""The rounds of a run, and what is checked after each."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from abuse import hostile
from abuse.engine import CHUNKS, Work
from abuse.hostile import Addresses
from abuse.probing import Probes
from abuse.stack import DISK_BYTES, NAMES, POLL_SECONDS, AbuseError, Process, Stack
from kvtier.errors import ChannelError
from soak import damage
from soak.leaks import wait_until_idle

KINDS = [
    *(f"hostile: {target}" for target in hostile.TARGETS),
    *(f"flood: {flood}" for flood in hostile.FLOODS),
    *(f"kill -9: {name}" for name in NAMES),
    *(f"SIGSTOP: {name}" for name in NAMES),
    *(f"damage: {kind}" for kind in damage.KINDS),
]
RECOVERY_SECONDS = 60.0
"""How long anything may take until it works after a round."""
ATTACK_SECONDS = 60.0
MORE_BYTES = 256 << 20
"""How much memory a process may have beyond what it had before the first round, without the arena."""
MORE_DESCRIPTORS = 48
KEPT = 200
"""Findings that are kept; all are counted."""


@dataclass(frozen=True)
class Finding:
    """A detected defect."""

    round: int
    kind: str
    what: str


@dataclass
class Results:
    """The counts and findings of a run."""

    rounds: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    """Messages, connections, signals or files, by kind."""
    slowest: dict[str, float] = field(default_factory=dict)
    """The longest time in seconds until a process that was not stopped answered, by kind."""
    found: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    first_bytes: dict[str, int] = field(default_factory=dict)
    """Memory of each process before the first round, without the arena."""
    peak_bytes: Counter[str] = field(default_factory=Counter)


class Run:
    """Rounds against running processes."""

    def __init__(self, stack: Stack, seed: int, only: str, results: Results) -> None:
        """``only``: a part of the names of the kinds that are drawn."""
        self.results = results
        self.number = 0
        self.kind = "start"
        self._stack = stack
        self._seed = seed
        self._kinds = [kind for kind in KINDS if only in kind]
        self.work = Work(stack.sockets, results.counts)
        self._targets = [stack.processes[name] for name in NAMES]
        self.check()
        results.first_bytes = {process.name: process.anonymous_bytes() for process in self._targets}
        self._memory = dict(results.first_bytes)
        self._descriptors = {process.name: process.descriptors() for process in self._targets}

    def round(self) -> None:
        """Run the next round, and check everything."""
        deck = list(self._kinds)
        random.Random(f"{self._seed} {self.number // len(deck)}").shuffle(deck)
        self.kind = deck[self.number % len(deck)]
        self.number += 1
        generator = random.Random(f"{self._seed} {self.number}")
        family, _, target = self.kind.partition(": ")
        self.work.start(generator)
        try:
            with self._abuse(family, target, random.Random(f"{self._seed} {self.number} {target}")) as sent:
                self.results.rounds[self.kind] += 1
                self.results.sent[self.kind] += sent
                self.work.stop()
                self.check()
        except AbuseError as error:
            self._find(str(error))
        finally:
            self.work.stop()

    @contextmanager
    def _abuse(self, family: str, target: str, generator: random.Random) -> Iterator[int]:
        number = generator.randrange(2)
        match family:
            case "hostile" | "flood":
                with Probes(self._targets) as probes:
                    sent = self._attack(family, target, self._stack.addresses[number])
                slowest = self.results.slowest
                slowest[self.kind] = max(slowest.get(self.kind, 0.0), probes.slowest)
                yield sent
            case "kill -9" | "SIGSTOP":
                process = self._stack.processes[target]
                for _ in range(2):
                    time.sleep(generator.uniform(0.1, 0.6))
                    self._interrupt(process, family, generator.uniform(0, 2))
                yield 2
            case _:
                time.sleep(generator.uniform(0.1, 0.6))
                process = self._stack.processes[f"cache-{number}"]
                stopped = generator.random() < 0.5
                harm = damage.Damage(self._stack.disks[number], generator)
                if stopped:
                    process.kill()
                try:
                    count = harm.apply(target)
                    if stopped:
                        process.start()
                    time.sleep(0.5)
                    yield count
                finally:
                    harm.undo()

    def _interrupt(self, process: Process, how: str, seconds: float) -> None:
        if how == "kill -9":
            self._check_alive(process)
            process.kill()
            time.sleep(seconds / 4)
            process.start()
            return
        process.pause()
        try:
            time.sleep(seconds)
        finally:
            process.resume()

    def _attack(self, family: str, target: str, addresses: Addresses) -> int:
        """Attack from another process, which then exits: what it has reserved is free only then."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["abuse.hostile"])
        receiver, sender = context.Pipe(duplex=False)
        seed = f"{self._seed} {self.number} attack"
        attacker = context.Process(
            target=_attack, args=(family, target, addresses, seed, sender), daemon=True
        )
        attacker.start()
        sender.close()
        deadline = time.monotonic() + ATTACK_SECONDS
        while attacker.is_alive() and time.monotonic() < deadline:
            self._check_memory()
            attacker.join(POLL_SECONDS)
        attacker.kill()
        attacker.join()
        if attacker.exitcode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the attack has failed: seed {seed!r}, {self.kind}")
        with receiver, suppress(EOFError):
            return int(receiver.recv())
        return 0

    def _find(self, what: str) -> None:
        self.results.found[self.kind] += 1
        if len(self.results.findings) < KEPT:
            self.results.findings.append(Finding(self.number, self.kind, what))

    def check(self) -> None:
        """Check that all processes work, and hold and have written no more than they may."""
        for process in self._targets:
            self._check_alive(process)
            try:
                process.wait_until_it_answers(RECOVERY_SECONDS)
            except AbuseError as error:
                self._find(str(error))
                process.kill()
                process.start()
        for _ in self._stack.sockets:
            self._check_recovery()
        for number in range(len(self._stack.sockets)):
            self._check_idle(number)
            self._check_disk(number)
        self._check_memory()
        for process in self._targets:
            self._check_descriptors(process)
            self._check_log(process)
        for line in self.work.wrong:
            self._find(line)
        self.work.wrong.clear()

    def _check_alive(self, process: Process) -> None:
        if process.exited is not None:
            self._find(f"{process.name} has exited with status {process.exited}: {process.tail()}")
            process.kill()
            process.start()

    def _check_recovery(self) -> None:
        """What a good engine stores now must be hit by it, and by the other cache process may be."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        problem: object = "not hit"
        while time.monotonic() < deadline:
            try:
                socket, number = self.work.store()
                if self.work.read(socket, number) == CHUNKS:
                    for other in self._stack.sockets:
                        self.work.read(other, number)
                    return
            except ChannelError as error:
                problem = error
            time.sleep(POLL_SECONDS)
        self._find(f"no engine can store and load {RECOVERY_SECONDS:g} s after the round: {problem}")

    def _check_idle(self, number: int) -> None:
        try:
            held = wait_until_idle(lambda: self._stack.status(number))
        except ChannelError as error:
            self._find(f"cache-{number} has no status: {error}")
        else:
            if held:
                self._find(f"cache-{number} still holds {held}")

    def _check_disk(self, number: int) -> None:
        def used() -> int:
            total = 0
            for file in self._stack.disks[number].files():
                with suppress(OSError):  # Evicted meanwhile.
                    if file.is_file() and not file.is_symlink():
                        total += file.stat().st_size
            return total

        deadline = time.monotonic() + RECOVERY_SECONDS
        while (size := used()) > DISK_BYTES and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if size > DISK_BYTES:
            self._find(f"the disk of cache-{number} has {size} bytes, over its capacity of {DISK_BYTES}")

    def _check_memory(self) -> None:
        for process in self._targets:
            with suppress(OSError):  # It has exited: checked elsewhere.
                size = process.anonymous_bytes()
                name = process.name
                self.results.peak_bytes[name] = max(self.results.peak_bytes[name], size)
                if self.number and size > self._memory[name] + MORE_BYTES:
                    self._find(f"{name} has {size >> 20} MiB of memory, {self._memory[name] >> 20} at first")
                    self._memory[name] = size

    def _check_descriptors(self, process: Process) -> None:
        if not self.number:
            return
        limit = self._descriptors[process.name] + MORE_DESCRIPTORS
        deadline = time.monotonic() + RECOVERY_SECONDS
        while (count := process.descriptors()) > limit and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if count > limit:
            self._find(f"{process.name} has {count} open descriptors, {limit - MORE_DESCRIPTORS} at first")

    def _check_log(self, process: Process) -> None:
        text = process.log.read_bytes()
        new = text[process.logged :].decode(errors="replace")
        process.logged = len(text)
        if "Traceback (most recent call last)" in new or "CRITICAL" in new:
            self._find(f"a traceback in {process.log}: {new[new.find('Traceback') :][:4000]}")


def _attack(family: str, target: str, addresses: Addresses, seed: str, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    attack = hostile.flood if family == "flood" else hostile.hostile
    sender.send(attack(target, addresses, random.Random(seed)))
