"""Options that several commands share, and commands whose options are built from data.

Typer reads the options of a command from its signature.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer

from kvtier.errors import KVTierError, SettingsError

Command = Callable[..., None]

ALL = "all"
MAX_BYTES = 1 << 30

JSONFile = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write the results to this file as JSON.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE.png", help="Plot the results. Needs `pip install 'kvtier\\[bench]'`."
    ),
]


class _Named(Protocol):
    """A tier, or what else a command selects by its name or type in the settings."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...


NamedT = TypeVar("NamedT", bound=_Named)
ValueT = TypeVar("ValueT")


def option(name: str, kind: Any, *flags: str, default: Any = None, **info: Any) -> Parameter:  # noqa: ANN401 - a type
    """Return an option as a parameter. ``info`` is that of :func:`typer.Option`."""
    return Parameter(
        name, Parameter.POSITIONAL_OR_KEYWORD, default=typer.Option(default, *flags, **info), annotation=kind
    )


def own_parameters(function: Command) -> list[Parameter]:
    """Return the parameters of a function after its first one."""
    return list(inspect.signature(function, eval_str=True).parameters.values())[1:]


def make_command(
    function: Command, parameters: Sequence[Parameter], run: Callable[[dict[str, Any]], None]
) -> Command:
    """Return a command that is named and documented as ``function``, and passes its values to ``run``."""

    def command(**values: Any) -> None:  # noqa: ANN401 - as given on the command line
        run(values)

    # Typer and inspect read these in place of the function's own.
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def read_secret(file: Path, parameter: str) -> str:
    """Read a secret from the file given by an option. Raises: SettingsError."""
    from kvtier.settings.values import resolve

    try:
        return str(resolve({"file": str(file)}))
    except ValueError as error:
        raise SettingsError(f"{parameter}: {error}") from error


def epilog(*examples: str) -> str:
    """Return the examples shown at the end of a command's help."""
    return "\n\n".join(["\nExamples:", *(f"  {example}" for example in examples)]) + "\n"


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Find out before the work whether its results can be written. Raises ``BadParameter``, KVTierError."""
    for flag, path in (("--output", json_file), ("--plot", plot)):
        if path is None:
            continue
        if not path.resolve().parent.is_dir():
            reason = f"there is no folder {path.parent}: create it, or name another"
            raise typer.BadParameter(reason, param_hint=flag)
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder: name a file in it", param_hint=flag)
    if plot is not None:
        if plot.suffix != ".png":
            reason = f"{plot} does not end with .png: only that is written"
            raise typer.BadParameter(reason, param_hint="--plot")
        if find_spec("matplotlib") is None:
            raise KVTierError("a plot needs matplotlib: pip install 'kvtier[bench]'")


def write_outputs(
    results: object,
    json_file: Path | None,
    plot: Path | None = None,
    save_plot: Callable[[Path], None] | None = None,
) -> None:
    """Write the results to the files that were asked for. Raises: KVTierError: one cannot be written."""

    def write_json(path: Path) -> None:
        path.write_text(json.dumps(results, indent=2) + "\n")

    for flag, path, write in (("--output", json_file, write_json), ("--plot", plot, save_plot)):
        if path is None or write is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise KVTierError(f"{flag}: cannot write {path}: {error.strerror or error}") from error


def select(known: Sequence[NamedT], names: Sequence[str], parameter: str) -> list[NamedT]:
    """Return those with these names or, if none matches a name, types. In the order of ``known``."""
    found: list[NamedT] = []
    for name in names:
        matching = [each for each in known if each.name == name] or [
            each for each in known if name in (each.type, ALL)
        ]
        if not matching:
            listed = ", ".join(f"{each.name} ({each.type})" for each in known)
            raise typer.BadParameter(
                f"no tier has the name or type {name!r}: use one of {listed}, or {ALL}", param_hint=parameter
            )
        found += matching
    return [each for each in known if each in found]


def parsed(parse: Callable[[str], ValueT], text: str, parameter: str) -> ValueT:
    """Return the value of an option. Raises ``BadParameter`` for a ``ValueError``."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=parameter) from error


def parse_bytes(text: str, parameter: str) -> int:
    """Return a size from 1 byte to 1 GiB. Raises ``BadParameter``."""
    from kvtier.units import parse_size

    length = parsed(parse_size, text, parameter)
    if not 0 < length <= MAX_BYTES:
        raise typer.BadParameter("use a size from 1 to 1GiB", param_hint=parameter)
    return length


def parse_chunk_size(text: str) -> int:
    """Return the size of ``--size`` in bytes, rounded up to whole pages."""
    from kvtier.memory.header import OBJECT_ALIGNMENT

    return -(-parse_bytes(text, "--size") // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT
