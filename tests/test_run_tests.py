"""tools/run_tests.py: which runs of pytest there are, and when they have passed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.chdir(TOOLS.parent)
    return importlib.import_module("run_tests")


def test_tests_with_vllm_have_a_run_of_their_own(runs: ModuleType) -> None:
    connector, others = runs.commands(["-n", "3", "-k", "soak"])
    assert connector[-2:] == ["-n0", "tests/integrations"]
    assert others[3:] == ["-n", "3", "-k", "soak"]


@pytest.mark.parametrize("path", ["tests/vllm", "tests/test_house.py", "tests/vllm/test_reuse.py::test_some"])
def test_path_is_all_that_runs(runs: ModuleType, path: str) -> None:
    [command] = runs.commands(["-n0", path])
    assert command[3:] == ["-n0", path]


@pytest.mark.parametrize(
    ("codes", "passed"), [([0, 0], True), ([0, 5], True), ([5, 0], True), ([5, 5], False), ([1, 0], False)]
)
def test_a_run_may_have_no_test_but_not_both(runs: ModuleType, codes: list[int], passed: bool) -> None:
    assert runs.passed(codes) is passed
