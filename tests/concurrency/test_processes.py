"""Child processes: what they have does not depend on the thread that starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.concurrency import placement, processes
from kvtier.concurrency.placement import Placement

BIND = 2
REPORT = """
import json, os, resource, signal
from kvtier.concurrency.processes import settle
from kvtier.concurrency.placement import Placement
settle()
umask = os.umask(0)
print(json.dumps({
    "placement": Placement.current(),
    "umask": umask,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "scheduler": os.sched_getscheduler(0),
    "compute": [name for name in os.environ if name.startswith(("OMP_", "KMP_", "GOMP_", "MKL_", "_KV"))],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "folder": os.getcwd(),
}))
"""
HOSTILE = """
import os, resource, signal, sys
from kvtier.concurrency import placement, processes
import kvtier.integrations.vllm  # As vLLM does in the server's first process.
server = placement.Placement.current()
# As vLLM and OpenMP do in a worker.
os.sched_setaffinity(0, {max(server.cpus)})
bound = placement.Placement([max(server.cpus)], 2, [placement.allowed_nodes()[0]])
bound.apply()
assert placement.Placement.current() == bound
os.environ.update(OMP_NUM_THREADS="1", OMP_PLACES="{0}", KMP_BLOCKTIME="5", GOMP_CPU_AFFINITY="0", MKL_X="1")
os.umask(0)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if os.getuid() == 0:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
child = processes.start(processes.python("-c", sys.argv[1]))
sys.exit(child.wait())
"""


@pytest.fixture
def report() -> dict[str, Any]:
    """Start a child from a process that is bound as a worker of vLLM is."""
    command = [sys.executable, "-c", HOSTILE, REPORT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_child_has_the_servers_placement_and_private_surroundings(report: dict[str, Any]) -> None:
    assert Placement(*report["placement"]) == Placement.current()
    assert report["umask"] == 0o077
    assert report["blocked"] == []
    soft, hard = report["files"]
    assert soft == hard
    assert report["scheduler"] == os.SCHED_OTHER
    assert report["compute"] == []
    assert report["descriptors"] == [0, 1, 2]
    assert report["folder"] == str(Path.cwd())


def test_limits_of_the_operator_are_kept() -> None:
    """As ``taskset`` and ``numactl --membind`` set them for the server."""
    cpu, nodes = max(os.sched_getaffinity(0)), placement.allowed_nodes()
    own = Placement([cpu], BIND, nodes[:1])
    code = f"""
import sys
from kvtier.concurrency import placement, processes
placement.Placement{tuple(own)!r}.apply()
import kvtier.integrations.vllm
sys.exit(processes.start(processes.python("-c", sys.argv[1])).wait())
"""
    result = subprocess.run([sys.executable, "-c", code, REPORT], capture_output=True, text=True, check=True)
    assert Placement(*json.loads(result.stdout)["placement"]) == own


def test_server_is_remembered_through_processes_of_multiprocessing() -> None:
    code = """
import multiprocessing, os
def main(queue):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    placement.remember()
    queue.put(placement.of_server())
if __name__ == "__main__":
    from kvtier.concurrency import placement
    placement.remember()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=main, args=(queue,))
    process.start()
    assert queue.get() == placement.Placement.current()
    process.join()
    # A program that is started otherwise is a server of its own.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    placement.remember()
    assert placement.of_server() == placement.Placement.current()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def _own_thread() -> Iterator[None]:
    """Undo changes to the main thread's placement."""
    before = Placement.current()
    yield
    before.apply()


@pytest.mark.usefixtures("_own_thread")
def test_memory_is_spread_over_nodes_unless_the_operator_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "allowed_nodes", lambda: [0])
    assert placement.spread_memory().policy == placement.DEFAULT
    # The kernel ignores nodes that do not exist, as long as one does.
    monkeypatch.setattr(placement, "allowed_nodes", lambda: [0, 1])
    assert placement.spread_memory().describe()["memory_policy"] == "interleave"
    Placement(sorted(os.sched_getaffinity(0)), BIND, [0]).apply()
    assert placement.spread_memory().describe()["memory_policy"] == "bind"


def test_ignored_signals_are_accepted() -> None:
    code = (
        "import signal\n"
        "from kvtier.concurrency.processes import settle\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN\n"
        "settle()\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN\n"
    )
    ignoring = ["/bin/sh", "-c", 'trap "" TERM HUP; exec "$@"', "sh"]
    subprocess.run([*ignoring, sys.executable, "-c", code], check=True)


def test_starting_thread_keeps_its_placement() -> None:
    found: list[Placement] = []

    def start() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        processes.start(["true"]).wait()
        found.append(Placement.current())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert found[0].cpus == [max(os.sched_getaffinity(0))]


def test_processors_are_listed_as_ranges() -> None:
    assert placement.list_format([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert placement.list_format([]) == ""
