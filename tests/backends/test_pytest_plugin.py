"""The pytest plugin: off by default; if enabled, it detects a blocked loop, leftover tasks and leaks."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import pytest

from kvtier.testing.watch import LoopWatch
from tests.rigs.open_files import no_free_descriptors

CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"
"""

TESTS = """
import asyncio, gc, hashlib, linecache, os, socket, subprocess, threading, time
import anyio, pytest
from kvtier.memory.arena import Arena

pytestmark = pytest.mark.anyio

@pytest.fixture
async def slow_to_set_up():
    time.sleep(0.6)

@pytest.fixture
async def server():
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep_forever)
        yield
        group.cancel_scope.cancel()

async def test_bad_sleeps():
    time.sleep(0.6)

async def test_bad_computes():
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass

async def test_bad_computes_in_c():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)

async def test_bad_waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=0.6)

async def test_bad_waits_for_a_process():
    subprocess.run(["sleep", "0.6"])

async def test_bad_fixture(slow_to_set_up):
    pass

async def test_bad_leaves_a_task():
    global task
    task = asyncio.ensure_future(asyncio.sleep(3600))

async def test_bad_leak(leak_check):
    arena = Arena.create(1 << 20)
    lease = arena.allocate(4096)

async def test_bad_leak_check_without_arena(leak_check):
    pass

async def test_good_awaits():
    await anyio.sleep(0.3)

async def test_good_works_in_small_steps():
    for _ in range(100):
        time.sleep(0.004)
        await anyio.sleep(0)

async def test_good_blocks_a_thread():
    await anyio.to_thread.run_sync(time.sleep, 0.3)

async def test_good_fixture(server):
    await anyio.sleep(0)

async def test_good_task_that_is_about_to_end():
    asyncio.ensure_future(asyncio.sleep(0.05))

async def test_good_collects_what_takes_long():
    class Slow:
        def __del__(self):
            end = time.thread_time() + 0.5
            while time.thread_time() < end:
                pass
    slow = Slow()
    slow.itself = slow
    del slow
    gc.collect()

async def test_good_reads_source_for_a_traceback(tmp_path):
    pipe = tmp_path / "slow.py"
    os.mkfifo(pipe)
    threading.Timer(0.6, lambda: pipe.write_text("slow = 1")).start()
    linecache.getline(str(pipe), 1)

@pytest.mark.loop_may_block("on purpose")
async def test_good_may_block():
    time.sleep(0.6)

async def test_good_no_leak(leak_check):
    arena = Arena.create(1 << 20)
    lease = arena.allocate(4096)
    lease.release()

def test_good_is_not_on_the_loop():
    time.sleep(0.2)
"""


def run_pytest(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    result = subprocess.run(
        [*command, *options, str(folder)], cwd=folder, capture_output=True, text=True, check=False
    )
    return result.stdout


def results(output: str) -> dict[str, set[str]]:
    """Return the names of the tests by their outcome in the summary."""
    summary = output.partition("short test summary info")[2]
    found: dict[str, set[str]] = {}
    for line in summary.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in {"PASSED", "FAILED", "ERROR"}:
            found.setdefault(kind, set()).add(rest.partition("::")[2].partition(" ")[0])
    return found


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checked")
    (folder / "pytest.ini").write_text("[pytest]\nkvtier_checks = true\naddopts = --strict-markers\n")
    return run_pytest(folder)


def test_detects_blocked_loops_tasks_and_leaks(checked: str) -> None:
    found = results(checked)
    bad = {f"test_bad_{name}" for name in ("sleeps", "computes", "computes_in_c", "waits_for_a_lock")}
    bad |= {f"test_bad_{name}" for name in ("waits_for_a_process", "fixture", "leaves_a_task", "leak")}
    bad |= {"test_bad_leak_check_without_arena"}
    assert found["ERROR"] == bad
    assert {name for name in found["PASSED"] if name.startswith("test_good")} == {
        line.removeprefix("async ").removeprefix("def ").partition("(")[0]
        for line in TESTS.splitlines()
        if "def test_good" in line
    }
    assert "FAILED" not in found


def test_report_shows_duration_and_stack(checked: str) -> None:
    assert "the event loop was blocked for" in checked
    assert "(limit: 200 ms) here:" in checked
    assert "hashlib.pbkdf2_hmac(" in checked, "the stack does not show the blocking call"
    assert re.search(r"\n +Task-\d+: sleep\(\) at .*tasks\.py:\d+\n", checked), "the place is missing"
    assert "1 leases on 4096 bytes of an arena are open" in checked
    assert "leak_check saw no arena" in checked


def test_does_nothing_by_default(tmp_path: Path) -> None:
    found = results(run_pytest(tmp_path, "-k", "not leak"))
    assert set(found) == {"PASSED"}
    assert "test_bad_sleeps" in found["PASSED"]


def test_imports_no_heavy_modules() -> None:
    code = "import sys, pytest; before = set(sys.modules); import kvtier.testing.plugin\n" + (
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'vllm', 'numpy', 'hypothesis', 'transformers'}), "
        "[name for name in sys.modules if name in ('kvtier.testing.checks', 'kvtier.testing.backend')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] []"


