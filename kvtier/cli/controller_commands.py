"""The commands that ask a controller: lookup, move, prefetch, pin, unpin, clear, instances and events."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.controller_options import COMMANDS, Call, controller_command, parse_place, parse_seconds
from kvtier.units import format_size

__all__ = ["COMMANDS"]

Where = Annotated[str, typer.Argument(metavar="WHERE", help="The tier that holds them, as INSTANCE/TIER.")]


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
    positions = {"old_position": parse_place(source, "FROM"), "new_position": parse_place(target, "TO")}
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
    call.operate("prefetch", **_at(where), deadline=parse_seconds(deadline, "--deadline"))


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
    call.operate("pin", **_at(where), ttl=parse_seconds(ttl, "--ttl"))


@controller_command(
    "kvtier unpin decode-1/ram --prompt-file system-prompt.txt",
    prompt="required",
    waits=True,
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
    instance, tier = parse_place(where, "WHERE") if "/" in where else (where, None)
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
    from kvtier.cli.controller_follow import follow, print_result, stream

    if event is None and watch:
        stream(call.client, as_json=call.as_json)
    elif event is None:
        call.show(call.client.events(limit))
    elif watch:
        print_result(follow(call.client, event), as_json=call.as_json)
    else:
        call.show(call.client.event(event))


def _at(where: str) -> dict[str, str]:
    instance, tier = parse_place(where, "WHERE")
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
