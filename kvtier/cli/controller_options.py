"""What the commands that talk to a controller share: how it is found, and how a prompt is given."""

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
LARGEST_FILE = 64 << 20
"""Bytes: several million tokens."""

WHERE = "Where the controller is"
WHICH = "Which prompt"

ControllerURL = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"The controller. Left out: `controller.url` of the settings, else {DEFAULT_URL}.",
        rich_help_panel=WHERE,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The file with the controller's token. Left out: `controller.token` of the settings, if any.",
        rich_help_panel=WHERE,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The YAML file with the settings. Left out: the one that KVTIER_CONFIG_FILE names, if any.",
        rich_help_panel=WHERE,
    ),
]
PromptText = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="The prompt. An instance that serves the model tokenizes it.",
        rich_help_panel=WHICH,
    ),
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompt-file", metavar="FILE", help="A file with the prompt; `-`: stdin.", rich_help_panel=WHICH
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens", metavar="JSON", help="Its token ids: `[128000, 849, 21435]`.", rich_help_panel=WHICH
    ),
]
TokensFile = Annotated[
    str | None,
    typer.Option(
        "--tokens-file",
        metavar="FILE",
        help="A file with them, or with the answer of vLLM's `/tokenize`; `-`: stdin.",
        rich_help_panel=WHICH,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model that it was sent to. Left out: the only one that is served.",
        rich_help_panel=WHICH,
    ),
]
Salt = Annotated[
    str | None,
    typer.Option(
        "--salt", metavar="TEXT", help="The `cache_salt` that it was sent with.", rich_help_panel=WHICH
    ),
]
NoWait = Annotated[
    bool,
    typer.Option("--no-wait", help="Print the id of the event, and do not wait for its end."),
]


@contextmanager
def controller(url: str | None, token_file: Path | None, config: Path | None) -> Iterator[Controller]:
    """The controller that options and settings name. Raises :class:`SettingsError`."""
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


def place(text: str, parameter: str) -> Place:
    """``INSTANCE/TIER`` as the two names that it is of."""
    instance, slash, tier = text.partition("/")
    if not (instance and slash and tier) or "/" in tier:
        raise typer.BadParameter(
            f"{text!r} names no tier of an instance: write INSTANCE/TIER, like decode-1/ram",
            param_hint=parameter,
        )
    return instance, tier


def seconds(text: str | None, parameter: str) -> float | None:
    """A duration as people write it."""
    from kvtier.units import parse_duration

    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=parameter) from error


def given_prompt(
    text: str | None,
    file: str | None,
    tokens: str | None,
    tokens_file: str | None,
    model: str | None,
    salt: str | None,
) -> Prompt | None:
    """The prompt that options give, in one way; ``None`` where none of them does."""
    from kvtier.cli.controller_answers import Prompt

    ways = {"--prompt": text, "--prompt-file": file, "--tokens": tokens, "--tokens-file": tokens_file}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} name one prompt each: write one of them")
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
        raise typer.BadParameter("--model and --salt say more of a prompt: write that, too")
    return None


def needed_prompt(
    text: str | None,
    file: str | None,
    tokens: str | None,
    tokens_file: str | None,
    model: str | None,
    salt: str | None,
) -> Prompt:
    """The prompt that options give; leaves where they give none."""
    prompt = given_prompt(text, file, tokens, tokens_file, model, salt)
    if prompt is None:
        raise typer.BadParameter("which prompt? Write --prompt, --prompt-file, --tokens or --tokens-file")
    return prompt


def _token(file: Path) -> str:
    from kvtier.settings_secret import resolve

    try:
        return str(resolve({"file": str(file)}))
    except ValueError as error:
        raise SettingsError(f"--token-file: {error}") from error


def _content(name: str, parameter: str) -> str:
    """A small file, or all of stdin."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(LARGEST_FILE + 1)
        else:
            with Path(name).expanduser().open("rb") as stream:
                content = stream.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise typer.BadParameter(f"{name} is longer than {LARGEST_FILE >> 20}MiB", param_hint=parameter)
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
            f"these are no token ids ({error}): write a list like [128000, 849], or what /tokenize answers",
            param_hint=parameter,
        ) from error
