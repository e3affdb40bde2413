"""Waiting for events of the controller, with a progress bar on a terminal, and printing their results."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtier.cli.controller_tables import COLOURS, describe_result, progress, route, show, transferred
from kvtier.cli.terminal import messages, output
from kvtier.errors import ControllerError

if TYPE_CHECKING:
    from kvtier.cli.controller_client import Controller
    from kvtier.fleet.controller.answers import Accepted, EventAnswer

POLL_SECONDS = 0.5
"""Long-poll interval, after which the progress is redrawn."""
ENDED = ("done", "failed")
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""


def print_outcome(controller: Controller, accepted: Accepted, *, wait: bool, as_json: bool) -> None:
    """Wait for an operation and print its result, or without ``wait`` only print its id.

    Raises: ControllerError: the operation failed.
    """
    if wait:
        try:
            event = follow(controller, accepted.event_id)
        except ControllerError as error:
            raise ControllerError(
                f"{error}; check it later with: kvtier events {accepted.event_id}"
            ) from error
        print_result(event, as_json=as_json)
    elif as_json:
        show(accepted, as_json=True)
    else:
        output().print(escape(accepted.event_id))


def follow(controller: Controller, event_id: str) -> EventAnswer:
    """Wait for the end of an event. Ctrl-C stops waiting, but not the operation."""
    console = messages()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} chunks"),
        TextColumn("{task.fields[bytes]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task(escape(event_id), total=0, bytes="")
            began: float | None = None
            while True:
                event = controller.event(event_id, wait=POLL_SECONDS)
                if event.state in ENDED:
                    return event
                if event.state == "running" and began is None:
                    began = time.monotonic()
                bars.update(
                    bar,
                    description=f"{event.kind} {event.state}",
                    total=event.chunks,
                    completed=event.chunks_done,
                    bytes=transferred(event.bytes_done, time.monotonic() - began if began else 0.0),
                )
    except KeyboardInterrupt:
        console.print(f"The operation continues. Follow it with: kvtier events {escape(event_id)} --follow")
        raise typer.Exit(INTERRUPTED) from None


def print_result(event: EventAnswer, *, as_json: bool) -> None:
    """Print the result of an event. Raises: ControllerError: it failed, with the reason."""
    if as_json:
        show(event, as_json=True)
    elif event.state == "done":
        output().print(escape(describe_result(event)))
    if event.state == "failed":
        raise ControllerError(f"{event.kind} {event.event_id} failed: {event.error or 'no reason was given'}")


def stream(controller: Controller, *, as_json: bool) -> None:
    """Print all changes of events until Ctrl-C. Raises: ControllerError: the stream has ended."""
    try:
        for event in controller.stream():
            if as_json:
                typer.echo(event.model_dump_json())
            else:
                detail = event.error or (describe_result(event) if event.state == "done" else progress(event))
                text = f"{event.event_id} {event.kind} {route(event)}"
                output().print(f"{escape(text)} [{COLOURS[event.state]}]{event.state}[/] {escape(detail)}")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
