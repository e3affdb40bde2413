"""``kvtier clear-weights``: remove the chunks of some weights from the tiers of this host."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.cache_process import Socket, cache_process
from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json
from kvtier.units import format_size

EXAMPLES = ("kvtier clear-weights step-1200", "kvtier clear-weights step-1200 --tier ssd")


def clear_weights(
    weights_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="The setting `weights_id`, or vLLM's `weight_version`."),
    ],
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", metavar="NAME", help="Only from this tier. Repeatable. Default: all tiers."),
    ] = None,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Remove the chunks of some weights from the tiers of this host's cache process.

    Finds them by the id alone, also if no engine has these weights now. Of a shared pool, removes those that
    this host has stored or found.
    """
    from kvtier.bridge import client

    with cache_process(config, socket) as address:
        cleared = client.clear_weights(address, weights_id, tier)
    if as_json:
        print_json({"chunks": cleared.chunks, "bytes": cleared.bytes})
    else:
        amount = f"{cleared.chunks} chunks, {format_size(cleared.bytes)}"
        output().print(f"Removed {amount}, of weights {weights_id!r}.", markup=False)
