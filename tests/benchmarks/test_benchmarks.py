"""Every benchmark runs at a small size, each in its own process: they stop processes and change logging."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.native import cuda_problem
from tests.lab.simulation.making import mooncake_line
from tests.rigs.servers import RedisServer, S3Server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
CAP_SYS_ADMIN = 21
LIMIT_SECONDS, ENGINES_SECONDS = 280, 900
LMCACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"


def is_admin() -> bool:
    """Return whether folders can be mounted, and namespaces be created."""
    capabilities = re.search(r"^CapEff:\t(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert capabilities is not None
    return bool(int(capabilities[1], 16) >> CAP_SYS_ADMIN & 1)


def may_mount() -> bool:
    """Return whether a folder can be mounted with FUSE."""
    return is_admin() and os.access("/dev/fuse", os.W_OK) and find_library("fuse3") is not None


NAMES = sorted(
    path.parent.name if path.stem == "__main__" else path.stem
    for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py"))
    if re.search(r"\bparse\(", path.read_text()) and path.stem != "common"
)
"""Those with the option ``--small``: all that are not part of another one."""
TRACES = ("hit_rates", "misses", "replay_vllm", "retention", "whatif", "write_admission")
OPTIONS = {
    "codec_first_tokens": ["--media", "s3", "peer"],
    "compare": ["--rows", "cpu", "disk", "direct", "tokens"],
    "peers": ["--transport", "tcp", "--peers", "2"],
    "pools": ["--pool", "redis", "--pool", "s3"],
    "push": ["--transport", "tcp"],
    "move": ["--transport", "tcp"],
}
LINKS = (
    is_admin() and all(map(shutil.which, ("ip", "tc", "redis-server"))) and find_spec("vllm") is not None,
    "needs vLLM, ip, tc, redis-server and permission to create a network namespace",
)
NEEDS = {
    "compare": (any(LMCACHE.glob("lmcache-*/installed")), "python -m benchmarks.compare installs LMCache"),
    "codec_first_tokens": (LINKS[0] and S3Server.missing() is None, f"{LINKS[1]}, and SeaweedFS"),
    "codec_links": LINKS,
    "faults": (may_mount(), "needs /dev/fuse, libfuse 3 and permission to mount"),
    "gpu": (not cuda_problem(), "needs a GPU"),
    "gpu_engine": (not cuda_problem(), "needs a GPU"),
    "controller_failover": (RedisServer.missing() is None, str(RedisServer.missing())),
    "pools": (RedisServer.missing() is None, str(RedisServer.missing())),
    **{
        name: (find_spec("vllm") is not None, "needs vLLM")
        for name in ("codec_quality", "codecs", "cold_loads", "kv_events", "load_or_compute", "steps")
    },
}
ENGINES = (
    *("codec_first_tokens", "disaggregated", "engine", "faults", "gpu_engine", "no_hits", "replay_vllm"),
    *("serving", "states", "verify"),
)
SLOW = (
    *ENGINES,
    "busy",
    "codec_links",
    "codec_quality",
    "cold_loads",
    "compare",
    "controller_failover",
    "controller_instances",
    "controller_rebuild",
    "growth",
    "kv_events",
    "load_or_compute",
    "move",
    "peers",
    "proxy_streams",
    "steps",
    "traces",
)
ROWS = {
    "busy": ["first load from disk", "lookup of 32,768 tokens", "retrieve 8 MiB", "loop blocked, wall, p99"],
    "catalog": ["add a chunk", "prefix of 128 chunks", "the 1024 coldest"],
    "codec_first_tokens": ["S3, 10 Gb/s", "peer, 10 Gb/s"],
    "codec_links": ["25 Gb/s, stored", "25 Gb/s, retrieved", "25 Gb/s, fetched"],
    "codec_quality": ["identity", "fp8", "int8", "int4"],
    "codecs": ["bfloat16", "float32", "fp8 e5m2"],
    "controller": ["lookups/s, known keys", "POST /lookup", "from another process", "bytes per key"],
    "controller_failover": ["none", "leader killed"],
    "controller_instances": ["all connected", "GET /instances", "all back after"],
    "controller_rebuild": ["million reports/s", "bytes per key", "POST /lookup meanwhile"],
    "copies": ["Llama 3.1 8B, bf16, save"],
    "disk": ["write 4 x 1MiB", "cold read 4 x 1MiB"],
    "growth": ["memory: put a chunk", "disk: index", "replace the coldest", "lookup of 32,768 tokens"],
    "look_up": ["lookup: hashing and the socket", "limit: plain round trip", "confirm all chunks"],
    "memory": ["cpu put 32 x 256 KiB", "cpu get 8 x 1024 KiB", "hugepage adopt 32 x 256 KiB"],
    "metrics": ["count a batch of 128 chunks", "scrape, 2,000 chunks held", "of which reading the values"],
    "move": ["4 x 1,024 KiB"],
    "peers": ["PeersBackend.held_prefix, 2 peers", "lookup until answered, 2 peers", "4 x 2 MiB, 2 peers"],
    "pools": ["put 1 x 1 MiB", "get 4 x 1 MiB", "contains"],
    "proxy": ["prefilled by another engine"],
    "push": ["4 x 2 MiB"],
    "recording": ["in the event loop", "in the thread", "% of a core", "MB an hour"],
    "serving": ["plain", "kvtier"],
    "steps": ["stopped: first step", "killed: first step", "until it stores again", "nice 5, spinning"],
    "transports": ["read 4 in flight", "write 1 in flight", "p99"],
}
"""Parts of the first cells of the rows that a benchmark shows at least."""


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[object]]


def run(name: str, folder: Path, *options: str) -> list[Table]:
    """Run ``python -m benchmarks.NAME --small``; return its tables. Fails the test if the benchmark fails."""
    file = folder / "tables"
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--small", *options],
        cwd=ROOT,
        # The threads of torch spin: with small sizes, they would take most of the time.
        env={**os.environ, "OMP_NUM_THREADS": "1", "BENCHMARK_TABLES": str(file)},
        capture_output=True,
        text=True,
        timeout=ENGINES_SECONDS if name in ENGINES else LIMIT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [Table(*json.loads(line)) for line in file.read_text().splitlines()]


def marked(name: str) -> object:
    met, reason = NEEDS.get(name, (True, ""))
    marks = [pytest.mark.skipif(not met, reason=reason)]
    marks += [pytest.mark.slow] * (name in SLOW)
    if name in ENGINES:
        marks += [pytest.mark.vllm, pytest.mark.timeout(ENGINES_SECONDS + 20)]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in NAMES])
def test_shows_tables(name: str, tmp_path: Path) -> None:
    options = OPTIONS.get(name, [])
    if name in TRACES:
        trace = tmp_path / "trace.jsonl"
        trace.write_text("".join(mooncake_line(at, [1, 2, at + 3]) for at in range(40)))
        options = [str(trace)]
    tables = run(name, tmp_path, *options)
    rows = [row for table in tables for row in table.rows]
    assert rows
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    firsts = [str(row[0]) for row in rows]
    assert not [part for part in ROWS.get(name, []) if not any(part in first for first in firsts)]


def test_make_bench_knows_every_benchmark() -> None:
    """Each is part of ``python -m benchmarks``, or it is written down why not."""
    source = (FOLDER / "__main__.py").read_text()
    assert {name for name in NAMES if f'"{name}' not in source} == set()


def test_pages_are_what_the_renderer_makes() -> None:
    command = [sys.executable, "-m", "benchmarks.render", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["fails", "metrics"])
def test_failed_benchmark_is_listed_and_keeps_its_result(name: str, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    output.write_text('{"fails": {"date": "2026-11-01", "tables": []}}')
    command = [sys.executable, "-m", "benchmarks", "--small", "--output", str(output), "fails", name]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "failed: fails: " in result.stdout
    assert set(json.loads(output.read_text())) == {"fails", name}


@pytest.mark.parametrize("buffered", [[], ["--buffered"]])
def test_disk_leaves_no_files(tmp_path: Path, buffered: list[str]) -> None:
    written = tmp_path / "written"
    written.mkdir()
    speeds, costs = run("disk", tmp_path, "--folder", str(written), *buffered)
    assert ("buffered" in speeds.title) == bool(buffered)
    assert len(speeds.rows) == len(costs.rows) == 8, "one row for each depth, size and direction"
    assert list(written.iterdir()) == []


def test_hit_rates_of_each_trace(tmp_path: Path) -> None:
    traces = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for trace in traces:
        trace.write_text("".join(mooncake_line(at, [1, 2, at % 3 + 3]) for at in range(9)))
    tables = run("hit_rates", tmp_path, *map(str, traces))
    assert [table.columns for table in tables] == [["", "40 %", "100 %"]] * 4
    assert [table.rows[0][0] for table in tables] == ["lru"] * 4
    assert [table.rows[-1][0] for table in tables[::2]] == ["Belady's optimum"] * 2


def test_admission_writes_shared_chunks_on_their_second_use(tmp_path: Path) -> None:
    """Two chunks are part of all requests, the others of one each."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(mooncake_line(at, [1, 2, at + 3]) for at in range(8)))
    (table,) = run("write_admission", tmp_path, str(trace))
    assert [row[1:4] for row in table.rows] == [
        ["first_use", 0.5833, "640.04MiB"],
        ["second_use", 0.5833, "128.01MiB"],
        ["expected", 0.5833, "128.01MiB"],
    ]


