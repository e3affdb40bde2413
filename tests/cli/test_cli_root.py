"""Properties of every command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

import kvtier as package
from kvtier import cli
from kvtier.cli import terminal
from kvtier.errors import SettingsError, TierError

from .conftest import Kvtier

COMMANDS = ["demo", "serve", "status", "doctor", "bench", "plugins", "config", "inspect"]


def test_commands_are_listed(kvtier: Kvtier) -> None:
    result = kvtier("--help")
    assert result.status == 0
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        "config show",
        "config check",
        "config schema",
        "inspect ls",
        "inspect verify",
        "inspect rekey",
        "inspect purge",
    ],
)
def test_every_command_has_help(kvtier: Kvtier, command: str) -> None:
    result = kvtier(*command.split(), "--help")
    assert result.status == 0
    assert f"Usage: kvtier {command} " in result.output


def test_json_is_a_flag_in_every_command() -> None:
    found: dict[str, list[bool]] = {}
    groups = [typer.main.get_command(cli.make_app())]
    while groups:
        for name, command in getattr(groups.pop(), "commands", {}).items():
            groups.append(command)
            found[name] = [option.is_flag for option in command.params if "--json" in option.opts]
    assert found["simulate"] == found["bench"] == found["doctor"] == found["lookup"] == [True]
    assert all(all(flags) for flags in found.values())


def test_rows_in_a_pipe_do_not_end_in_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    rows = terminal.table("short", "long")
    rows.add_row("a", "x" * 500)
    rows.add_row("b", "")
    terminal.output().print(rows)
    assert capsys.readouterr().out == f"short  long\na      {'x' * 500}\nb\n"


def test_no_command_shows_the_help(kvtier: Kvtier) -> None:
    assert "Usage:" in kvtier().output + kvtier().errors


def test_demo_refuses_a_file_as_its_directory(kvtier: Kvtier, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = kvtier("demo", "--work-dir", file)
    assert result.status == 2
    assert "is a file" in result.message


@pytest.mark.parametrize("model", ["/nope", "./a", "a/b/c"])
def test_demo_refuses_a_model_that_does_not_exist(
    kvtier: Kvtier, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.cli.demo.find_spec", lambda _: pytest.fail("it has gone on"))
    result = kvtier("demo", "--model", model)
    assert result.status == 2
    assert f"there is no folder {model}" in result.message


def test_demo_refuses_a_folder_without_a_model(
    kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = kvtier("demo", "--model", tmp_path)
    assert result.status == 2
    assert "has no config.json" in result.message
    monkeypatch.setattr("kvtier.cli.demo.find_spec", lambda _: None)
    (tmp_path / "config.json").touch()
    for model in (tmp_path, "gpt2", "Qwen/Qwen3-0.6B", "s3://bucket/a/model"):
        assert "cannot be imported: install them" in kvtier("demo", "--model", model).errors


def test_version(kvtier: Kvtier) -> None:
    assert kvtier("--version").output == f"kvtier {package.__version__}\n"


def test_unknown_command_is_a_usage_error(kvtier: Kvtier) -> None:
    assert kvtier("serv").status == 2


def test_error_is_one_message_without_traceback(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKEN", "1")
    result = kvtier("serve")
    assert result.status == 1
    assert result.errors == (
        "error: the variable KVTIER_CHUNK_TOKEN is not a setting: did you mean KVTIER_CHUNK_TOKENS?\n"
    )


def test_errors_of_several_tasks_are_printed_one_by_one(
    kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("tasks", [TierError("one"), ExceptionGroup("more", [SettingsError("[two]")])])

    monkeypatch.setattr(cli, "make_app", lambda: fail)
    result = kvtier("serve")
    assert (result.status, result.errors) == (1, "error: one\nerror: [two]\n")


def test_unexpected_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("tasks", [TierError("one"), ZeroDivisionError("bug")])

    monkeypatch.setattr(cli, "make_app", lambda: fail)
    with pytest.raises(ExceptionGroup) as caught:
        cli.main([])
    assert caught.group_contains(ZeroDivisionError)


@pytest.mark.parametrize("module", ["kvtier.cli", "kvtier.bridge.serve", "kvtier.backends.disk.backend"])
def test_commands_and_cache_process_do_not_import_torch(module: str, tmp_path: Path) -> None:
    script = f"import {module}, sys; print({{'torch', 'vllm', 'numpy'}} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert result.stdout == "set()\n"