@pytest.mark.anyio
@pytest.mark.loop_may_block("blocks it on purpose")
async def test_watch_reports_duration_and_stack() -> None:
    watch = LoopWatch()
    watch.start()
    await anyio.sleep(0.05)
    time.sleep(0.5)  # noqa: ASYNC251 - blocks on purpose
    await anyio.sleep(0.05)
    watch.stop()
    (block,) = (block for block in watch.blocks if "time.sleep(0.5)" in block.stack)
    assert 0.1 < block.seconds < 5


@pytest.mark.anyio
@pytest.mark.loop_may_block("blocks it on purpose")
async def test_watch_goes_on_without_free_descriptors() -> None:
    """It cannot look whether threads sleep, so only the CPU time counts."""
    watch = LoopWatch()
    watch.start()
    with no_free_descriptors():
        await anyio.sleep(0.05)
        time.sleep(0.5)  # noqa: ASYNC251 - blocks on purpose
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass
        await anyio.sleep(0.05)
    watch.stop()
    (block,) = watch.blocks
    assert "test_watch_goes_on_without_free_descriptors" in block.stack  # Its source cannot be read.


@pytest.mark.anyio
async def test_watch_ignores_a_loop_that_waits_for_a_core() -> None:
    """Like ``Thread.start``: the other thread is ready, but waits for a core or the GIL."""
    release = threading.Lock()
    release.acquire()

    def compute() -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        release.release()

    watch = LoopWatch()
    watch.start()
    await anyio.sleep(0.02)
    thread = threading.Thread(target=compute)
    thread.start()
    release.acquire()
    thread.join()
    await anyio.sleep(0.02)
    watch.stop()
    assert watch.blocks == []


CHILD = """
import os, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
while time.process_time() < 0.1:
    pass
"""
SPINNER = "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"


@pytest.mark.anyio
async def test_watch_ignores_a_loop_whose_child_waits_for_a_core() -> None:
    """The child needs 0.1 s of CPU time but waits for a core, while the loop waits for the child."""
    command = [sys.executable, "-S", "-c", SPINNER]
    others = [subprocess.Popen(command) for _ in range(12)]  # noqa: ASYNC220
    watch = LoopWatch(0.3)
    try:
        watch.start()
        await anyio.sleep(0.05)
        began = time.monotonic()
        subprocess.run([sys.executable, "-S", "-c", CHILD], check=True)  # noqa: ASYNC221
        took = time.monotonic() - began
        await anyio.sleep(0.05)
        watch.stop()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert took > 0.5, "the child did not have to wait"
    assert watch.blocks == []


@pytest.mark.anyio
@pytest.mark.loop_may_block("blocks it on purpose")
@pytest.mark.parametrize("collecting", [True, False])
async def test_no_garbage_is_collected_while_frames_are_taken(
    collecting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CPython 3.11, a finalizer in it and a thread that starts would wait for each other for ever."""
    meanwhile: list[bool] = []
    monkeypatch.setattr(sys, "_current_frames", lambda: meanwhile.append(gc.isenabled()) or {})
    if not collecting:
        gc.disable()
    watch = LoopWatch()
    try:
        watch.start()
        while not meanwhile:
            time.sleep(0.01)  # noqa: ASYNC251 - blocks on purpose
        watch.stop()
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert set(meanwhile) == {False}
