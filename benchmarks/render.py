"""Write the tables and plots of results into the pages that show them.

::

    python -m benchmarks.render            # after python -m benchmarks
    python -m benchmarks.render --check    # is every page what this would write?

A page of the documentation may have blocks, whose content is replaced::

    <!-- table COMMAND | part of the title | columns: NAME; NAME | rows: PART; PART -->
    <!-- end -->

All but the command may be left out. ``rows`` are parts of the first cell. The first heading ends with
the date. The other blocks are ``runs`` (dates, machines and loads of all commands), ``plot NAME | text`` and
``aims``, which ``pages.toml`` defines.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import plots, results
from benchmarks.results import Result, Table, figure

ROOT = Path(__file__).parents[1]
PAGES = (*ROOT.glob("docs/**/*.md"), ROOT / "benchmarks" / "README.md", ROOT / "README.md")
ASSETS = ROOT / "docs" / "assets"
BLOCK = re.compile(r"(<!-- (table|runs|aims|plot)(.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SPEC = tomllib.loads((ROOT / "benchmarks" / "pages.toml").read_text())
NOT_MEASURED = "*Not measured.*"

Results = dict[str, Result]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write results into the pages that show them.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page differs")
    check, measured = parser.parse_args().check, results.load_all()
    stale = []
    for path, text in rendered(measured):
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not check:
                path.write_text(text)
    for path in stale:
        print(f"{'not as rendered' if check else 'written'}: {path.relative_to(ROOT)}")
    return bool(check and stale)


def rendered(measured: Results) -> Iterator[tuple[Path, str]]:
    """Yield all pages and plots with their text."""
    for page in PAGES:
        yield page, BLOCK.sub(partial(block, measured, page), page.read_text())
    for name in SPEC["plots"]:
        if (svg := plot(measured, name)) is not None:
            yield ASSETS / f"{name}.svg", svg


def block(measured: Results, page: Path, found: re.Match[str]) -> str:
    kind, options = found[2], [option.strip() for option in found[3].split("|")]
    makers: dict[str, Callable[[], str]] = {
        "table": lambda: tables(measured, options),
        "runs": lambda: runs(measured),
        "aims": lambda: aims(measured),
        "plot": lambda: plot_link(measured, options, page),
    }
    return f"{found[1]}{makers[kind]()}\n{found[5]}"


def tables(measured: Results, options: Sequence[str]) -> str:
    """Return the tables of a command that the options choose, in Markdown."""
    command, *more = options
    chosen: dict[str, list[str]] = {name: [] for name in ("columns", "rows", "")}
    for option in more:
        name, colon, value = option.partition(": ")
        known = bool(colon) and name in chosen
        chosen[name if known else ""] += [part.strip() for part in value.split(";")] if known else [option]
    if command not in measured:
        return NOT_MEASURED
    found = [Table(*table) for table in measured[command]["tables"]]
    shown = [table for table in found if all(part in table.title for part in chosen[""])]
    date = measured[command]["date"]
    return (
        "\n\n".join(markdown(table, date, chosen["columns"], chosen["rows"]) for table in shown)
        or NOT_MEASURED
    )


def markdown(table: Table, date: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table, its title and date in the first heading, with the columns and rows named, or all."""
    kept = [at for at, name in enumerate(table.columns) if at == 0 or not columns or name in columns]
    lines = [
        [cell_text(row[at]) for at in kept]
        for row in table.rows
        if not rows or any(part in str(row[0]) for part in rows)
    ]
    numeric = [not isinstance(table.rows[0][at], str) for at in kept]
    heads = [
        " ".join((table.title, f"({table.columns[0]})" if table.columns[0] else "")).strip() + f", {date}"
    ]
    heads += [table.columns[at] for at in kept[1:]]
    rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
    return "\n".join([row_of(heads), rule, *map(row_of, lines)])


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def cell_text(cell: object) -> str:
    """Return a cell with three digits."""
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell).strip()
    size = abs(cell)
    return f"{cell:,.0f}" if size >= 100 else f"{cell:.1f}" if size >= 10 else f"{cell:.2f}"


