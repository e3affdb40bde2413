"""The commands that ask a controller: lookup, move, prefetch, pin, unpin, clear, instances and events."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from kvtier.cli.options import Command, epilog, make_command, option, own_parameters, parsed, read_secret
from kvtier.cli.terminal import CONFIG_HELP
from kvtier.units import format_size, parse_duration

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvtier.cli.controller_api import ControllerAPI

DEFAULT_URL = "http://127.0.0.1:9000"
MAX_FILE_BYTES = 64 << 20
"""Enough for several million tokens."""

CONTROLLER_PANEL = "Controller"
PROMPT_PANEL = "Prompt"

URL_HELP = (
    "URL of the controller, or of several, separated by commas. Default: `controller.url` of the settings, "
    f"or {DEFAULT_URL}."
)
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
    option(name, str | None, *flags, metavar=metavar, help=text, rich_help_panel=PROMPT_PANEL)
    for name, flags, metavar, text in (
        ("prompt", (), "TEXT", "The prompt. An instance that serves the model tokenizes it."),
        ("prompt_file", (), "FILE", "File with the prompt, or `-` for stdin."),
        ("tokens", ("--tokens", "--token-ids"), "JSON", "Token ids of the prompt, as in `128000,849,21435`."),
        ("tokens_file", (), "FILE", TOKENS_FILE_HELP),
        ("messages", (), "FILE", "File with the prompt as chat messages, a JSON list, or `-` for stdin."),
        ("model", (), "NAME", "The model that it was sent to. Default: the only one served."),
        ("salt", (), "TEXT", "The `cache_salt` that it was sent with."),
    )
]
SOURCES = ("prompt", "prompt_file", "tokens", "tokens_file", "messages")
"""Those that give the prompt itself."""
NO_WAIT = option(
    "no_wait", bool, "--no-wait", default=False, help="Do not wait for the result; print the event id."
)

COMMANDS: list[tuple[Command, str]] = []
"""All controller commands, with their examples."""

Where = Annotated[str, typer.Argument(metavar="WHERE", help="The tier that holds them, as INSTANCE/TIER.")]


class Call(NamedTuple):
    """What the shared options of a controller command specify."""

    client: ControllerAPI
    prompt: dict[str, Any]
    """Fields of a request; empty without a prompt."""
    wait: bool
    as_json: bool

    def show(self, answer: BaseModel) -> None:
        """Print an answer of the controller, as JSON or as a table."""
        from kvtier.cli.controller_output import show

        show(answer, as_json=self.as_json)

    def operate(self, operation: str, **fields: object) -> None:
        """Request an operation on the prompt, and print its result. Raises: ControllerError."""
        from kvtier.cli.controller_output import print_outcome

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
            query = prompt_of(given) if prompt else {}
            if prompt == "required" and not query:
                raise typer.BadParameter(
                    "no prompt: use --prompt, --prompt-file, --messages, --tokens or --tokens-file"
                )
            with controller_client(given["url"], given["token_file"], given["config"]) as client:
                function(Call(client, query, not given.get("no_wait"), given["as_json"]), **values)

        command = make_command(function, [*own_parameters(function), *shared], run)
        COMMANDS.append((command, epilog(*examples)))
        return function

    return register


@contextmanager
def controller_client(
    url: str | None, token_file: Path | None, config: Path | None
) -> Iterator[ControllerAPI]:
    """Yield a client of the controller given by options and settings. Raises: SettingsError."""
    from kvtier.cli.controller_api import ControllerAPI
    from kvtier.settings import load_settings

    given: dict[str, Any] = {}
    if url is not None:
        given["url"] = url.split(",")
    if token_file is not None:
        given["token"] = read_secret(token_file, "--token-file")
    settings = load_settings({"controller": given}, file=config).controller
    token = settings.token.get_secret_value() if settings.token is not None else None
    with ControllerAPI(settings.urls or [DEFAULT_URL], token) as client:
        yield client


def _place(text: str, parameter: str) -> tuple[str, str]:
    """Parse ``INSTANCE/TIER``."""
    instance, slash, tier = text.partition("/")
    if not (instance and slash and tier) or "/" in tier:
        raise typer.BadParameter(
            f"{text!r} does not name a tier of an instance: use INSTANCE/TIER, as in decode-1/ram",
            param_hint=parameter,
        )
    return instance, tier


def _seconds(text: str | None, parameter: str) -> float | None:
    return None if text is None else parsed(parse_duration, text, parameter)


def prompt_of(options: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the prompt given by :data:`PROMPT_OPTIONS` as fields of a request. Rejects more than one."""
    prompt, prompt_file = options["prompt"], options["prompt_file"]
    tokens, tokens_file = options["tokens"], options["tokens_file"]
    about = {name: options[name] for name in ("model", "salt")}
    given = [f"--{name.replace('_', '-')}" for name in SOURCES if options[name] is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other: use one of them")
    if not given and any(value is not None for value in about.values()):
        raise typer.BadParameter("--model and --salt require a prompt: give one as well")
    if prompt_file is not None:
        prompt = _content(prompt_file, "--prompt-file")
    if tokens_file is not None:
        tokens = _content(tokens_file, "--tokens-file")
    ids = None if tokens is None else _token_ids(tokens, *given)
    chat = None if options["messages"] is None else _json_content(options["messages"])
    fields = {"prompt": prompt, "tokens": ids, "messages": chat, **about}
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


def _json_content(name: str) -> object:
    """Return the JSON value in the file of ``--messages``, or stdin."""
    try:
        return json.loads(_content(name, "--messages"))
    except ValueError as error:
        raise typer.BadParameter(f"{name} is not JSON: {error}", param_hint="--messages") from error


def _token_ids(text: str, parameter: str) -> list[int]:
    import msgspec

    try:
        ids = msgspec.json.decode(text if text.lstrip()[:1] in ("[", "{") else f"[{text}]")
        if isinstance(ids, dict):
            ids = ids.get("tokens")
        return msgspec.convert(ids, list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]])
    except msgspec.DecodeError as error:
        raise typer.BadParameter(
            f"invalid token ids ({error}): use a list such as 128000,849, or the response of /tokenize",
            param_hint=parameter,
        ) from error


