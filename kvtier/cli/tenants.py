"""``kvtier tenants``: show what the tenants of this host's cache process hold."""

from __future__ import annotations

from rich.markup import escape

from kvtier.cli.cache_process import Socket, cache_process
from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json, table
from kvtier.units import format_size


def tenants(
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show what each configured tenant holds in each tier of a cache process on this host.

    `share` is never taken from it for others, and `max` is what it holds at most. `other` is everyone who is
    not configured. Hits and evictions are counts of chunks since the process started.
    """
    from kvtier.bridge import client

    with cache_process(config, socket) as address:
        rows = client.status(address).get("tenants", [])  # An older process has none.
    if as_json:
        print_json(rows)
        return
    if not rows:
        output().print("No tenants are configured: see the setting `tenants`.", markup=False)
        return
    shown = table("tier", "tenant", "used", "share", "max", "chunks", "hits", "evictions")
    for row in rows:
        sizes = (format_size(row[name]) for name in ("used_bytes", "share_bytes", "max_bytes"))
        counts = (str(row[name]) for name in ("chunks", "hits", "evictions"))
        shown.add_row(escape(row["tier"]), escape(row["tenant"]), *sizes, *counts)
    output().print(shown)