def runs(measured: Results) -> str:
    """Return a line for each machine and date."""
    lines: dict[tuple[str, str], list[str]] = {}
    loads: dict[tuple[str, str], list[float]] = {}
    for command, result in sorted(measured.items()):
        key = result["date"], machine_text(result["machine"])
        lines.setdefault(key, []).append(f"`{command}`" + "\\*" * ("note" in result))
        loads.setdefault(key, []).extend(result["load"])
    rows = [["date", "machine", "load average", "commands"], ["---"] * 4]
    for key in sorted(lines, reverse=True):
        load = f"{min(loads[key]):g} to {max(loads[key]):g}" if loads[key] else "not noted"
        rows.append([*key, load, ", ".join(lines[key])])
    notes = {result["note"] for result in measured.values() if "note" in result}
    return "\n".join([*map(row_of, rows), *(f"\n\\* {note[0].upper()}{note[1:]}." for note in sorted(notes))])


def machine_text(machine: dict[str, Any]) -> str:
    names = [name for name in ("kernel", "python", *results.PACKAGES) if machine.get(name)]
    host = [f"{machine['cores']} cores of {machine['processor']}", *machine["gpus"]]
    if "memory_gib" in machine:
        host.append(f"{machine['memory_gib']} GiB")
    return ", ".join(host + [f"{name} {machine[name]}" for name in names])


def aims(measured: Results) -> str:
    """Return the aims that are missed, each with its reason, and those that are met or not measured."""
    rows, met, unknown = [["below its aim", "aim", "measured", "why"], ["---"] * 4], [], []
    for aim in SPEC["aims"]:
        value = figure(measured, *aim["cell"])
        if value is None:
            unknown.append(aim["what"])
            continue
        least, most = aim.get("at_least", value), aim.get("at_most", value)
        bound = f"at least {least:g}" if "at_least" in aim else f"at most {most:g}"
        bound += f" {aim['unit']}" if "unit" in aim else ""
        shown = float(f"{value:.4g}")
        if least <= shown <= most:
            met.append(f"{aim['what']}, {bound}: {shown:g}")
        else:
            rows.append([aim["what"], bound, f"{shown:g}", aim.get("why", "not known")])
    parts = ["\n".join(map(row_of, rows))]
    parts += [f"Met: {'; '.join(met)}."] * bool(met)
    parts += [f"Not measured: {'; '.join(unknown)}."] * bool(unknown)
    return "\n\n".join(parts)


def plot(measured: Results, name: str) -> str | None:
    """Return a plot as SVG; ``None`` if nothing of it was measured."""
    spec = SPEC["plots"][name]
    if "cells" in spec:
        found = {label: figure(measured, *cell) for label, *cell in spec["cells"]}
        bars = {label: value for label, value in found.items() if value is not None}
        return plots.bars(spec["title"], bars, spec.get("mark")) if bars else None
    series = {
        row: [
            figure(measured, spec["command"], spec["table"], *cell) or 0.0
            for column in spec["columns"]
            for cell in [(f"{row}, {column}", spec["column"]) if "column" in spec else (row, column)]
        ]
        for row in spec["rows"]
    }
    measured_rows = {row: values for row, values in series.items() if any(values)}
    if not measured_rows:
        return None
    return plots.lines(spec["title"], spec["columns"], measured_rows, log=spec.get("log", False))


def plot_link(measured: Results, options: Sequence[str], page: Path) -> str:
    name, text = options
    if plot(measured, name) is None:
        return NOT_MEASURED
    return f"![{text}]({os.path.relpath(ASSETS / f'{name}.svg', page.parent)})"


if __name__ == "__main__":
    sys.exit(main())
