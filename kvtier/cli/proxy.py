"""``kvtier proxy``: one address in front of prefillers and decoders."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.terminal import set_up_logging
from kvtier.errors import SettingsError

EXAMPLES = """
Examples:

  kvtier proxy --prefill http://localhost:8100 --decode http://localhost:8200

  kvtier proxy --listen 0.0.0.0:9000 --prefill http://gpu-1:8000 --prefill http://gpu-2:8000 --decode http://gpu-3:8000=10.0.0.3:55555
"""

WHICH = "Engines"
WHEN = "What goes where"
LIMITS = "Limits"


def proxy(
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="An engine that computes prompts. Once for each.", rich_help_panel=WHICH
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[=HOST:PORT]",
            help=(
                "An engine that answers. Once for each. HOST:PORT is where prefillers reach its "
                "`peer.listen`; left out: the engine is asked."
            ),
            rich_help_panel=WHICH,
        ),
    ] = None,
    engine_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file with the engines' API key, for the proxy's own questions. Clients' are passed on.",
            rich_help_panel=WHICH,
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How often engines are asked whether they live.",
            show_default="2s",
            rich_help_panel=WHICH,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where it is reached.", show_default="127.0.0.1:9000"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The file with the token for `/engines`. Left out: only this host adds and removes engines.",
        ),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The controller, which knows who holds a prompt. Left out: who was sent it counts.",
            rich_help_panel=WHEN,
        ),
    ] = None,
    controller_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file with the controller's token.", rich_help_panel=WHEN),
    ] = None,
    least_prefill: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Prompts of which fewer are to be computed are left to the decoder.",
            show_default="256",
            rich_help_panel=WHEN,
        ),
    ] = None,
    most_cached: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Prompts of which the decoder holds so much are left to it.",
            show_default="0.8",
            rich_help_panel=WHEN,
        ),
    ] = None,
    remember: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="How much each engine is thought to hold of what it was sent.",
            show_default="1000000",
            rich_help_panel=WHEN,
        ),
    ] = None,
    patience: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long a decoder waits for what a prefiller has not pushed yet.",
            show_default="10s",
            rich_help_panel=WHEN,
        ),
    ] = None,
    prefill_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="A prefiller that takes longer is done without.",
            show_default="2m",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    silence: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="A decoder that says nothing for so long has failed. Without a stream that is all its time.",
            show_default="10m",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    most_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="At once; more are answered 429.", show_default="1024", rich_help_panel=LIMITS
        ),
    ] = None,
    most_body: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of one request; longer ones are answered 413.",
            show_default="32MiB",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    most_held: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of all requests under way; beyond it 429.",
            show_default="1GiB",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long requests may go on after SIGTERM.",
            show_default="60s",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run a proxy: have prompts computed on prefillers and answered by decoders, for clients of OpenAI's API.

    Stop it with Ctrl-C or SIGTERM: it takes no more requests, waits for those under way, and prints how long
    prefills took; a second signal ends it at once.
    """
    set_up_logging(_level(log_level))

    import anyio

    from kvtier.proxy.serve import serve
    from kvtier.proxy.settings import proxy_settings

    if not decode:
        raise typer.BadParameter("which engine answers? Write --decode http://HOST:PORT")
    settings = proxy_settings(
        prefill=prefill,
        decode=decode,
        engine_key=_secret(engine_key_file, "--engine-key-file"),
        check=check,
        listen=listen,
        token=_secret(token_file, "--token-file"),
        controller=controller,
        controller_token=_secret(controller_token_file, "--controller-token-file"),
        least_prefill=least_prefill,
        most_cached=most_cached,
        remember=remember,
        patience=patience,
        prefill_timeout=prefill_timeout,
        silence=silence,
        most_requests=most_requests,
        most_body=most_body,
        most_held=most_held,
        drain=drain,
    )
    statistics = anyio.run(partial(serve, settings))
    typer.echo(statistics.report())


def _secret(file: Path | None, option: str) -> Any:  # noqa: ANN401 - what a file holds
    from kvtier.settings_secret import resolve

    if file is None:
        return None
    try:
        return resolve({"file": str(file)})
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from error


def _level(text: str) -> str:
    level = text.upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise typer.BadParameter(
            f"{text!r} is none of DEBUG, INFO, WARNING and ERROR", param_hint="--log-level"
        )
    return level
