"""Inject the faults of a schedule, each in its own thread, and revert them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvtier.errors import ChannelError
from kvtier.testing.relay import Relay
from soak import links
from soak.commands import Commands
from soak.damage import Damage
from soak.findings import Record
from soak.lane import Lane
from soak.oracle import Oracle
from soak.pressure import Held, held_by_engines, reserve_too_much
from soak.schedule import Fault, Phase
from soak.stack import Host, Stack, is_running
from soak.stalls import FOLDER

SPIN = "while True: pass"
FILL = """
import sys, time
mib, path = int(sys.argv[1]), sys.argv[2]
open("/proc/self/oom_score_adj", "w").write("1000")
memory = bytearray(mib << 20)
for page in range(0, len(memory), 4096):
    memory[page] = 1
with open(path, "wb") as file:
    for _ in range(mib // 2):
        file.write(memory[: 1 << 20])
time.sleep(3600)
"""
CUT_SECONDS = 0.1
"""Interval between two cuts of the same connection."""
HOLDING_SECONDS = 10.0
"""How long to look for a moment at which an engine holds something."""
HOLDING_POLL_SECONDS = 0.05
RECLAIM_SECONDS = 30.0
"""How long it may take to reclaim what a stopped engine holds: its cache process may be stopped, too."""
MEMORY_SHARE = 4
"""At most this fraction (1/n) of the available memory is filled."""


class _Pausable(Protocol):
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Faults:
    """The fault injector of a phase."""

    def __init__(
        self, seed: int, stack: Stack, lanes: Sequence[Lane], oracle: Oracle, record: Record
    ) -> None:
        self._seed = seed
        self._stack = stack
        self._lanes = lanes
        self._commands = Commands(stack.controller.url, oracle, record.count)
        self._record = record
        self._stopped = threading.Event()
        self._locks: dict[str, threading.Lock] = {}
        self._threads: list[threading.Thread] = []
        self._handlers: dict[str, Callable[[Fault], str | int | None]] = {
            "kill-cache": self._kill_cache,
            "stop-cache": lambda fault: self._pause(fault, self._host(fault).cache),
            "kill-engine": lambda fault: self._lane(fault).kill_and_restart(fault.seconds),
            "stop-engine": self._stop_engine,
            "stop-engine-long": self._stop_engine_long,
            "cut-scheduler": self._cut_engine,
            "cut-worker": self._cut_engine,
            "replace-adapter": lambda fault: self._lane(fault).replace_adapter(restart=bool(fault.amount)),
            "kill-redis": self._kill_redis,
            "stop-redis": lambda fault: self._pause(fault, stack.redis),
            "flush-redis": self._flush_redis,
            "kill-controller": self._kill_controller,
            "stop-controller": lambda fault: self._pause(fault, stack.controller),
            "kill-nixl": self._kill_nixl,
            "stop-nixl": self._stop_nixl,
            "flip-bits": self._damage,
            "truncate-files": self._damage,
            "garble-files": self._damage,
            "remove-files": self._damage,
            "plant-files": self._damage,
            "hide-folders": self._damage,
            "remove-folder": self._damage,
            "fill-disk": self._fill_disk,
            "cut-link": self._cut_link,
            "hold-link": self._hold_link,
            "saturate-cpus": self._saturate_cpus,
            "fill-memory": self._fill_memory,
            "jump-clock": self._jump_clock,
            "move-chunks": lambda fault: self._commands.move(fault.amount),
            "operate-chunks": self._operate_chunks,
        }

    def run(self, phase: Phase) -> None:
        """Inject the phase's faults at their times, and wait until all are reverted. Blocks."""
        for fault in phase.faults:
            if self._stopped.wait(max(fault.at - self._record.now, 0.0)):
                break
            thread = threading.Thread(target=self._apply, args=(fault,), name=fault.kind, daemon=True)
            self._threads.append(thread)
            thread.start()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Revert the active faults now, and inject no further ones."""
        self._stopped.set()

    def _apply(self, fault: Fault) -> None:
        with self._locks.setdefault(fault.target, threading.Lock()):
            if self._stopped.is_set():
                return
            applied = self._record.apply(fault)
            try:
                applied.end(self._handlers[fault.kind](fault))
            except Exception as error:
                if not self._stopped.is_set():
                    self._record.find("failed recovery", f"{fault}: {error!r}")
            finally:
                applied.ended = self._record.now

    def _wait(self, fault: Fault) -> None:
        self._stopped.wait(fault.seconds)

    def _host(self, fault: Fault) -> Host:
        return self._stack.hosts[_number(fault)]

    def _lane(self, fault: Fault) -> Lane:
        return self._lanes[_number(fault)]

    def _pause(self, fault: Fault, process: _Pausable) -> None:
        process.pause()
        try:
            self._wait(fault)
        finally:
            process.resume()

    def _check_running(self, name: str, pid: int | None) -> None:
        """Report a process that exited before the soak kills it."""
        if pid is None or not is_running(pid):
            self._record.find("dead process", f"{name}, process {pid}, exited unexpectedly")

    def _kill_cache(self, fault: Fault) -> None:
        cache = self._host(fault).cache
        self._check_running(fault.target, cache.pid)
        self._record.add_instance(cache)
        cache.kill()
        self._wait(fault)
        cache.start()

    def _kill_redis(self, fault: Fault) -> None:
        self._check_running(fault.target, *self._stack.redis.pids)
        self._stack.redis.kill()
        self._wait(fault)
        self._stack.redis.start()

    def _flush_redis(self, fault: Fault) -> None:
        self._stack.redis.command("FLUSHALL")

    def _kill_controller(self, fault: Fault) -> None:
        self._check_running(fault.target, self._stack.controller.pid)
        self._stack.controller.kill()
        self._wait(fault)
        self._stack.controller.start()

    def _nixl_processes(self, fault: Fault) -> list[int]:
        return sorted(self._host(fault).nixl_processes())[: fault.amount]

    def _kill_nixl(self, fault: Fault) -> int:
        nixl_processes = self._nixl_processes(fault)
        _signal(nixl_processes, signal.SIGKILL)
        return len(nixl_processes)

    def _stop_nixl(self, fault: Fault) -> int:
        nixl_processes = self._nixl_processes(fault)
        _signal(nixl_processes, signal.SIGSTOP)
        try:
            self._wait(fault)
        finally:
            _signal(nixl_processes, signal.SIGCONT)
        return len(nixl_processes)

    def _stop_engine(self, fault: Fault) -> None:
        with self._lane(fault).stopped():
            self._wait(fault)

    def _damage(self, fault: Fault) -> int:
        generator = random.Random(f"{fault} {self._seed}")  # noqa: S311 - not for secrets
        damage = Damage(self._host(fault).disk, generator)
        try:
            damaged = damage.apply(fault.kind, fault.amount)
            self._wait(fault)
        finally:
            damage.undo()
        return damaged

    def _cut_engine(self, fault: Fault) -> int:
        """Cut the connection of an engine's scheduler or worker, and each that replaces it."""
        role, until = fault.kind.removeprefix("cut-"), time.monotonic() + fault.seconds
        cut: set[int | None] = set()
        while not self._stopped.is_set():
            engine, path = self._lane(fault).engine, self._host(fault).cache.socket
            cut.add(links.cut(Path(os.environ[FOLDER]), engine.pid, role, path))
            if time.monotonic() >= until:
                break
            self._stopped.wait(CUT_SECONDS)
        return len(cut - {None})

    def _fill_disk(self, fault: Fault) -> str | None:
        disk = self._host(fault).disk
        if disk.medium is None:
            return "skipped: not allowed to mount a small disk"
        disk.fill()
        try:
            self._wait(fault)
        finally:
            disk.empty()
        return disk.medium

    def _cut_link(self, fault: Fault) -> None:
        link: Relay = self._host(fault).link
        link.cut()
        try:
            self._wait(fault)
        finally:
            link.heal()

    def _hold_link(self, fault: Fault) -> None:
        link: Relay = self._host(fault).link
        link.hold_after(0)
        try:
            self._wait(fault)
        finally:
            link.release()

    def _saturate_cpus(self, fault: Fault) -> None:
        command = [sys.executable, "-S", "-c", SPIN]
        self._run_during([command] * fault.amount, fault)

    def _fill_memory(self, fault: Fault) -> str:
        mib = min(fault.amount, _available_mib() // MEMORY_SHARE)
        path = self._stack.hosts[0].folder / "cached"
        try:
            self._run_during([[sys.executable, "-S", "-c", FILL, str(mib), str(path)]], fault)
        finally:
            path.unlink(missing_ok=True)
        return f"{mib} MiB"

    def _run_during(self, commands: Sequence[Sequence[str]], fault: Fault) -> None:
        processes = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
        try:
            self._wait(fault)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def _jump_clock(self, fault: Fault) -> str | None:
        host = self._host(fault)
        if not host.cache.environment:
            return "skipped: libfaketime is not installed"
        host.set_clock(fault.amount)
        try:
            self._wait(fault)
        finally:
            host.set_clock(0)
        return None

    def _operate_chunks(self, fault: Fault) -> int:
        return self._commands.operate(random.Random(f"{fault} {self._seed}"))  # noqa: S311

    def _stop_engine_long(self, fault: Fault) -> int:
        """Stop an engine while it holds leases, or reservations, for longer than others wait for it."""
        until = time.monotonic() + HOLDING_SECONDS
        while True:
            with self._lane(fault).stopped():
                held = self._held(fault)[fault.amount]
                if held or time.monotonic() > until or self._stopped.is_set():
                    self._wait(fault)
                    self._check_reclaimed(fault)
                    return held
            self._stopped.wait(HOLDING_POLL_SECONDS)

    def _held(self, fault: Fault) -> Held:
        try:
            return held_by_engines(self._host(fault).cache.status())
        except ChannelError:
            return Held(0, 0)

    def _check_reclaimed(self, fault: Fault) -> None:
        """Check that another engine gets what the stopped one holds, except memory that this may write to."""
        cache, until = self._host(fault).cache, time.monotonic() + RECLAIM_SECONDS
        # Nothing if the cache process was killed meanwhile.
        before = self._held(fault)
        while not self._stopped.is_set():
            try:
                reserve_too_much(cache.socket)
                held = held_by_engines(cache.status())
                if not any(held):
                    self._record.count("stopped engines reclaimed", int(any(before)))
                    return
                what = f"it still holds {held}"
            except ChannelError as error:
                what = str(error)
            if time.monotonic() > until:
                self._record.find("leak", f"engine {_number(fault)} was stopped for long: {what}")
                return
            self._stopped.wait(1.0)


def _number(fault: Fault) -> int:
    return int(fault.target.rpartition("-")[2])


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _available_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:"))
