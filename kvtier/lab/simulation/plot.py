"""Plot the results. matplotlib is optional: the caller checks that it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvtier.lab.simulation.study import Study
from kvtier.units import GIB


def save_plot(studies: Sequence[Study], path: Path) -> None:
    """Save a PNG with the hit rate of each policy over the capacity, one chart for each trace. Blocks.

    Omits caches with a shared pool, which have no capacity. Raises ``OSError``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 + 4 * len(studies)), layout="constrained")
    FigureCanvasAgg(figure)
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
