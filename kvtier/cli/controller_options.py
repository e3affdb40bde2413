"""Options shared by the controller commands: the controller's address, and the prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from kvtier.cli.options import Command, epilog, make_command, option, own_parameters, read_secret
from kvtier.cli.terminal import CONFIG_HELP

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvtier.cli.controller_client import Controller

DEFAULT_URL = "http://127.0.0.1:9000"
MAX_FILE_BYTES = 64 << 20
"""Enough for several million tokens."""

CONTROLLER_PANEL = "Controller"
PROMPT_PANEL = "Prompt"

URL_HELP = f"URL of the controller. Default: `controller.url` of the settings, or {DEFAULT_URL}."
AUTH_HELP = "File with the controller's token. Default: `controller.token` of the settings, if any."
TOKENS_FILE_HELP = "File with token ids or the response of vLLM's `/tokenize`, or `-` for stdin."
CONTROLLER_OPTIONS = [
    *(
        option(name, kind, *flags, metavar=metavar, help=text, rich_help_panel=CONTROLLER_PANEL)
        for name, kind, flags, metavar, text in (
            ("url", str | None, (), "URL", URL_HELP),
            ("token_file", Path | None, (), "FILE", AUTH_HELP),
            ("config", Path | None, ("--config", "-c"), "FILE", CONFIG_HELP),
        )
    ),
    option("as_json", bool, "--json", default=False, help="Print JSON."),
]
PROMPT_OPTIONS = [
    option(name, str | None, metavar=metavar, help=text, rich_help_panel=PROMPT_PANEL)
    for name, metavar, text in (
        ("prompt", "TEXT", "The prompt. An instance that serves the model tokenizes it."),
        ("prompt_file", "FILE", "File with the prompt, or `-` for stdin."),
        ("tokens", "JSON", "Token ids of the prompt, as in `[128000, 849, 21435]`."),
        ("tokens_file", "FILE", TOKENS_FILE_HELP),
        ("model", "NAME", "The model that it was sent to. Default: the only one served."),
        ("salt", "TEXT", "The `cache_salt` that it was sent with."),
    )
]
NO_WAIT = option(
    "no_wait", bool, "--no-wait", default=False, help="Do not wait for the result; print the event id."
)

COMMANDS: list[tuple[Command, str]] = []
"""All controller commands, with their examples."""


class Call(NamedTuple):
    """What the shared options of a controller command specify."""

    client: Controller
    prompt: dict[str, Any]
    """Fields of a request; empty without a prompt."""
    wait: bool
    as_json: bool

    def show(self, answer: BaseModel) -> None:
        """Print an answer of the controller, as JSON or as a table."""
        from kvtier.cli.controller_tables import show

        show(answer, as_json=self.as_json)

    def operate(self, operation: str, **fields: object) -> None:
        """Request an operation on the prompt, and print its result. Raises: ControllerError."""
        from kvtier.cli.controller_follow import print_outcome

        accepted = self.client.operate(operation, {**fields, **self.prompt})
        print_outcome(self.client, accepted, wait=self.wait, as_json=self.as_json)


def controller_command(
    *examples: str, prompt: Literal["required", "optional"] | None = None, waits: bool = False
) -> Callable[[Command], Command]:
    """Register a function as a command. It gets a :class:`Call`, and the parameters that it declares itself.

    ``waits`` adds the option ``--no-wait``.
    """

    def register(function: Command) -> Command:
        shared = [*(PROMPT_OPTIONS if prompt else ()), *([NO_WAIT] if waits else ()), *CONTROLLER_OPTIONS]

        def run(values: dict[str, Any]) -> None:
            given = {parameter.name: values.pop(parameter.name) for parameter in shared}
            query = _prompt(**{each.name: given[each.name] for each in PROMPT_OPTIONS}) if prompt else {}
            if prompt == "required" and not query:
                raise typer.BadParameter("no prompt: use --prompt, --prompt-file, --tokens or --tokens-file")
            with _controller(given["url"], given["token_file"], given["config"]) as client:
                function(Call(client, query, not given.get("no_wait"), given["as_json"]), **values)

        command = make_command(function, [*own_parameters(function), *shared], run)
        COMMANDS.append((command, epilog(*examples)))
        return function

    return register


@contextmanager
def _controller(url: str | None, token_file: Path | None, config: Path | None) -> Iterator[Controller]:
    """Yield a client of the controller given by options and settings. Raises: SettingsError."""
    from kvtier.cli.controller_client import Controller
    from kvtier.settings import load_settings

    given: dict[str, Any] = {}
    if url is not None:
        given["url"] = url
    if token_file is not None:
        given["token"] = read_secret(token_file, "--token-file")
    settings = load_settings({"controller": given}, file=config).controller
    token = settings.token.get_secret_value() if settings.token is not None else None
    with Controller(settings.url or DEFAULT_URL, token) as client:
        yield client


def parse_place(text: str, parameter: str) -> tuple[str, str]:
    """Parse ``INSTANCE/TIER``."""
    instance, slash, tier = text.partition("/")
    if not (instance and slash and tier) or "/" in tier:
        raise typer.BadParameter(
            f"{text!r} does not name a tier of an instance: use INSTANCE/TIER, as in decode-1/ram",
            param_hint=parameter,
        )
    return instance, tier


def parse_seconds(text: str | None, parameter: str) -> float | None:
    """Parse a duration such as ``10m`` into seconds."""
    from kvtier.units import parse_duration

    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=parameter) from error


def _prompt(
    *,
    prompt: str | None,
    prompt_file: str | None,
    tokens: str | None,
    tokens_file: str | None,
    **about: str | None,
) -> dict[str, Any]:
    """Return the prompt given by the options as fields of a request. Rejects more than one."""
    sources = {
        "--prompt": prompt, "--prompt-file": prompt_file, "--tokens": tokens, "--tokens-file": tokens_file
    }  # fmt: skip
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other: use one of them")
    if not given and any(value is not None for value in about.values()):
        raise typer.BadParameter("--model and --salt require a prompt: give one as well")
    if prompt_file is not None:
        prompt = _content(prompt_file, "--prompt-file")
    if tokens_file is not None:
        tokens = _content(tokens_file, "--tokens-file")
    ids = None if tokens is None else _token_ids(tokens, *given)
    fields = {"prompt": prompt, "tokens": ids, **about}
    return {name: value for name, value in fields.items() if value is not None}


def _content(name: str, parameter: str) -> str:
    """Read a file of up to ``MAX_FILE_BYTES``, or stdin."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(name).expanduser().open("rb") as stream:
                content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise typer.BadParameter(f"{name} is longer than {MAX_FILE_BYTES >> 20}MiB", param_hint=parameter)
        return content.decode()
    except OSError as error:
        raise typer.BadParameter(f"{name} cannot be read: {error.strerror}", param_hint=parameter) from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not text", param_hint=parameter) from error


def _token_ids(text: str, parameter: str) -> list[int]:
    import msgspec

    try:
        ids = msgspec.json.decode(text)
        if isinstance(ids, dict):
            ids = ids.get("tokens")
        return msgspec.convert(ids, list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(
            f"invalid token ids ({error}): use a list such as [128000, 849], or the response of /tokenize",
            param_hint=parameter,
        ) from error
