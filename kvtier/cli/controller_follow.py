"""Waiting for an event of the controller, with a progress bar on a terminal, and printing its result."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtier.cli.terminal import messages, output, print_json
from kvtier.errors import ControllerError
from kvtier.units import format_duration, format_size

if TYPE_CHECKING:
    from kvtier.cli.controller_answers import Accepted, Event
    from kvtier.cli.controller_client import Controller

POLL_SECONDS = 0.5
"""Long-poll interval, after which the progress is redrawn."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""
DONE = {
    "move": "moved",
    "copy": "copied",
    "prefetch": "prefetched",
    "pin": "pinned",
    "unpin": "unpinned",
    "clear": "removed",
}


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
        print_json(msgspec.to_builtins(accepted))
    else:
        output().print(escape(accepted.event_id))


def follow(controller: Controller, event_id: str) -> Event:
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
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(escape(event_id), total=0, bytes="")
            began: float | None = None
            while True:
                event = controller.event(event_id, wait=POLL_SECONDS)
                if event.ended:
                    return event
                if event.state == "running" and began is None:
                    began = time.monotonic()
                progress.update(
                    bar,
                    description=f"{event.kind} {event.state}",
                    total=event.chunks,
                    completed=event.chunks_done,
                    bytes=_rate(event.bytes_done, time.monotonic() - began if began else 0.0),
                )
    except KeyboardInterrupt:
        console.print(f"The operation continues. Follow it with: kvtier events {escape(event_id)} --follow")
        raise typer.Exit(INTERRUPTED) from None


def print_result(event: Event, *, as_json: bool) -> None:
    """Print the result of an event. Raises: ControllerError: it failed, with the reason."""
    if as_json:
        print_json(msgspec.to_builtins(event))
    elif event.state == "done":
        output().print(escape(describe_result(event)))
    if event.state == "failed":
        raise ControllerError(f"{event.kind} {event.event_id} failed: {event.error or 'no reason was given'}")


def describe_result(event: Event) -> str:
    """Return the result of a finished event as a sentence."""
    result = event.result
    done = f"{DONE.get(event.kind, 'done')} ({route(event)})"
    if event.kind == "clear":
        text = f"{result.removed} chunks {done}, {format_size(result.bytes)} freed."
    elif not event.chunks:
        text = f"No chunk of it is held there: none was {done}."
    else:
        transfer = f", {_rate(result.bytes, _seconds(event))}" if result.bytes else ""
        text = f"{result.tokens} tokens {done}: {result.chunks} of {event.chunks} chunks{transfer}."
    return f"{text} {result.reason}" if result.reason else text


def route(event: Event) -> str:
    """Return an event's source and target as text, or its only place."""
    return " -> ".join(format_place(place) for place in (event.source, event.target) if place is not None)


def format_place(place: tuple[str, str | None]) -> str:
    """Format a place as INSTANCE/TIER, or INSTANCE for all tiers."""
    return "/".join(name for name in place if name)


def format_time(timestamp: float | None) -> str:
    """Format a Unix timestamp as local date and time."""
    if timestamp is None:
        return "-"
    return datetime.fromtimestamp(timestamp, UTC).astimezone().isoformat(" ", timespec="seconds")


def _seconds(event: Event) -> float:
    if event.started_at is None or event.ended_at is None:
        return 0.0
    return event.ended_at - event.started_at


def _rate(count: int, duration: float) -> str:
    if not count or duration <= 0:
        return format_size(count) if count else ""
    return f"{format_size(count)} in {format_duration(duration)} ({format_size(count / duration)}/s)"
