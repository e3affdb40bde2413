"""Answers of the controller as JSON, tables and sentences, and the progress of an operation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer
from pydantic import BaseModel
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvtier.cli.terminal import messages, output, print_json, table
from kvtier.errors import ControllerError
from kvtier.fleet.controller.answers import (
    EventsAnswer,
    InstanceAnswer,
    InstancesAnswer,
    InstanceWithHistory,
    LookupAnswer,
    PinsAnswer,
    TierAnswer,
)
from kvtier.fleet.controller.events import Event
from kvtier.units import format_duration, format_size

if TYPE_CHECKING:
    from kvtier.cli.controller_api import ControllerAPI
    from kvtier.fleet.controller.answers import Accepted

COLOURS = {"queued": "dim", "running": "yellow", "done": "green", "failed": "red"}
DONE = {
    "move": "moved",
    "copy": "copied",
    "prefetch": "prefetched",
    "pin": "pinned",
    "unpin": "unpinned",
    "clear": "removed",
}

POLL_SECONDS = 0.5
"""Long-poll interval, after which the progress is redrawn."""
ENDED = ("done", "failed")
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""


def show(answer: BaseModel, *, as_json: bool) -> None:
    """Print an answer as JSON, or as a table."""
    match answer:
        case _ if as_json:
            print_json(answer.model_dump(mode="json"))
        case LookupAnswer():
            _show_found(answer)
        case InstancesAnswer():
            _show_instances(answer)
        case InstanceWithHistory():
            _show_instance(answer)
        case PinsAnswer():
            _show_pins(answer)
        case EventsAnswer():
            _show_events(answer)
        case Event():
            _show_event(answer)


def describe_result(event: Event) -> str:
    """Return the result of a finished event as a sentence."""
    result = event.result
    done = f"{DONE.get(event.kind, 'done')} ({route(event)})"
    if event.kind == "clear":
        text = f"{result.removed} chunks {done}, {format_size(result.bytes)} freed."
    elif not event.chunks:
        text = f"No chunk of it is held there: none was {done}."
    else:
        seconds = (event.ended_at or 0.0) - (event.started_at or event.ended_at or 0.0)
        transfer = f", {transferred(result.bytes, seconds)}" if result.bytes else ""
        text = f"{result.tokens} tokens {done}: {result.chunks} of {event.chunks} chunks{transfer}."
    if result.unpinned and event.kind != "unpin":
        text += f" {result.unpinned} of them were pinned, and are not any more."
    return f"{text} {result.reason}" if result.reason else text


def route(event: Event) -> str:
    """Return an event's source and target as INSTANCE/TIER, or its only place. INSTANCE means all tiers."""
    places = (place for place in (event.source, event.target) if place is not None)
    return " -> ".join("/".join(name for name in place if name) for place in places)


def progress(event: Event) -> str:
    """Return the number of chunks done, and their size."""
    size = f", {format_size(event.bytes_done)}" if event.bytes_done else ""
    return f"{event.chunks_done} of {event.chunks} chunks{size}"


def transferred(count: int, duration: float) -> str:
    """Return a number of bytes and its rate; nothing for 0 bytes."""
    if not count or duration <= 0:
        return format_size(count) if count else ""
    return f"{format_size(count)} in {format_duration(duration)} ({format_size(count / duration)}/s)"


def _show_found(found: LookupAnswer) -> None:
    rows = table("instance", "tier", "tokens", "of the prompt")
    held = [
        (-count, instance, tier)
        for instance, tiers in found.instances.items()
        for tier, count in tiers.items()
        if count
    ]
    for count, instance, tier in sorted(held):
        rows.add_row(escape(instance), escape(tier), str(-count), _percent(-count / (found.num_tokens or 1)))
    output().print(
        rows
        if held
        else f"No instance holds a prefix of this prompt ({found.num_tokens} tokens, model "
        f"{escape(found.model)})."
    )


def _show_instances(answer: InstancesAnswer) -> None:
    if not answer.instances:
        output().print("No instance is registered: set controller.url in the settings of an instance.")
        return
    rows = table(
        "instance", "tier", "type", "used", "of", "chunks", "hit rate (5 min)", "models", "heartbeat"
    )
    for each in answer.instances:
        common = [", ".join(each.models) or "-", _age(each.last_heartbeat)]
        for tier in each.tiers:
            cells = [each.instance, *_tier_cells(tier), _percent(tier.hit_rate), *common]
            rows.add_row(*map(escape, cells))
    output().print(rows)


