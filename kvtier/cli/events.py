"""``kvtier events``: list and follow the controller's operations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvtier.cli.controller_follow import describe_result, follow, format_time, print_result, route
from kvtier.cli.controller_options import ControllerURL, SettingsFile, TokenFile, controller
from kvtier.cli.terminal import AsJson, output, print_json, table
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.cli.controller_answers import Event
    from kvtier.cli.controller_client import Controller

EXAMPLES = """
Examples:

  kvtier events

  kvtier events --follow

  kvtier events 01J9ZK3V7Q --follow
"""
COLOURS = {"queued": "dim", "running": "yellow", "done": "green", "failed": "red"}


def events(
    event: Annotated[str | None, typer.Argument(metavar="[ID]", help="Show this event in detail.")] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Wait for the end of the event. Without an id, stream all changes."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of events to list.")] = 20,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """List the latest events, newest first, or show or follow one of them.

    Exit status 1 if a followed event fails.
    """
    import msgspec

    with controller(url, token_file, config) as client:
        if event is not None and watch:
            print_result(follow(client, event), as_json=as_json)
        elif event is not None:
            shown = client.event(event)
            if as_json:
                print_json(msgspec.to_builtins(shown))
            else:
                _print_one(shown)
        elif watch:
            _watch(client, as_json=as_json)
        else:
            last = client.events(limit)
            if as_json:
                print_json(msgspec.to_builtins(last))
            else:
                _print_all(last.events)


def _watch(client: Controller, *, as_json: bool) -> None:
    """Print all changes until Ctrl-C."""
    import msgspec

    try:
        for event in client.stream():
            if as_json:
                typer.echo(json.dumps(msgspec.to_builtins(event)))
            else:
                detail = event.error or (
                    describe_result(event) if event.state == "done" else _progress(event)
                )
                text = f"{event.event_id} {event.kind} {route(event)}"
                output().print(f"{escape(text)} [{COLOURS[event.state]}]{event.state}[/] {escape(detail)}")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _print_all(events: list[Event]) -> None:
    if not events:
        output().print("No events.")
        return
    rows = table("event", "kind", "state", "where", "tokens", "done", "created", "error")
    for event in events:
        rows.add_row(
            escape(event.event_id),
            escape(event.kind),
            f"[{COLOURS[event.state]}]{event.state}[/]",
            escape(route(event)),
            str(event.num_tokens),
            _progress(event),
            format_time(event.created_at),
            escape(event.error or ""),
        )
    output().print(rows)


def _print_one(event: Event) -> None:
    facts = {
        "event": event.event_id,
        "kind": event.kind,
        "state": event.state,
        "where": route(event),
        "model": event.model or "-",
        "tokens": str(event.num_tokens),
        "done": _progress(event),
        "created": format_time(event.created_at),
        "started": format_time(event.started_at),
        "ended": format_time(event.ended_at),
        "error": event.error or "-",
        "result": describe_result(event) if event.state == "done" else "-",
    }
    lines = table("", "")
    lines.show_header = False
    for name, value in facts.items():
        lines.add_row(f"[bold]{name}[/bold]", escape(value))
    output().print(lines)


def _progress(event: Event) -> str:
    size = f", {format_size(event.bytes_done)}" if event.bytes_done else ""
    return f"{event.chunks_done} of {event.chunks} chunks{size}"
