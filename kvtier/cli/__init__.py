"""The command line, with one module per group of commands. Slow imports are deferred until they are used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.markup import escape

from kvtier.cli import (
    bench,
    cache_process,
    config,
    controller_commands,
    demo,
    doctor,
    inspect,
    services,
    simulate,
    whatif,
    why,
)
from kvtier.cli.options import epilog
from kvtier.cli.terminal import messages
from kvtier.errors import KVTierError, SettingsError
from kvtier.version import __version__

CONTROLLER_PANEL = "Controller commands"


def make_app() -> typer.Typer:
    """Return the command line, without the commands of plugins."""
    app = typer.Typer(
        name="kvtier",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command()(demo.demo)
    app.command()(services.serve)
    app.command(epilog=epilog(*services.CONTROLLER_EXAMPLES))(services.controller)
    app.command(epilog=epilog(*services.PROXY_EXAMPLES))(services.proxy)
    app.command()(cache_process.status)
    app.command()(cache_process.tenants)
    app.command(epilog=why.EXAMPLES)(why.command)
    app.command(epilog=epilog(*whatif.EXAMPLES))(whatif.whatif)
    app.command(epilog=epilog(*cache_process.CLEAR_WEIGHTS_EXAMPLES))(cache_process.clear_weights)
    app.command()(doctor.doctor)
    app.command(epilog=bench.EXAMPLES)(bench.bench)
    app.command(epilog=simulate.EXAMPLES)(simulate.simulate)
    app.add_typer(config.app)
    app.add_typer(inspect.app)
    app.command("plugins")(config.plugins)
    for command, examples in controller_commands.COMMANDS:
        app.command(epilog=examples, rich_help_panel=CONTROLLER_PANEL)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A :class:`KVTierError` is printed as one message, with exit status 1."""
    app = make_app()
    _add_plugin_commands(app)
    errors: list[KVTierError] = []
    try:
        app(args=arguments, prog_name="kvtier")
    except* KVTierError as group:  # Of task groups. What is not a KVTierError is raised again.
        errors = _leaves(group)
    if errors:
        for error in errors:
            _print_error("error", "red", error)
        sys.exit(1)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Keep the KV cache of LLM prompts in memory and on disk, so that no prompt is prefilled twice."""


def _add_plugin_commands(app: typer.Typer) -> None:
    """Add the commands of plugins. Only warn about a broken plugin, so that `kvtier doctor` can run."""
    found = entry_points(group="kvtier")
    if not found:  # Then the settings need not be read.
        return
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    try:
        Plugins.load(load_settings().plugins, found).add_commands(app)
    except SettingsError:
        return  # The command itself reports it.
    except KVTierError as error:
        _print_error("warning: plugin commands are not available", "yellow", error)


def _leaves(group: ExceptionGroup[KVTierError]) -> list[KVTierError]:
    errors: list[KVTierError] = []
    for error in group.exceptions:
        errors += _leaves(error) if isinstance(error, ExceptionGroup) else [error]
    return errors


def _print_error(what: str, colour: str, error: KVTierError) -> None:
    messages().print(f"[{colour}]{what}:[/{colour}] {escape(str(error))}")