def _show_instance(instance: InstanceAnswer) -> None:
    _show_facts(
        {
            "instance": instance.instance,
            "state": instance.state + ("" if instance.up_to_date else ", catching up"),
            "version": instance.version,
            "host": instance.host,
            "process": str(instance.process),
            "peer address": instance.peer or "none: peer.listen is not set",
            "transport": instance.transport or "-",
            "registered": _time(instance.registered_at),
            "last heartbeat": _time(instance.last_heartbeat),
            "models": ", ".join(instance.models) or "-",
            "engines": ", ".join(instance.engines) or "-",
            "pinned": f"{instance.pinned} chunks",
            "hit rate": _hit_rate(instance),
        }
    )
    rows = table("tier", "type", "used", "of", "chunks", "found", "hit rate (5 min)", "")
    for tier in instance.tiers:
        state = "" if tier.available else "[red]unavailable[/red]"
        rows.add_row(*map(escape, _tier_cells(tier)), str(tier.found), _percent(tier.hit_rate), state)
    output().print(rows)


def _show_pins(answer: PinsAnswer) -> None:
    if not answer.pins:
        output().print("Nothing is pinned.")
        return
    rows = table("instance", "chunks", "held", "pinned", "until")
    for pin in answer.pins:
        until = "unpinned" if pin.until is None else _time(pin.until)
        rows.add_row(escape(pin.instance), str(pin.chunks), str(pin.held), _time(pin.pinned_at), until)
    output().print(rows)
    if answer.total > len(answer.pins):
        output().print(f"{answer.total - len(answer.pins)} more: use --limit.")


def _show_events(answer: EventsAnswer) -> None:
    if not answer.events:
        output().print("No events.")
        return
    rows = table("event", "kind", "state", "where", "tokens", "done", "created", "error")
    for event in answer.events:
        rows.add_row(
            escape(event.event_id),
            event.kind,
            f"[{COLOURS[event.state]}]{event.state}[/]",
            escape(route(event)),
            str(event.num_tokens),
            progress(event),
            _time(event.created_at),
            escape(event.error or ""),
        )
    output().print(rows)


def _show_event(event: Event) -> None:
    _show_facts(
        {
            "event": event.event_id,
            "kind": event.kind,
            "state": event.state,
            "where": route(event),
            "model": event.model or "-",
            "tokens": str(event.num_tokens),
            "done": progress(event),
            "created": _time(event.created_at),
            "started": _time(event.started_at),
            "ended": _time(event.ended_at),
            "error": event.error or "-",
            "result": describe_result(event) if event.state == "done" else "-",
        }
    )


def _show_facts(facts: Mapping[str, str]) -> None:
    lines = table("", "")
    lines.show_header = False
    for name, value in facts.items():
        lines.add_row(f"[bold]{name}[/bold]", escape(value))
    output().print(lines)


def _tier_cells(tier: TierAnswer) -> list[str]:
    if tier.capacity is None:
        return [tier.name, tier.type, "-", "shared", str(tier.chunks)]
    used = f"{format_size(tier.used)} ({tier.used / tier.capacity:.0%})"
    return [tier.name, tier.type, used, format_size(tier.capacity), str(tier.chunks)]


def _hit_rate(instance: InstanceAnswer) -> str:
    if instance.hit_rate is None:
        return "no lookup in the last 5 min"
    return f"{_percent(instance.hit_rate)} of {instance.looked_up_tokens} tokens looked up in the last 5 min"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _age(timestamp: float | None) -> str:
    return "-" if timestamp is None else f"{format_duration(round(max(0.0, time.time() - timestamp), 1))} ago"


def _time(timestamp: float | None) -> str:
    """Format a Unix timestamp as local date and time."""
    if timestamp is None:
        return "-"
    return datetime.fromtimestamp(timestamp, UTC).astimezone().isoformat(" ", timespec="seconds")


def print_outcome(controller: ControllerAPI, accepted: Accepted, *, wait: bool, as_json: bool) -> None:
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


def follow(controller: ControllerAPI, event_id: str) -> Event:
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
                # So that the rate leaves out the time in the queue.
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


def print_result(event: Event, *, as_json: bool) -> None:
    """Print the result of an event. Raises: ControllerError: it failed, with the reason."""
    if as_json:
        show(event, as_json=True)
    elif event.state == "done":
        output().print(escape(describe_result(event)))
    if event.state == "failed":
        raise ControllerError(f"{event.kind} {event.event_id} failed: {event.error or 'no reason was given'}")


def stream(controller: ControllerAPI, *, as_json: bool) -> None:
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
