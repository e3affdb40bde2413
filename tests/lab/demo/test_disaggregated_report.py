"""The disaggregated demo reports results that differ from the expected ones."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from kvtier.lab.demo.client import Completion
from kvtier.lab.demo.disaggregated import Result, problems, table
from kvtier.lab.demo.disaggregated_serving import Pushed

ALONE = Completion(1000, 0, [1, 2, 3], "abc", 2.0, {}, [0.02, 0.04])
TOGETHER = dataclasses.replace(ALONE, cached_tokens=999, ttft=2.5, gaps=[0.01, 0.01])
PUSHED = Pushed(2000, 4_000_000, 0.001)
GOOD = Result([ALONE, ALONE], [TOGETHER, TOGETHER], 1, PUSHED)


def test_expected_results_have_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"pushed": Pushed(0, 0, 0.0)},
            "no KV was transferred from the prefiller to the decoder",
        ),
        (
            {"together": [TOGETHER, dataclasses.replace(TOGETHER, tokens=[1, 2, 4])]},
            "prompt 2: its tokens differ from those of one engine",
        ),
        (
            {"together": [dataclasses.replace(TOGETHER, cached_tokens=768), TOGETHER]},
            "prompt 1: 768 tokens hit at the decoder, 999 expected",
        ),
        (
            {"alone": [ALONE, dataclasses.replace(ALONE, cached_tokens=512)]},
            "prompt 2: 512 tokens hit at one engine, 0 expected",
        ),
    ],
)
def test_each_problem_is_described(changes: dict[str, object], problem: str) -> None:
    assert problems(dataclasses.replace(GOOD, **changes)) == [problem]  # type: ignore[arg-type]


def test_table_compares_both_ways() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(table(GOOD))
    shown = console.file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    titles = ["run", "TTFT", "between tokens", "longest pause", "tokens pushed", "hit tokens", "GB/s"]
    assert rows[:3] == [
        [*titles, "identical"],
        ["one engine", "2.00 s", "30.0 ms", "40 ms", "-", "-", "-", "-"],
        ["prefiller and decoder", "2.50 s", "10.0 ms", "10 ms", "2,000", "1,998", "4.00", "yes"],
    ]
    assert "2 prompts of 1,000 tokens" in shown


def test_table_shows_different_tokens() -> None:
    console = Console(file=io.StringIO(), width=140)
    other = dataclasses.replace(TOGETHER, tokens=[])
    console.print(table(dataclasses.replace(GOOD, together=[TOGETHER, other])))
    (row,) = [line for line in console.file.getvalue().splitlines() if "prefiller and" in line]
    assert row.split("│")[-2].strip() == "no"
