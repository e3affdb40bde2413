"""tools/test_upstream.py: the list of vLLM's tests that do not apply is neither too long nor too short."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parent.parent
LIST = ["test_other_*.py", "test_own.py::test_of_others", "test_own.py::test_cases[a]"]
FILES = ["test_other_client.py", "test_own.py"]
OUTCOMES = {
    "test_own.py::test_of_others[1]": "failed",
    "test_own.py::test_of_others[2]": "passed without kvtier",
    "test_own.py::test_cases[a]": "skipped",
    "test_own.py::test_cases[b]": "passed",
}


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("test_upstream")


def test_list_is_right(upstream: ModuleType) -> None:
    assert not upstream.wrong(LIST, OUTCOMES)
    assert not upstream.stale(LIST, FILES, OUTCOMES)


@pytest.mark.parametrize("test", ["test_own.py::test_of_others[2]", "test_own.py::test_cases[a]"])
def test_listed_test_passes(upstream: ModuleType, test: str) -> None:
    assert upstream.wrong(LIST, {**OUTCOMES, test: "passed"}) == [f"{test}: passes, and is in the list"]


@pytest.mark.parametrize("outcome", ["failed", "skipped", "passed without kvtier"])
@pytest.mark.parametrize("test", ["test_own.py::test_cases[b]", "test_own.py::test_of", "test_new.py"])
def test_other_test_does_not_pass_with_kvtier(upstream: ModuleType, test: str, outcome: str) -> None:
    errors = upstream.wrong(LIST, {**OUTCOMES, test: outcome})
    assert errors == [f"{test}: {outcome}, and is not in the list"]


@pytest.mark.parametrize("entry", ["test_gone*.py", "test_own.py::test_gone", "test_own.py::test_cases[c]"])
def test_listed_name_does_not_exist(upstream: ModuleType, entry: str) -> None:
    errors = upstream.stale([*LIST, entry], FILES, OUTCOMES)
    assert errors == [f"{entry}: is in the list, and does not exist"]


def test_table_counts_tests_and_gives_reasons(upstream: ModuleType) -> None:
    files = [*FILES, "test_other_server.py"]
    reasons = dict.fromkeys(LIST, "a reason")
    lines = upstream.table(reasons, files, OUTCOMES)
    assert [line.split() for line in lines[1:3]] == [["test_own.py", "4", "1"], ["all", "4", "1"]]
    assert "  test_other_*.py (2 files): a reason" in lines
    assert "  test_own.py::test_cases[a]: a reason" in lines


def test_every_entry_has_a_reason() -> None:
    entries = yaml.safe_load((ROOT / "tests/upstream/list.yaml").read_text())
    assert all(isinstance(reason, str) and len(reason.split()) > 2 for reason in entries.values())
