"""Report results as tables, as JSON and as a plot, for which the caller checks that matplotlib exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvtier.lab.simulation.replay import Model, Outcome
from kvtier.lab.simulation.study import Row, Study
from kvtier.units import GIB, format_duration, format_size
from kvtier.version import __version__

DASH = "—"


def headline_of(study: Study) -> str:
    """Return what the trace is."""
    return (
        f"{study.name}: {study.requests:,} requests in {format_duration(study.seconds)}, {study.chunks:,} "
        f"chunks of {study.chunk_tokens} tokens and {format_size(study.chunk_bytes)}, {study.unique:,} "
        f"distinct ({format_size(study.unique_bytes)})"
    )


def table_of(study: Study) -> Table:
    """Return a table with a row for each cache."""
    table = Table(box=None, pad_edge=False)
    several = len(study.rows[0].outcome.tiers) > 1
    table.add_column("policy", overflow="fold")
    columns = ["capacity", "of trace", "hit rate", "Belady"]
    names = [tier.name for tier in study.rows[0].outcome.tiers]
    columns += [f"hits {name}" for name in names] if several else []
    columns += ["saved tokens", "TTFT"]
    for name in names:
        columns += [f"{name} read", f"{name} written"]
    for column in columns:
        table.add_column(escape(column), justify="right")
    for row in study.rows:
        table.add_row(escape(row.outcome.policy), *_cells(study, row, several=several))
    return table


def remarks_of(study: Study) -> list[str]:
    """Return lines to print below the table."""
    remarks = []
    if study.out_of_order:
        remarks.append("requests were not in the order of their time, and have been sorted")
    if study.repeated:
        remarks.append(f"{study.repeated:,} chunks that a prompt had before were left out")
    if ends := study.rows[0].outcome.ends:
        remarks.append(f"the ends of {ends:,} answers were reported to the policies")
    for row in study.rows:
        outcome = row.outcome
        if outcome.no_room:
            remarks.append(
                f"{outcome.policy}: {outcome.no_room:,} chunks of lower tiers had no room in "
                f"{outcome.tiers[0].name}, and count as misses"
            )
        if outcome.computed_instead:
            remarks.append(
                f"{outcome.policy}: {outcome.computed_instead:,} chunks would have arrived later than "
                "computed, and count as misses"
            )
    return remarks


def windows_table(study: Study) -> Table:
    """Return a table with the hit rate in each window of time."""
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", overflow="fold")
    table.add_column("capacity", justify="right")
    count = len(study.rows[0].outcome.windows)
    for window in range(count):
        table.add_column(f"to {format_duration(study.seconds * (window + 1) / count)}", justify="right")
    for row in study.rows:
        rates = [DASH if rate is None else _percent(rate) for rate in row.outcome.windows]
        table.add_row(escape(row.outcome.policy), _size(row.outcome), *rates)
    return table


def json_of(studies: Sequence[Study], model: Model) -> dict[str, Any]:
    """Return all results, ready for JSON."""
    return {
        "kvtier": __version__,
        "model": asdict(model),
        "traces": [_trace(study) for study in studies],
    }


def _trace(study: Study) -> dict[str, Any]:
    rows = [
        {**asdict(row.outcome), "hit_rate": row.outcome.hit_rate, "belady_hit_rate": row.bound}
        for row in study.rows
    ]
    return {**asdict(study), "unique_bytes": study.unique_bytes, "rows": rows}


def _cells(study: Study, row: Row, *, several: bool) -> list[str]:
    outcome = row.outcome
    capacity = outcome.capacity
    share = DASH if capacity is None else f"{100 * capacity / study.unique_bytes:.3g} %"
    cells = [_size(outcome), share, _percent(outcome.hit_rate)]
    cells.append(DASH if row.bound is None else _percent(row.bound))
    if several:
        cells += [_percent(tier.hits / outcome.asked) for tier in outcome.tiers]
    saved = outcome.saved_tokens / outcome.tokens if outcome.tokens else 0.0
    cells += [f"{outcome.saved_tokens:,} ({_percent(saved)})", format_duration(outcome.ttft_seconds)]
    for tier in outcome.tiers:
        cells += [format_size(tier.read_bytes), format_size(tier.written_bytes)]
    return cells


def _size(outcome: Outcome) -> str:
    return DASH if outcome.capacity is None else format_size(outcome.capacity)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def save_plot(studies: Sequence[Study], path: Path) -> None:
    """Save a PNG with the hit rate of each policy over the capacity, one chart for each trace. Blocks.

    Omits caches with a shared pool, which have no capacity. Raises ``OSError``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 + 4 * len(studies)), layout="constrained")
    for at, study in enumerate(studies, 1):
        axes = figure.add_subplot(len(studies), 1, at)
        rows = sorted(
            (row for row in study.rows if row.outcome.capacity is not None),
            key=lambda row: row.outcome.capacity or 0,
        )
        for policy in dict.fromkeys(row.outcome.policy for row in study.rows):
            own = [row.outcome for row in rows if row.outcome.policy == policy]
            sizes = [(outcome.capacity or 0) / GIB for outcome in own]
            axes.plot(sizes, [100 * outcome.hit_rate for outcome in own], marker="o", label=policy)
        bounds = {(row.outcome.capacity or 0) / GIB: 100 * (row.bound or 0.0) for row in rows}
        axes.plot(
            list(bounds), list(bounds.values()), marker="o", linestyle="--", color="black", label="Belady"
        )
        axes.set_xlabel("capacity in GiB")
        axes.set_ylabel("hit rate in %")
        axes.set_ylim(bottom=0)
        axes.set_title(study.name)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