@controller_command(
    "kvtier lookup --prompt 'Explain the significance of KV cache in language models.'",
    "kvtier lookup --tokens '[128000, 849, 21435]' --model meta-llama/Llama-3.1-8B-Instruct",
    "curl -s localhost:8000/tokenize --json @prompt.json | kvtier lookup --tokens-file -",
    prompt="required",
)
def lookup(call: Call) -> None:
    """Show which instances and tiers hold a prefix of a prompt, and how many of its tokens.

    Tiers that hold none are omitted.
    """
    call.show(call.client.lookup(call.prompt))


@controller_command(
    "kvtier move prefill-1/ram decode-1/ram --prompt-file prompt.txt",
    "kvtier move prefill-1/ssd decode-1/ram --tokens-file tokens.json --copy",
    "kvtier move decode-1/ram decode-1/ssd --tokens '[128000, 849, 21435]' --no-wait",
    prompt="required",
    waits=True,
)
def move(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="FROM", help="Source, as INSTANCE/TIER.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Target, as INSTANCE/TIER.")],
    copy: Annotated[bool, typer.Option("--copy", help="Keep the chunks at FROM.")] = False,
) -> None:
    """Move a prompt's chunks to another tier, of the same or another instance.

    Chunks are removed from FROM only after TO has confirmed them. Ctrl-C stops waiting, but not the move.
    Exit status 1 if it fails.
    """
    positions = {"old_position": _place(source, "FROM"), "new_position": _place(target, "TO")}
    call.operate("move", **positions, copy=copy)


@controller_command(
    "kvtier prefetch decode-1/ram --prompt-file prompt.txt",
    "kvtier prefetch decode-1/ram --tokens-file tokens.json --deadline 2s",
    prompt="required",
    waits=True,
)
def prefetch(
    call: Call,
    where: Annotated[str, typer.Argument(metavar="WHERE", help="Target, as INSTANCE/TIER.")],
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Stop after this time, such as `2s`. Chunks that have arrived by then stay.",
        ),
    ] = None,
) -> None:
    """Bring a prompt's chunks into a tier before an engine requests them.

    They are copied from the instance's other tiers, or from other instances.
    """
    call.operate("prefetch", **_at(where), deadline=_seconds(deadline, "--deadline"))


