"""The benchmarks of simulations, at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.retention import Hinted, gaps_of, hints_of
from kvtier.lab.simulation.trace import Trace
from tests.lab.simulation.making import mooncake_line
from tests.rigs.benchmark import run_benchmark


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


def test_retention(tmp_path: Path) -> None:
    """There is room for one prompt: soon the one of every other request, as in the optimum.

    ``adaptive`` hits it, too, but neither ``lru`` nor ``arc``.
    """
    trace = tmp_path / "trace.jsonl"
    numbers = [at % 20 // 2 + 1 if at % 2 else 0 for at in range(200)]
    prompts = [[4 * number + chunk for chunk in range(4)] for number in numbers]
    trace.write_text("".join(mooncake_line(9_000 * at, prompt) for at, prompt in enumerate(prompts)))
    shown = run_benchmark("retention", str(trace), "--percent", "10,100", "--hinted-percent", "10")
    assert "| hint `resume` | 10 % |" in shown
    assert "| in 100% of the requests, exact | 97% |" in shown
    assert "| tenth | 10 % | 100 % |" in shown
    assert "| 10 | +50.0 | +0.0 |" in shown


def test_hints_of_retention(tmp_path: Path) -> None:
    """A prompt whose last chunk but one is asked for again comes back. Others have no hint."""
    path = tmp_path / "trace.jsonl"
    prompts = [[1, 2, 3], [7, 8, 9], [1, 2, 3, 4], [7, 5, 6]]
    path.write_text("".join(mooncake_line(10_000 * at, prompt) for at, prompt in enumerate(prompts)))
    gaps = gaps_of(Trace.read(path, 512))
    assert gaps == {0: pytest.approx(20.0)}
    (hint,) = hints_of(gaps, Hinted(1, 0.5)).values()
    assert hint.resume != pytest.approx(20.0)
    assert hint.resume == pytest.approx(20.0, rel=0.5)
    assert hints_of(gaps, Hinted(0, 0)) == {}
