"""Both demos report results that differ from the expected ones, and show all of them in a table."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from kvtier.lab.demo import disaggregated, run
from kvtier.lab.demo.client import Completion
from kvtier.lab.demo.disaggregated import Pushed, Result
from kvtier.lab.demo.run import Run
from kvtier.lab.demo.work import Steps

COLD = Completion(1000, 0, [1, 2, 3], 2.0, {"host": 0, "disk": 0})
FROM_MEMORY = replace(COLD, cached_tokens=768, ttft=0.1, sources={"host": 768, "disk": 0})
FROM_DISK = replace(COLD, cached_tokens=768, ttft=0.2, sources={"host": 0, "disk": 768})
RUNS = [Run("cold", COLD), Run("memory", FROM_MEMORY, "host"), Run("disk", FROM_DISK, "disk")]

ALONE = Completion(1000, 0, [1, 2, 3], 2.0, {}, [0.02, 0.04])
TOGETHER = replace(ALONE, cached_tokens=999, ttft=2.5, gaps=[0.01, 0.01])
GOOD = Result([ALONE, ALONE], [TOGETHER, TOGETHER], 1, Pushed(2000, 4_000_000, 0.001))


def rows_of(table: Table) -> list[list[str]]:
    """Return the cells of a table as shown, with its titles."""
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        (RUNS, []),
        ([RUNS[0], Run("memory", COLD, "host")], ["memory: 0 tokens hit, 768 expected"]),
        ([RUNS[0], Run("disk", FROM_MEMORY, "disk")], ["disk: 0 tokens came from disk, 768 expected"]),
        (
            [*RUNS[:2], Run("disk", replace(FROM_DISK, tokens=[1, 2, 4]), "disk")],
            ["disk: its tokens differ from the cold run's"],
        ),
        ([Run("cold", FROM_MEMORY), *RUNS[1:]], ["cold: 768 tokens hit, 0 expected"]),
    ],
    ids=["none", "no hits", "another tier", "tokens", "hits of the cold run"],
)
def test_problems_of_runs_are_described(runs: list[Run], found: list[str]) -> None:
    assert run.problems(runs, 768) == found


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (GOOD, []),
        (
            replace(GOOD, pushed=Pushed(0, 0, 0.0)),
            ["no KV was transferred from the prefiller to the decoder"],
        ),
        (
            replace(GOOD, together=[TOGETHER, replace(TOGETHER, tokens=[1, 2, 4])]),
            ["prompt 2: its tokens differ from those of one engine"],
        ),
        (
            replace(GOOD, together=[replace(TOGETHER, cached_tokens=768), TOGETHER]),
            ["prompt 1: 768 tokens hit at the decoder, 999 expected"],
        ),
        (
            replace(GOOD, alone=[ALONE, replace(ALONE, cached_tokens=512)]),
            ["prompt 2: 512 tokens hit at one engine, 0 expected"],
        ),
    ],
    ids=["none", "not pushed", "tokens", "decoder", "one engine"],
)
def test_problems_of_two_engines_are_described(result: Result, found: list[str]) -> None:
    assert disaggregated.problems(result) == found


def test_table_compares_each_run_with_the_cold_one() -> None:
    assert rows_of(run.table([*RUNS[:2], Run("disk", replace(FROM_DISK, tokens=[]), "disk")])) == [
        ["run", "tokens", "hit tokens", "source tier", "TTFT", "speed-up", "tokens identical"],
        ["cold", "1,000", "0", "-", "2.00 s", "-", "-"],
        ["memory", "1,000", "768", "memory", "0.10 s", "20.0 x", "yes"],
        ["disk", "1,000", "768", "disk", "0.20 s", "10.0 x", "no"],
    ]


def test_table_compares_one_engine_with_two() -> None:
    table = disaggregated.table(GOOD)
    titles = ["run", "TTFT", "between tokens", "longest pause", "tokens pushed", "hit tokens", "GB/s"]
    assert rows_of(table) == [
        [*titles, "identical"],
        ["one engine", "2.00 s", "30.0 ms", "40 ms", "-", "-", "-", "-"],
        ["prefiller and decoder", "2.50 s", "10.0 ms", "10 ms", "2,000", "1,998", "4.00", "yes"],
    ]
    assert str(table.caption).startswith("2 prompts of 1,000 tokens")
    different = replace(GOOD, together=[TOGETHER, replace(TOGETHER, tokens=[])])
    assert rows_of(disaggregated.table(different))[2][-1] == "no"


def test_steps_are_printed_as_lines_without_a_terminal() -> None:
    console = Console(file=io.StringIO())
    with Steps(console).step("doing it"):
        pass
    begun, done = console.file.getvalue().splitlines()
    assert begun == "… doing it"
    assert done.startswith("✓ doing it (")
