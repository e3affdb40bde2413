"""``kvtier proxy``: one address in front of prefill and decode instances."""

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

ENGINES_PANEL = "Engines"
ROUTING_PANEL = "Routing"
LIMITS_PANEL = "Limits"


def proxy(
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A prefill instance. Repeatable.", rich_help_panel=ENGINES_PANEL),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[=HOST:PORT]",
            help=(
                "A decode instance. Repeatable. HOST:PORT is the address where prefill instances reach its "
                "`peer.listen`. Default: ask the engine."
            ),
            rich_help_panel=ENGINES_PANEL,
        ),
    ] = None,
    engine_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the engines' API key, for the proxy's own requests. Clients' keys are forwarded.",
            rich_help_panel=ENGINES_PANEL,
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Interval of health checks of engines.",
            show_default="2s",
            rich_help_panel=ENGINES_PANEL,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address to listen on.", show_default="127.0.0.1:9000"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the token for `/engines`. Default: only this host can add and remove engines.",
        ),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of the controller, to look up which engine holds a prompt. Default: track prompts.",
            rich_help_panel=ROUTING_PANEL,
        ),
    ] = None,
    controller_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the controller's token.", rich_help_panel=ROUTING_PANEL),
    ] = None,
    min_prefill: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Prompts with fewer tokens to compute are prefilled by the decode instance.",
            show_default="256",
            rich_help_panel=ROUTING_PANEL,
        ),
    ] = None,
    max_cached: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Prompts of which the decode instance holds this share are prefilled by it.",
            show_default="0.8",
            rich_help_panel=ROUTING_PANEL,
        ),
    ] = None,
    remember: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens that each engine is assumed to keep of the prompts sent to it.",
            show_default="1000000",
            rich_help_panel=ROUTING_PANEL,
        ),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time that a decode instance waits for the KV transfer.",
            show_default="10s",
            rich_help_panel=ROUTING_PANEL,
        ),
    ] = None,
    prefill_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Maximum time of a prefill. Beyond this, the decode instance computes the prompt.",
            show_default="2m",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    idle_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Maximum time between data from a decode instance. Without streaming, its total time.",
            show_default="10m",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Concurrent requests; further ones get 429.",
            show_default="1024",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    max_body: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of a request body; longer ones get 413.",
            show_default="32MiB",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    max_held: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Total size of request bodies in flight; beyond this, requests get 429.",
            show_default="1GiB",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Grace period for requests after SIGTERM.",
            show_default="60s",
            rich_help_panel=LIMITS_PANEL,
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Run a proxy for OpenAI's API, in front of prefill instances and decode instances.

    Stop it with Ctrl-C or SIGTERM: it refuses new requests, waits for those in flight, and prints how long
    prefills took; a second signal stops it at once.
    """
    set_up_logging(_level(log_level))

    import anyio

    from kvtier.proxy.serve import serve
    from kvtier.proxy.settings import proxy_settings

    if not decode:
        raise typer.BadParameter("no decode instance: use --decode http://HOST:PORT")
    settings = proxy_settings(
        prefill=prefill,
        decode=decode,
        engine_key=_secret(engine_key_file, "--engine-key-file"),
        check=check,
        listen=listen,
        token=_secret(token_file, "--token-file"),
        controller=controller,
        controller_token=_secret(controller_token_file, "--controller-token-file"),
        min_prefill=min_prefill,
        max_cached=max_cached,
        remember=remember,
        timeout=timeout,
        prefill_timeout=prefill_timeout,
        idle_timeout=idle_timeout,
        max_requests=max_requests,
        max_body=max_body,
        max_held=max_held,
        drain=drain,
    )
    statistics = anyio.run(partial(serve, settings))
    typer.echo(statistics.report())


def _secret(file: Path | None, option: str) -> Any:  # noqa: ANN401 - the content of a file
    from kvtier.settings.secret import resolve

    if file is None:
        return None
    try:
        return resolve({"file": str(file)})
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from error


def _level(text: str) -> str:
    level = text.upper()
    if level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise typer.BadParameter(f"{text!r} is not DEBUG, INFO, WARNING or ERROR", param_hint="--log-level")
    return level
