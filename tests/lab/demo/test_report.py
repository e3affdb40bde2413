"""The demo reports results that differ from the expected ones."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from kvtier.lab.demo.client import Completion
from kvtier.lab.demo.run import Run, problems, table
from kvtier.lab.demo.work import Steps

COLD = Completion(1000, 0, [1, 2, 3], "abc", 2.0, {"host": 0, "disk": 0})
FROM_MEMORY = dataclasses.replace(COLD, cached_tokens=768, ttft=0.1, sources={"host": 768, "disk": 0})
FROM_DISK = dataclasses.replace(COLD, cached_tokens=768, ttft=0.2, sources={"host": 0, "disk": 768})
RUNS = [Run("cold", COLD), Run("memory", FROM_MEMORY, "host"), Run("disk", FROM_DISK, "disk")]


def test_expected_results_have_no_problems() -> None:
    assert problems(RUNS, 768) == []


def test_warm_run_without_hits() -> None:
    assert problems([RUNS[0], Run("memory", COLD, "host")], 768) == ["memory: 0 tokens hit, 768 expected"]


def test_warm_run_from_another_tier() -> None:
    assert problems([RUNS[0], Run("disk", FROM_MEMORY, "disk")], 768) == [
        "disk: 0 tokens came from disk, 768 expected"
    ]


def test_different_tokens_are_a_problem() -> None:
    wrong = dataclasses.replace(FROM_DISK, tokens=[1, 2, 4])
    assert problems([*RUNS[:2], Run("disk", wrong, "disk")], 768) == [
        "disk: its tokens differ from the cold run's"
    ]


def test_hits_of_the_cold_run_are_a_problem() -> None:
    assert problems([Run("cold", FROM_MEMORY), *RUNS[1:]], 768) == ["cold: 768 tokens hit, 0 expected"]


def test_table_compares_each_run_with_the_cold_one() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(table([*RUNS[:2], Run("disk", dataclasses.replace(FROM_DISK, tokens=[]), "disk")]))
    shown = console.file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert rows == [
        ["run", "tokens", "hit tokens", "source tier", "TTFT", "speed-up", "tokens identical"],
        ["cold", "1,000", "0", "-", "2.00 s", "-", "-"],
        ["memory", "1,000", "768", "memory", "0.10 s", "20.0 x", "yes"],
        ["disk", "1,000", "768", "disk", "0.20 s", "10.0 x", "no"],
    ]


def test_steps_are_printed_as_lines_without_a_terminal() -> None:
    console = Console(file=io.StringIO())
    with Steps(console).step("doing it"):
        pass
    begun, done = console.file.getvalue().splitlines()
    assert begun == "… doing it"
    assert done.startswith("✓ doing it (")
