"""``kvtier whatif``: show what other capacities and policies would bring to this host's cache process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from msgspec import to_builtins
from rich.markup import escape
from rich.table import Table

from kvtier.cli.cache_process import Socket, cache_process
from kvtier.cli.options import parsed
from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table
from kvtier.observability.whatif.report import Change, Point, Report, TierCurve
from kvtier.units import format_size, parse_size

EXAMPLES = (
    "kvtier whatif",
    "kvtier whatif --tier ram --add 50GiB",
    "kvtier whatif --tier ssd --add=-1TiB",
)
BAR_CELLS = 40
"""Width of the bar of a hit rate of 1."""


def whatif(
    tier: Annotated[
        str | None,
        typer.Option("--tier", metavar="NAME", help="Only what concerns this tier. Default: all tiers."),
    ] = None,
    add: Annotated[
        str | None,
        typer.Option(
            "--add",
            metavar="SIZE",
            help="What this much more capacity of a tier would bring, such as 50GiB; --add=-50GiB for less.",
        ),
    ] = None,
    config: ConfigFile = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show what other capacities and policies would bring to a cache process on this host.

    The process estimates it from the lookups of its engines while it serves them: the hit rate of the whole
    cache if one tier had another capacity or policy, and all else stayed as it is. Each chunk counts as
    often as it was asked for. Points are percentage points of that hit rate.

    Hit rates between two estimated capacities are interpolated. With --json and --add, prints the changes.
    """
    from kvtier.bridge import client
    from kvtier.observability.whatif import sentences

    added = None if add is None else _parse_added(add)
    with cache_process(config, socket) as address:
        answer = client.what_if(address)
    report = answer.report
    if report is None:
        if as_json:
            print_json(None)
        else:
            reason = sentences.NOTHING_OBSERVED if answer.enabled else sentences.DISABLED
            output().print(reason, markup=False)
        return
    if tier is not None:
        report = _only(report, tier)
    if added is not None:
        _show_added(report, added, as_json=as_json)
    elif as_json:
        print_json(to_builtins(report))
    else:
        _show(report)


def _parse_added(text: str) -> int:
    """Return a size that may be negative. Raises: typer.BadParameter."""
    size = parsed(parse_size, text.removeprefix("-").removeprefix("+"), "--add")
    return -size if text.startswith("-") else size


def _only(report: Report, tier: str) -> Report:
    """Return what a report says about one tier. Raises: typer.BadParameter."""
    curves = [curve for curve in report.tiers if curve.tier == tier]
    if not curves:
        known = ", ".join(curve.tier for curve in report.tiers) or "none"
        raise typer.BadParameter(
            f"nothing is estimated for a tier {tier!r}, but for: {known}", param_hint="--tier"
        )
    changes = [change for change in report.changes if change.tier == tier]
    return replace(report, tiers=curves, changes=changes)


def _show_added(report: Report, added: int, *, as_json: bool) -> None:
    """Print what more capacity would bring, for each tier whose curve goes that far.

    Raises: typer.BadParameter: none does.
    """
    from kvtier.observability.whatif.report import change_to
    from kvtier.observability.whatif.sentences import MIN_SAMPLED, UNRELIABLE, sentence

    changes = [
        change
        for curve in report.tiers
        if (change := change_to(report, curve, curve.capacity_bytes + added)) is not None
    ]
    if not changes:
        known = "; ".join(_range(curve) for curve in report.tiers) or "there is none"
        raise typer.BadParameter(f"the estimate does not go that far: {known}", param_hint="--add")
    if as_json:
        print_json(to_builtins(changes))
        return
    for change in changes:
        output().print(sentence(change, report), markup=False)
    if report.sampled < MIN_SAMPLED:
        messages().print(f"Observed: {report.sampled:,} chunks. {UNRELIABLE}", markup=False)


def _range(curve: TierCurve) -> str:
    from kvtier.observability.whatif.report import known_points

    sizes = [format_size(point.capacity_bytes) for point in known_points(curve)]
    return f"{curve.tier} from {sizes[0]} to {sizes[-1]}, it has {format_size(curve.capacity_bytes)}"


def _show(report: Report) -> None:
    from kvtier.observability.whatif.sentences import basis, findings

    for line in basis(report):
        output().print(line, markup=False)
    for number, line in enumerate(findings(report)):
        output().print("" if number else "\n", line, sep="", markup=False)
    for curve in report.tiers:
        output().print()
        output().print(_curve(curve, report.changes))


def _curve(curve: TierCurve, changes: Sequence[Change]) -> Table:
    """Return the hit rate at each capacity as a table with bars, and then that of each policy."""
    from kvtier.observability.whatif.report import known_points

    rows = table(escape(curve.tier), "hit rate", f"in {escape(curve.tier)} or faster", "", "")
    for point in known_points(curve):
        today = point.capacity_bytes == curve.capacity_bytes
        _add_row(rows, point, f"today, policy {curve.policy}" if today else "")
    for change in changes:
        if change.tier == curve.tier and change.capacity_bytes is None:
            changed = f"policy {change.policy}" if change.codec is None else f"codec {change.codec}"
            _add_row(rows, Point(curve.capacity_bytes, change.hit_rate), changed)
    return rows


def _add_row(rows: Table, point: Point, note: str) -> None:
    """Add a capacity. The bar is dark as far as hits are in the tier or faster ones, if that is known."""
    cells, fast = round(BAR_CELLS * point.hit_rate), point.fast_hit_rate
    dark = cells if fast is None else min(cells, round(BAR_CELLS * fast))
    bar = "█" * dark + "░" * (cells - dark)
    size = format_size(point.capacity_bytes)
    rows.add_row(size, _percent(point.hit_rate), "" if fast is None else _percent(fast), bar, escape(note))


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"
