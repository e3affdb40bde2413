"""benchmarks/hit_rates.py at a small size."""

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
