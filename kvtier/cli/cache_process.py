"""``kvtier status``, ``tenants`` and ``clear-weights``: ask the cache process of this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json, table
from kvtier.errors import ChannelError
from kvtier.units import format_size

Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Socket of the cache process, instead of the one in the settings."),
]

Report = dict[str, Any]
CLEAR_WEIGHTS_EXAMPLES = ("kvtier clear-weights step-1200", "kvtier clear-weights step-1200 --tier ssd")


@contextmanager
def cache_process(config: Path | None, socket: Path | None) -> Iterator[Path]:
    """Yield the socket of an option or the settings, and add what to do to a :class:`ChannelError`."""
    from kvtier.bridge.spawn import default_address
    from kvtier.settings import load_settings

    if socket is None:
        settings = load_settings(file=config)
        socket = settings.socket or default_address(settings)
    try:
        yield socket
    except ChannelError as error:
        if socket.exists():
            raise ChannelError(f"{error}: see its log") from error
        raise ChannelError(f"{error}: start one with `kvtier serve`, or set --socket") from error


def status(config: ConfigFile = None, socket: Socket = None, as_json: AsJson = False) -> None:
    """Show what a cache process on this host is doing: its tiers, engines, peers and controller.

    Exit status 1 if it does not answer. With --json, prints all that it reports.
    """
    from kvtier.bridge import client

    with cache_process(config, socket) as address:
        report = client.status(address)
    if as_json:
        print_json(report)
        return
    output().print(escape(_headline(report, address)))
    for rows in _tables(report):
        output().print()
        output().print(rows)


def _headline(report: Report, socket: Path) -> str:
    counts, lost = report["counts"], ""
    if dropped := counts.get("not_admitted", 0):
        lost = f" {dropped} chunks were dropped, because no lower tier admits them."
    full, failed = counts.get("put_full", 0), counts.get("put_failed", 0)
    if full or failed:
        lost += f" {full + failed} writes of chunks to lower tiers failed, {full} of them without room."
    placement = report["placement"]
    places = report.get("quarantined", {})  # An older process has none.
    return (
        f"Process {report['pid']}, instance {report['instance']}, on {socket}: "
        f"{format_size(report['pending_bytes'])} to be written, {report['flights']} chunks being fetched, "
        f"{report['pinned_chunks']} pinned. "
        f"CPUs {placement['cpus']}, memory policy {placement['memory_policy']}, "
        f"NUMA nodes {placement['memory_nodes']}.{lost}"
        + "".join(
            f" Namespace {name} is in quarantine in {', '.join(tiers)}." for name, tiers in places.items()
        )
    )


def _tables(report: Report) -> Iterator[Table]:
    """Yield a table for each part of the cache process that is in use."""
    yield _tiers(report["tiers"])
    if engines := report["engines"]:
        yield _engines(engines)
    if findings := report.get("findings"):
        yield _findings(findings)
    if buffers := report.get("staging"):
        yield _staging(buffers)
    if peers := report.get("peers"):
        yield _peers(peers)
    if "serving" in report or "kv_transfers" in report:
        yield _transfers(report.get("serving"), report.get("kv_transfers"))
    if controllers := report.get("controllers"):
        yield _controllers(controllers)


def _tiers(tiers: list[Report]) -> Table:
    rows = table("tier", "type", "used", "of", "chunks", "eviction", "last error")
    for tier in tiers:
        capacity, policy, in_use = tier["capacity_bytes"], tier["eviction"], tier["eviction_in_use"]
        if in_use != policy:  # That which `adaptive` follows.
            policy = f"{policy}: {in_use}"
        rows.add_row(
            escape(tier["name"]),
            escape(tier["type"]),
            format_size(tier["used_bytes"]) + _encoding(tier),
            "-" if capacity is None else format_size(capacity),
            str(tier["chunks"]),
            escape(policy or "-"),
            ("" if tier["available"] else "[red]unavailable[/red] ") + escape(tier.get("error") or ""),
        )
    return rows


def _encoding(tier: Report) -> str:
    """Return how a tier stores chunks, if not as they are: `` (lossless 1.41, encrypted)``."""
    codec, ratio = tier.get("codec", "identity"), tier.get("ratio")
    notes = [codec if ratio is None else f"{codec} {ratio:.2f}"] if codec != "identity" else []
    if "encodes" in tier:
        gain = tier["codec_gain"]
        reads = "" if gain is None else f" as reads are {gain:.2f} times as fast"
        notes.append(f"{'encoding' if tier['encodes'] else 'not encoding'} now{reads}")
    notes += ["encrypted"] if tier.get("encrypted") else []
    return f" ({escape(', '.join(notes))})" if notes else ""


def _engines(engines: list[Report]) -> Table:
    rows = table("engine", "weights", "leases", "reservations", "lookups")
    for engine in engines:
        counts = (str(engine[name]) for name in ("leases", "reservations", "tickets"))
        rows.add_row(escape(engine["name"]), escape(engine["weights_id"]) or "-", *counts)
    return rows


def _findings(findings: list[Report]) -> Table:
    rows = table("found", "fix")
    for finding in findings:
        rows.add_row(escape(finding["found"]), escape(finding["remedy"]))
    return rows


def _staging(buffers: list[Report]) -> Table:
    rows = table("staging buffer", "used", "of", "chunks")
    for number, buffer in enumerate(buffers):
        used, capacity = format_size(buffer["used_bytes"]), format_size(buffer["capacity_bytes"])
        rows.add_row(str(number), used, capacity, str(buffer["chunks"]))
    return rows


def _peers(peers: list[Report]) -> Table:
    rows = table("peer", "instance", "state", "read", "last error")
    for peer in peers:
        rows.add_row(
            *map(escape, (peer["address"], peer["instance"] or "-", peer["state"])),
            format_size(peer["read_bytes"]) + _encoding(peer),
            escape(peer["last_error"] or ""),
        )
    return rows


def _transfers(serving: Report | None, kv_transfers: Report | None) -> Table:
    rows = table("to and from peers", "")
    if serving is not None:
        connections = sum(serving["connections"].values())
        rows.add_row("connections from peers", str(connections))
        rows.add_row("granted to peers", format_size(serving["granted_bytes"]))
        rows.add_row("reserved for pushes", format_size(serving["reserving"]["reserved_bytes"]))
    if kv_transfers is not None:
        rows.add_row("KV transfers running", str(kv_transfers["open"]))
        rows.add_row("pushed since the start", format_size(kv_transfers["pushed_bytes"]))
    return rows


def _controllers(controllers: list[Report]) -> Table:
    rows = table("controller", "state", "last error")
    for controller in controllers:
        state = "connected, up to date" if controller["up_to_date"] else "connected"
        rows.add_row(
            escape(controller["url"]),
            state if controller["connected"] else "[red]not connected[/red]",
            escape(controller["last_error"] or ""),
        )
    return rows


def tenants(config: ConfigFile = None, socket: Socket = None, as_json: AsJson = False) -> None:
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


def clear_weights(
    weights_id: Annotated[
        str, typer.Argument(metavar="ID", help="The setting `weights_id`, or vLLM's `weight_version`.")
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
