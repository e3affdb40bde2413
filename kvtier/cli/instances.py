"""``kvtier instances``: list registered instances and the fill of their tiers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvtier.cli.controller_follow import format_time
from kvtier.cli.controller_options import ControllerURL, SettingsFile, TokenFile, controller
from kvtier.cli.terminal import AsJson, output, print_json, table
from kvtier.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.cli.controller_answers import Instance, Tier

EXAMPLES = """
Examples:

  kvtier instances

  kvtier instances decode-1 --json
"""


def instances(
    instance: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this instance in detail.")
    ] = None,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """List the registered instances, their tiers and fill, or show one of them."""
    import msgspec

    with controller(url, token_file, config) as client:
        if instance is None:
            registered = client.instances()
            if as_json:
                print_json(msgspec.to_builtins(registered))
            else:
                _print_all(registered.instances)
            return
        one = client.instance(instance)
    if as_json:
        print_json(msgspec.to_builtins(one))
    else:
        _print_one(one)


def _print_all(registered: Sequence[Instance]) -> None:
    if not registered:
        output().print("No instance is registered: set controller.url in the settings of an instance.")
        return
    rows = table("instance", "tier", "type", "used", "of", "chunks", "hit rate", "models", "heartbeat")
    for instance in registered:
        common = [
            _rate(instance.hit_rate),
            ", ".join(instance.models) or "-",
            _format_age(instance.last_heartbeat),
        ]
        for tier in instance.tiers:
            rows.add_row(*map(escape, [instance.instance, *_cells(tier), *common]))
    output().print(rows)


def _print_one(instance: Instance) -> None:
    facts = {
        "instance": instance.instance,
        "state": instance.state + ("" if instance.up_to_date else ", catching up"),
        "version": instance.version,
        "host": instance.host,
        "process": str(instance.process),
        "peer address": instance.peer or "none: peer.listen is not set",
        "transport": instance.transport or "-",
        "registered": format_time(instance.registered_at),
        "last heartbeat": format_time(instance.last_heartbeat),
        "models": ", ".join(instance.models) or "-",
        "engines": ", ".join(instance.engines) or "-",
        "hit rate": f"{_rate(instance.hit_rate)} of {instance.looked_up} chunks looked up",
    }
    lines = table("", "")
    lines.show_header = False
    for name, value in facts.items():
        lines.add_row(f"[bold]{name}[/bold]", escape(value))
    output().print(lines)
    rows = table("tier", "type", "used", "of", "chunks", "found", "")
    for tier in instance.tiers:
        state = "" if tier.available else "[red]unavailable[/red]"
        rows.add_row(*map(escape, _cells(tier)), str(tier.found), state)
    output().print(rows)


def _cells(tier: Tier) -> list[str]:
    if tier.capacity is None:
        return [tier.name, tier.type, "-", "shared", str(tier.chunks)]
    used = f"{format_size(tier.used)} ({tier.used / tier.capacity:.0%})"
    return [tier.name, tier.type, used, format_size(tier.capacity), str(tier.chunks)]


def _rate(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _format_age(timestamp: float | None) -> str:
    return "-" if timestamp is None else f"{format_duration(round(max(0.0, time.time() - timestamp), 1))} ago"
