"""Options shared by the controller commands: the controller's address, and the prompt."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.cli.controller_answers import Place, Prompt
    from kvtier.cli.controller_client import Controller

DEFAULT_URL = "http://127.0.0.1:9000"
MAX_FILE_BYTES = 64 << 20
"""Enough for several million tokens."""

CONTROLLER_PANEL = "Controller"
PROMPT_PANEL = "Prompt"

ControllerURL = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"URL of the controller. Default: `controller.url` of the settings, or {DEFAULT_URL}.",
        rich_help_panel=CONTROLLER_PANEL,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the controller's token. Default: `controller.token` of the settings, if any.",
        rich_help_panel=CONTROLLER_PANEL,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file with the settings. Default: the file named by KVTIER_CONFIG_FILE, if any.",
        rich_help_panel=CONTROLLER_PANEL,
    ),
]
PromptText = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="The prompt. An instance that serves the model tokenizes it.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="File with the prompt, or `-` for stdin.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="JSON",
        help="Token ids of the prompt, as in `[128000, 849, 21435]`.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
TokensFile = Annotated[
    str | None,
    typer.Option(
        "--tokens-file",
        metavar="FILE",
        help="File with token ids or the response of vLLM's `/tokenize`, or `-` for stdin.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model that it was sent to. Default: the only one served.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
Salt = Annotated[
    str | None,
    typer.Option(
        "--salt", metavar="TEXT", help="The `cache_salt` that it was sent with.", rich_help_panel=PROMPT_PANEL
    ),
]
NoWait = Annotated[
    bool,
    typer.Option("--no-wait", help="Do not wait for the result; print the event id."),
]


@contextmanager
def controller(url: str | None, token_file: Path | None, config: Path | None) -> Iterator[Controller]:
    """Yield a client of the controller given by options and settings. Raises: SettingsError."""
    from kvtier.cli.controller_client import Controller
    from kvtier.settings import load_settings

    given: dict[str, Any] = {}
    if url is not None:
        given["url"] = url
    if token_file is not None:
        given["token"] = _token(token_file)
    settings = load_settings({"controller": given}, file=config).controller
    token = settings.token.get_secret_value() if settings.token is not None else None
    with Controller(settings.url or DEFAULT_URL, token) as client:
        yield client


def parse_place(text: str, parameter: str) -> Place:
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


def optional_prompt(
    text: str | None,
    file: str | None,
    tokens: str | None,
    tokens_file: str | None,
    model: str | None,
    salt: str | None,
) -> Prompt | None:
    """Return the prompt given by the options, or ``None``. Rejects more than one."""
    from kvtier.cli.controller_answers import Prompt

    sources = {"--prompt": text, "--prompt-file": file, "--tokens": tokens, "--tokens-file": tokens_file}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other: use one of them")
    if file is not None:
        text = _content(file, "--prompt-file")
    if text is not None:
        return Prompt(prompt=text, model=model, salt=salt)
    if tokens is not None:
        return Prompt(tokens=_token_ids(tokens, "--tokens"), model=model, salt=salt)
    if tokens_file is not None:
        ids = _token_ids(_content(tokens_file, "--tokens-file"), "--tokens-file")
        return Prompt(tokens=ids, model=model, salt=salt)
    if model is not None or salt is not None:
        raise typer.BadParameter("--model and --salt require a prompt: give one as well")
    return None


def required_prompt(
    text: str | None,
    file: str | None,
    tokens: str | None,
    tokens_file: str | None,
    model: str | None,
    salt: str | None,
) -> Prompt:
    """Return the prompt given by the options. Without one, raise a usage error."""
    prompt = optional_prompt(text, file, tokens, tokens_file, model, salt)
    if prompt is None:
        raise typer.BadParameter("no prompt: use --prompt, --prompt-file, --tokens or --tokens-file")
    return prompt


def _token(file: Path) -> str:
    from kvtier.settings.secret import resolve

    try:
        return str(resolve({"file": str(file)}))
    except ValueError as error:
        raise SettingsError(f"--token-file: {error}") from error


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

    from kvtier.cli.controller_answers import Tokenized

    try:
        if text.lstrip().startswith("{"):
            return msgspec.json.decode(text, type=Tokenized).tokens
        return msgspec.convert({"tokens": msgspec.json.decode(text)}, type=Tokenized).tokens
    except msgspec.DecodeError as error:
        raise typer.BadParameter(
            f"invalid token ids ({error}): use a list such as [128000, 849], or the response of /tokenize",
            param_hint=parameter,
        ) from error
