"""``kvtier events``: what the controller was asked for, and how far it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvtier.cli.controller_follow import conclude, ending, follow, moment, route
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
    event: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One event, with all that is known of it.")
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Wait for the end of the event; of all events: show them as they happen."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many events to list.")] = 20,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """List the last events, the newest first; or show or follow one of them.

    An event that was followed and failed gives exit status 1.
    """
    import msgspec

    with controller(url, token_file, config) as client:
        if event is not None and watch:
            conclude(follow(client, event), as_json=as_json)
        elif event is not None:
            one = client.event(event)
            if as_json:
                print_json(msgspec.to_builtins(one))
            else:
                _print_one(one)
        elif watch:
            _watch(client, as_json=as_json)
        else:
            last = client.events(limit)
            if as_json:
                print_json(msgspec.to_builtins(last))
            else:
                _print_all(last.events)


def _watch(client: Controller, *, as_json: bool) -> None:
    """Print every change until Ctrl-C."""
    import msgspec

    try:
        for event in client.stream():
            if as_json:
                typer.echo(json.dumps(msgspec.to_builtins(event)))
            else:
                how = event.error or (ending(event) if event.state == "done" else _progress(event))
                said = f"{event.event_id} {event.kind} {route(event)}"
                output().print(f"{escape(said)} [{COLOURS[event.state]}]{event.state}[/] {escape(how)}")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _print_all(events: list[Event]) -> None:
    if not events:
        output().print("The controller was asked for nothing yet.")
        return
    rows = table("event", "kind", "state", "where", "tokens", "done", "since", "error")
    for event in events:
        rows.add_row(
            escape(event.event_id),
            escape(event.kind),
            f"[{COLOURS[event.state]}]{event.state}[/]",
            escape(route(event)),
            str(event.num_tokens),
            _progress(event),
            moment(event.created_at),
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
        "asked for": moment(event.created_at),
        "began": moment(event.started_at),
        "ended": moment(event.ended_at),
        "error": event.error or "-",
        "outcome": ending(event) if event.state == "done" else "-",
    }
    lines = table("", "")
    lines.show_header = False
    for name, value in facts.items():
        lines.add_row(f"[bold]{name}[/bold]", escape(value))
    output().print(lines)


def _progress(event: Event) -> str:
    size = f", {format_size(event.bytes_done)}" if event.bytes_done else ""
    return f"{event.chunks_done} of {event.chunks} chunks{size}"
