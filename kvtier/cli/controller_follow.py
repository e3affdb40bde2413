"""Waiting for an event of the controller, with a progress bar on a terminal, and saying how it ended."""

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
"""How long one question waits for the end of the event, before what has been done until then is shown."""
INTERRUPTED = 130
"""The exit status of what Ctrl-C has ended, as shells have it."""
DONE = {
    "move": "moved",
    "copy": "copied",
    "prefetch": "brought up",
    "pin": "pinned",
    "unpin": "unpinned",
    "clear": "removed",
}


def carry_out(controller: Controller, accepted: Accepted, *, wait: bool, as_json: bool) -> None:
    """Wait for the end of what was taken on and say how it went; or say only how it is called.

    Exit status 1, with the reason, where it failed.
    """
    if wait:
        try:
            event = follow(controller, accepted.event_id)
        except ControllerError as error:
            raise ControllerError(
                f"{error}; later, ask again with: kvtier events {accepted.event_id}"
            ) from error
        conclude(event, as_json=as_json)
    elif as_json:
        print_json(msgspec.to_builtins(accepted))
    else:
        output().print(escape(accepted.event_id))


def follow(controller: Controller, event_id: str) -> Event:
    """Wait for the end of an event. Ctrl-C ends the waiting alone, and says so."""
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
        console.print(
            f"It goes on at the controller. Follow it with: kvtier events {escape(event_id)} --follow"
        )
        raise typer.Exit(INTERRUPTED) from None


def conclude(event: Event, *, as_json: bool) -> None:
    """Print how an event has ended. Raises :class:`ControllerError` with the reason where it failed."""
    if as_json:
        print_json(msgspec.to_builtins(event))
    elif event.state == "done":
        output().print(escape(ending(event)))
    if event.state == "failed":
        raise ControllerError(f"{event.kind} {event.event_id} failed: {event.error or 'no reason was given'}")


def ending(event: Event) -> str:
    """What an event that is done has done, in a sentence."""
    result = event.result
    done = f"{DONE.get(event.kind, 'done')} ({route(event)})"
    if event.kind == "clear":
        said = f"{result.removed} chunks {done}, {format_size(result.bytes)} freed."
    elif not event.chunks:
        said = f"Nothing of this is held there: no chunk was {done}."
    else:
        moved = f", {_rate(result.bytes, _seconds(event))}" if result.bytes else ""
        said = f"{result.tokens} tokens {done}: {result.chunks} of {event.chunks} chunks{moved}."
    return f"{said} {result.reason}" if result.reason else said


def route(event: Event) -> str:
    """Where an event takes chunks from and where to, or where it is at work."""
    return " -> ".join(position(place) for place in (event.source, event.target) if place is not None)


def position(place: tuple[str, str | None]) -> str:
    """An instance and its tier, or an instance alone, as commands take them."""
    return "/".join(name for name in place if name)


def moment(stamp: float | None) -> str:
    """Seconds since 1970 as a date and a time of day."""
    if stamp is None:
        return "-"
    return datetime.fromtimestamp(stamp, UTC).astimezone().isoformat(" ", timespec="seconds")


def _seconds(event: Event) -> float:
    if event.started_at is None or event.ended_at is None:
        return 0.0
    return event.ended_at - event.started_at


def _rate(count: int, duration: float) -> str:
    if not count or duration <= 0:
        return format_size(count) if count else ""
    return f"{format_size(count)} in {format_duration(duration)} ({format_size(count / duration)}/s)"