@controller_command(
    "kvtier pin decode-1/ram --prompt-file system-prompt.txt",
    "kvtier pin decode-1/ram --tokens-file tokens.json --ttl 1h",
    prompt="required",
    waits=True,
)
def pin(
    call: Call,
    where: Where,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Duration of the pin, such as `1h`. Default: until `kvtier unpin`."
        ),
    ] = None,
) -> None:
    """Protect a prompt's chunks from eviction, also across restarts of the instance."""
    call.operate("pin", **_at(where), ttl=_seconds(ttl, "--ttl"))


@controller_command(
    "kvtier unpin decode-1/ram --prompt-file system-prompt.txt", prompt="required", waits=True
)
def unpin(call: Call, where: Where) -> None:
    """Allow a prompt's chunks to be evicted again."""
    call.operate("unpin", **_at(where))


@controller_command(
    "kvtier clear decode-1/ram --prompt-file prompt.txt",
    "kvtier clear decode-1/ssd",
    "kvtier clear decode-1 --yes",
    prompt="optional",
    waits=True,
)
def clear(
    call: Call,
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="INSTANCE/TIER, or INSTANCE alone for all its tiers.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a prompt's chunks, or without a prompt all chunks, from a tier or an instance.

    Shows the amount first, and asks for confirmation.
    """
    instance, tier = _place(where, "WHERE") if "/" in where else (where, None)
    if not yes:
        typer.confirm(_question(call, instance, tier), abort=True, err=True)
    call.operate("clear", instance=instance, tier=tier)


@controller_command("kvtier pins", "kvtier pins decode-1 --json")
def pins(
    call: Call,
    instance: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show those of this instance.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of pins to list.")] = 100,
) -> None:
    """List what is pinned, newest first, also of instances that are not connected."""
    call.show(call.client.pins(instance, limit))


@controller_command("kvtier instances", "kvtier instances decode-1 --json")
def instances(
    call: Call,
    instance: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this instance in detail.")
    ] = None,
) -> None:
    """List the registered instances, their tiers and fill, or show one of them."""
    call.show(call.client.instances() if instance is None else call.client.instance(instance))


@controller_command("kvtier events", "kvtier events --follow", "kvtier events 01J9ZK3V7Q --follow")
def events(
    call: Call,
    event: Annotated[str | None, typer.Argument(metavar="[ID]", help="Show this event in detail.")] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Wait for the end of the event. Without an id, stream all changes."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of events to list.")] = 20,
) -> None:
    """List the latest events, newest first, or show or follow one of them.

    Exit status 1 if a followed event fails.
    """
    from kvtier.cli.controller_output import follow, print_result, stream

    if event is None and watch:
        stream(call.client, as_json=call.as_json)
    elif event is None:
        call.show(call.client.events(limit))
    elif watch:
        print_result(follow(call.client, event), as_json=call.as_json)
    else:
        call.show(call.client.event(event))


def _at(where: str) -> dict[str, str]:
    instance, tier = _place(where, "WHERE")
    return {"instance": instance, "tier": tier}


def _question(call: Call, instance: str, tier: str | None) -> str:
    """Return the confirmation question with the amount. Raises: ControllerError: unknown instance."""
    tiers = [each for each in call.client.instance(instance).tiers if tier in (None, each.name, each.type)]
    if not call.prompt:
        amounts = [f"{each.chunks} chunks, {format_size(each.used)}, from {each.name}" for each in tiers]
        return f"Remove {'; '.join(amounts) or 'everything'} of {instance}?"
    found = call.client.lookup(call.prompt)
    held = found.instances.get(instance, {})
    amounts = [f"{held.get(each.name, 0)} from {each.name}" for each in tiers]
    return f"Remove, of {found.num_tokens} tokens, {'; '.join(amounts) or 'all'} of {instance}?"