def test_hints_cover_the_distance_to_the_optimum(tmp_path: Path) -> None:
    """There is room for one prompt: soon the one of every other request, as in the optimum.

    ``adaptive`` hits it, too, but neither ``lru`` nor ``arc``.
    """
    trace = tmp_path / "trace.jsonl"
    numbers = [at % 20 // 2 + 1 if at % 2 else 0 for at in range(200)]
    prompts = [[4 * number + chunk for chunk in range(4)] for number in numbers]
    trace.write_text("".join(mooncake_line(9_000 * at, prompt) for at, prompt in enumerate(prompts)))
    hinted, leads = run("retention", tmp_path, str(trace))
    shares = {str(name): float(str(share)) for name, share in hinted.rows}
    assert shares["in 100% of the requests, exact"] == pytest.approx(0.97, abs=0.005)
    assert shares["no hints"] <= shares["in 100% of the requests, exact"]
    assert [row[1:] for row in leads.rows][-1] == [50.0, 0.0]


def test_replay_plan_is_a_part_of_the_trace(tmp_path: Path) -> None:
    """Blocks become chunks of 32 tokens, equal ids are equal tokens, and times are divided."""
    trace = tmp_path / "trace.jsonl"
    sessions = {"a": [1, 2, 3, 4], "b": [1, 2, 9, 8], "c": [7, 7]}
    lines = [
        mooncake_line(1000 * at, ids[: 2 + at], session=name)
        for at in range(5)
        for name, ids in sessions.items()
    ]
    trace.write_text("".join(lines))
    options = ["--sessions", "2", "--start", "1", "--span", "3", "--speed", "2", "--blocks", "2"]
    plan = replay_plan(trace, *options)
    assert [time for time, _, _, _ in plan] == [0, 0, 0.5, 0.5, 1, 1]
    assert len({session for _, session, _, _ in plan}) == 2
    assert [chunks for _, _, chunks, _ in plan[:3]] == [[2, 3], [2, 9], [2, 4]]
    first, second, third = (prompt for _, _, _, prompt in plan[:3])
    assert first[:32] == second[:32] == third[:32]
    assert first[32:64] != second[32:64]
    assert first[64:] != third[64:]


def test_replayed_sessions_without_a_name_are_those_of_the_first_block(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(mooncake_line(at, [at % 3, 10 + at]) for at in range(9)))
    plan = replay_plan(trace, "--sessions", "2", "--start", "0", "--blocks", "1")
    assert {chunks[0] for _, _, chunks, _ in plan} == {0, 1}


def replay_plan(trace: Path, *options: str) -> list[tuple[float, object, list[int], list[int]]]:
    command = [sys.executable, "-m", "benchmarks.replay_vllm", str(trace), "--plan", *options]
    plan = json.loads(subprocess.check_output(command, cwd=ROOT, text=True))
    return [(request["time"], request["session"], request["chunks"], request["prompt"]) for request in plan]
