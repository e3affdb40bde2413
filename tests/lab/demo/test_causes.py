"""A demo with unexpected results prints the warnings in its logs, and keeps the logs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.lab.demo.server import DemoFailed
from kvtier.lab.demo.work import MAX_CHARACTERS, MAX_LINES, Options, Work, causes, conclude, work_folder

SLOW = (
    "2026-11-22 09:00:00,1 WARNING kvtier: tier ssd: deadline of 5s exceeded reading 64MiB (4 chunks) "
    "after 5.0 s; counted as misses"
)
NOTICE = (
    "(EngineCore pid=7) WARNING 11-22 09:00:01 [client.py:136] cache process: tier ssd: circuit breaker open"
)
NOISE = "(APIServer pid=6) WARNING 11-22 08:59:00 [config.py:1] the default has changed"


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    folder = tmp_path / "run"
    folder.mkdir()
    return Work(tmp_path / "model", folder, tmp_path)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_warnings_of_each_log_are_printed_and_the_folder_is_kept(work: Work, console: Console) -> None:
    work.log("cache").write_text(f"INFO kvtier: serving\n{SLOW}\nINFO kvtier: leaving\n")
    work.log("vllm").write_text(f"{NOISE}\n{NOTICE}\n{NOTICE}\n")
    conclude(["warm from disk: 0 tokens hit, 5888 expected"], work, console, "logs")
    assert shown(console).splitlines() == [
        "✗ warm from disk: 0 tokens hit, 5888 expected",
        "cache.log has these warnings:",
        f"  {SLOW}",
        "vllm.log has these warnings:",
        f"  {NOTICE}",
        f"logs: {work.folder}",
    ]
    assert work.keep


def test_success_prints_and_keeps_nothing(work: Work, console: Console) -> None:
    work.log("cache").write_text(SLOW)
    conclude([], work, console, "logs")
    assert (shown(console), work.keep) == ("", False)


def test_folder_kept_by_the_user_is_named(work: Work, console: Console) -> None:
    work.keep = True
    conclude([], work, console, "logs")
    assert shown(console) == f"logs: {work.folder}\n"


def test_other_warnings_are_printed_without_warnings_of_kvtier(work: Work) -> None:
    work.log("vllm").write_text(NOISE)
    assert causes(work.folder) == ["vllm.log has these warnings:", f"  {NOISE}"]


def test_absence_of_warnings_is_reported(work: Work, console: Console) -> None:
    work.log("vllm").write_text("INFO: ready\n")
    conclude(["tokens differ [here]"], work, console, "logs")
    assert shown(console).splitlines()[:2] == ["✗ tokens differ [here]", "the logs have no warnings"]


def test_printed_warnings_are_bounded(work: Work) -> None:
    work.log("cache").write_text("".join(f"WARNING kvtier: {number}{'x' * 9000}\n" for number in range(99)))
    lines = causes(work.folder)
    assert len(lines) == 1 + MAX_LINES
    assert max(map(len, lines)) == MAX_CHARACTERS + 2


@pytest.fixture(params=["temporary", "chosen"])
def options(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Options(work_dir=tmp_path / "work" if request.param == "chosen" else None)


def fail(work: Work, error: type[BaseException]) -> None:
    """Leave in the folder what a demo writes, and fail."""
    work.model.mkdir()
    work.log("cache").write_text(SLOW)
    raise error("vLLM was not ready in 600 s")


def test_failed_demo_keeps_its_logs_and_names_the_folder(options: Options) -> None:
    with pytest.raises(DemoFailed) as failed, work_folder(options) as work:
        fail(work, DemoFailed)
    assert str(failed.value).splitlines() == [
        "vLLM was not ready in 600 s",
        "",
        "cache.log has these warnings:",
        f"  {SLOW}",
        f"logs and settings are kept in {work.folder}",
    ]
    assert work.log("cache").exists()
    assert work.model.exists() == (options.work_dir is not None), "the model in a temporary folder is removed"


@pytest.mark.parametrize("keep", [True, False])
def test_folder_is_kept_only_on_request(options: Options, keep: bool) -> None:
    with work_folder(options) as work:
        work.log("cache").write_text(SLOW)
        work.keep = keep
    assert work.folder.exists() == keep


def test_interrupted_demo_keeps_nothing(options: Options) -> None:
    with pytest.raises(KeyboardInterrupt), work_folder(options) as work:
        fail(work, KeyboardInterrupt)
    assert not work.folder.exists()
