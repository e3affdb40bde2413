"""``kvtier doctor``: check this machine and the settings, and suggest fixes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvtier.cli.cache_process import Socket
from kvtier.cli.options import parse_chunk_size, select
from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table

if TYPE_CHECKING:
    from kvtier.cli.checks import Check, Requirements

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
DEFAULT_SIZE = "4MiB"
HINT = "`kvtier doctor --backend all` also writes and reads one chunk on each tier."

BackendNames = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="Write, read and time one chunk on this tier, by name or type. Repeatable; `all` for all tiers.",
    ),
]
ChunkSize = Annotated[
    str | None, typer.Option("--size", metavar="SIZE", help="Size of that chunk. Default: 4MiB.")
]

EngineURLs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL",
        help="Only have this vLLM server, with API key VLLM_API_KEY, store a prompt, and each tier serve it. "
        "Repeatable: the others then load what the first one stores.",
    ),
]


def doctor(
    config: ConfigFile = None,
    backend: BackendNames = None,
    size: ChunkSize = None,
    socket: Socket = None,
    engine: EngineURLs = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and the settings, and suggest fixes.

    Exit status 1 if a check fails. A warning means that kvtier works, but slower or with a feature missing.
    Asks the running cache process and the controller of the settings what they have found. Connects to every
    peer and shared pool in the settings. Tiers of running cache processes are not affected.
    """
    if engine:
        from kvtier.cli.checks_running import check_engines

        with messages().status(f"storing and loading a prompt at {', '.join(engine)}"):
            checks = check_engines(engine)
        failed = any(check.status == "fail" for check in checks)
        _print(checks, failed=failed, as_json=as_json, hint="")
        raise typer.Exit(failed)
    from kvtier.cli.checks import check_machine, check_settings
    from kvtier.cli.checks_backend import check_pools, exit_command
    from kvtier.cli.checks_peers import check_peers
    from kvtier.cli.checks_running import check_cache_process, check_fleet

    if size is not None and not backend:
        raise typer.BadParameter("requires --backend", param_hint="--size")
    with messages().status("checking this machine") as status:
        checks, requirements = check_settings(config)
        trials = _trials(requirements, backend or [], size)
        checks = [*checks, *check_machine(requirements)]
        plugins, settings = requirements.plugins, requirements.settings
        if plugins is not None and settings is not None:
            status.update("asking the cache process")
            checks += [*check_cache_process(settings, requirements.tiers, socket), *check_fleet(settings)]
            status.update("connecting to peers")
            checks += check_peers(plugins, settings)
        threads = threading.enumerate()
        if backend:
            status.update("writing and reading chunks")
            checks += trials
        elif plugins is not None:
            status.update("connecting to shared pools")
            checks += check_pools(plugins, requirements.tiers)
    failed = any(check.status == "fail" for check in checks)
    _print(checks, failed=failed, as_json=as_json, hint="" if backend else HINT)
    exit_command(threads, failed=failed)


def _trials(requirements: Requirements, names: list[str], size: str | None) -> Iterator[Check]:
    """Return a lazy iterator of checks, one per named tier. Empty if the settings are invalid."""
    from kvtier.cli.checks_backend import check_backend

    length = parse_chunk_size(size or DEFAULT_SIZE)
    plugins, settings = requirements.plugins, requirements.settings
    if plugins is None or settings is None:
        return iter(())
    tiers = select(requirements.tiers, names, "--backend")
    return (check_backend(plugins, tier, length, checksum=settings.checksum) for tier in tiers)


def _print(checks: list[Check], *, failed: bool, as_json: bool, hint: str) -> None:
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
        return
    rows = table("", "check", "result", "fix")
    for check in checks:
        mark = f"[{COLOURS[check.status]}]{check.status.upper()}[/]"
        rows.add_row(mark, escape(check.name), escape(check.found), escape(check.remedy))
    output().print(rows)
    if hint:
        output().print(escape(hint))
