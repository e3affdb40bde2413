"""A run: compute the expected answers; for each phase start everything, inject faults, check recovery."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import leaks, stalls
from soak.adapters import Adapter, make_versions
from soak.faults import Faults
from soak.findings import Record
from soak.lane import Lane
from soak.oracle import Oracle
from soak.recovery import Recovery, log_errors
from soak.schedule import HOSTS, Phase, Schedule
from soak.stack import MARK, Stack, make_model, marked, running
from tests.rigs.vllm.engine import Engines

LEFT_SECONDS = 15.0
"""How long a process may take to exit after its parent."""
POLL_SECONDS = 0.2
TRACKER_WARNINGS = "ignore::UserWarning:multiprocessing.resource_tracker"
"""It warns of the semaphores of killed engines, and removes them."""


@dataclass
class Run:
    """One run. ``show(what, done, total)`` reports progress, a few times per second."""

    schedule: Schedule
    folder: Path
    show: Callable[[str, float, float], None]
    record: Record = field(default_factory=Record)

    def run(self) -> None:
        """Execute the run; findings are in :attr:`record`. Kills all its processes, even if interrupted."""
        mark = secrets.token_hex(8)
        hooks = self.folder / "hooks"
        hooks.mkdir(parents=True)
        self.record.log = self.folder / "findings.jsonl"
        os.environ |= {MARK: mark, stalls.FOLDER: str(hooks), "PYTHONWARNINGS": TRACKER_WARNINGS}
        try:
            with _terminable():
                self._run(hooks)
        finally:
            self.show("shutting down", 0, 0)
            multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
            self._kill_leftovers(mark)

    def _run(self, hooks: Path) -> None:
        self.show("creating the model", 0, 0)
        model = make_model(self.folder / "model")
        logs = self.folder / "engines"
        logs.mkdir()
        engines = Engines(logs)
        versions = make_versions(self.folder / "adapter")
        oracle = Oracle(engines, model, versions)
        total = sum(
            len(conversation.exchanges) * (len(versions) if conversation.adapted else 1)
            for conversation in self.schedule.conversations
        )
        done = iter(range(total + 1))
        self.show("starting the engine without a connector", 0, 0)
        oracle.prepare(
            self.schedule.conversations,
            lambda: self.show("computing the expected answers", next(done), total),
        )
        for phase in self.schedule.phases:
            folder = self.folder / phase.transport
            with running(folder, phase.transport) as stack:
                self._phase(phase, stack, engines, model, oracle, versions)
            log_errors([*sorted(folder.glob("cache-*.log")), folder / "controller.log"], self.record)
        self.record.find_without_effect()
        self._record_hooks(hooks)

    def _phase(
        self,
        phase: Phase,
        stack: Stack,
        engines: Engines,
        model: Path,
        oracle: Oracle,
        versions: Sequence[Path],
    ) -> None:
        record = self.record

        def start(number: int) -> Callable[[], Any]:
            arguments = stack.hosts[number].engine()
            return lambda: engines.engine(model, **arguments)

        lanes = [
            Lane(
                number,
                start(number),
                [turn for turn in phase.turns if turn.host == number],
                oracle,
                record,
                Adapter(stack.logs / f"adapter-{number}", versions),
                f"127.0.0.1:{stack.unlisted.port}",
            )
            for number in range(HOSTS)
        ]
        with ExitStack() as cleanup:
            for lane in lanes:
                cleanup.callback(lane.kill)
            record.begin(f"{phase.transport}, before faults")
            for lane in lanes:
                self.show(f"{phase.transport}: starting engines", lane.number, HOSTS)
                lane.open()
            recovery = Recovery(stack, lanes, oracle, record)
            recovery.prepare(phase.probes[0])
            record.begin(phase.transport)
            self._inject_faults(phase, stack, lanes, oracle)
            self._report_stalls(lanes)
            self.show(f"{phase.transport}: recovering", 0, 0)
            recovery.check(phase.probes[1])
            recovery.stop()
            for lane in lanes:
                lane.judge()

    def _inject_faults(self, phase: Phase, stack: Stack, lanes: Sequence[Lane], oracle: Oracle) -> None:
        """Send requests and inject faults for the duration of the phase."""
        stopped = threading.Event()
        faults = Faults(self.schedule.seed, stack, lanes, oracle, self.record)
        threads = [
            threading.Thread(target=lane.run, args=(stopped, phase.seconds), name=f"lane-{lane.number}")
            for lane in lanes
        ]
        threads.append(threading.Thread(target=faults.run, args=(phase,), name="faults"))
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                self.show(phase.transport, min(self.record.now, phase.seconds), phase.seconds)
                time.sleep(POLL_SECONDS)
        finally:
            stopped.set()
            faults.stop()
            for thread in threads:
                thread.join()

    def _report_stalls(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            for pid in lane.pids:
                file = self.folder / "hooks" / f"hooks-{pid}.jsonl"
                if not file.exists():
                    continue
                found, _ = stalls.read_file(file)
                for stall in stalls.outside_pauses(found, lane.pauses):
                    worst = max(stall.hooks, key=stall.hooks.__getitem__)
                    self.record.count(f"steps stalled in {worst}")
                    hooks = ", ".join(
                        f"{name} {1e3 * seconds:.0f} ms" for name, seconds in stall.hooks.items()
                    )
                    self.record.find(
                        "stalled step",
                        f"engine {lane.number} (process {pid}), step {stall.step} was blocked for "
                        f"{1e3 * stall.blocked:.0f} ms of {1e3 * stall.wall:.0f}: {hooks}; "
                        f"{stall.faults} major page faults",
                        self.record.seconds(stall.end),
                    )

    def _record_hooks(self, hooks: Path) -> None:
        """Record the times of each hook, over all engines."""
        merged: dict[str, stalls.HookTimes] = {}
        for file in hooks.glob("*.jsonl"):
            for name, times in stalls.read_file(file)[1].items():
                before = merged.get(name, stalls.HookTimes())
                merged[name] = stalls.HookTimes(before.calls + times.calls, *map(max, before[1:], times[1:]))
        self.record.notes["hooks"] = {name: times._asdict() for name, times in sorted(merged.items())}

    def _kill_leftovers(self, mark: str) -> None:
        deadline = time.monotonic() + LEFT_SECONDS
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        # The resource tracker belongs to this process, and exits with it.
        left = [pid for pid in left if "resource_tracker" not in leaks.describe([pid])]
        if left:
            self.record.find("process left behind", leaks.describe(left))
        for pid in left:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _terminable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
