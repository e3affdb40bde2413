"""benchmarks/hit_rates.py, benchmarks/write_admission.py and benchmarks/simulate.py at a small size."""

from __future__ import annotations

from pathlib import Path

from tests.benchmark import run_benchmark
from tests.simulation.making import mooncake_line


def test_hit_rates(tmp_path: Path) -> None:
    traces = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for trace in traces:
        trace.write_text("".join(mooncake_line(at, [1, 2, at % 3 + 3]) for at in range(9)))
    shown = run_benchmark("hit_rates", *map(str, traces), "--capacity", "50%,100%")
    assert shown.count("| hit rate | 40 % | 100 % |") == 2
    assert "| lru | " in shown
    assert "| Belady's optimum | " in shown


def test_write_admission(tmp_path: Path) -> None:
    """The two chunks that all requests share are written on their second use, the others never."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(mooncake_line(at, [1, 2, at + 3]) for at in range(8)))
    shown = run_benchmark("write_admission", str(trace), "--memory", "50%", "--disk", "100%")
    assert "| 100 % | first_use | 0.5833 | 640.04MiB |" in shown
    assert "|  | second_use | 0.5833 | 128.01MiB |" in shown
    assert "|  | expected | 0.5833 | 128.01MiB |" in shown


def test_simulate() -> None:
    shown = run_benchmark("simulate", "--requests", "400")
    assert "400 requests of 100 chunks, lru" in shown
    assert "peak GB" in shown
    assert shown.count("%") == 4
