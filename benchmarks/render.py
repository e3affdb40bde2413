"""Write the tables and plots of results into the pages that show them.

::

    python -m benchmarks.render            # after python -m benchmarks
    python -m benchmarks.render --check    # is every page what this would write?

A result that was measured with several makes of CPU has a column for each of them.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
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
Measured = dict[str, Results]
"""The results by the make of the CPU."""


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


def rendered(measured: Measured) -> Iterator[tuple[Path, str]]:
    """Yield all pages and plots with their text."""
    for page in PAGES:
        yield page, BLOCK.sub(partial(block, measured, page), page.read_text())
    for name in SPEC["plots"]:
        if (svg := plot(results.newest(measured), name)) is not None:
            yield ASSETS / f"{name}.svg", svg


def block(measured: Measured, page: Path, found: re.Match[str]) -> str:
    kind, options = found[2], [option.strip() for option in found[3].split("|")]
    makers: dict[str, Callable[[], str]] = {
        "table": lambda: tables(measured, options),
        "runs": lambda: runs(measured),
        "aims": lambda: aims(measured),
        "plot": lambda: plot_link(results.newest(measured), options, page),
    }
    return f"{found[1]}{makers[kind]()}\n{found[5]}"


def tables(measured: Measured, options: Sequence[str]) -> str:
    """Return the tables of a command that the options choose, in Markdown."""
    command, *more = options
    chosen: dict[str, list[str]] = {name: [] for name in ("columns", "rows", "")}
    for option in more:
        name, colon, value = option.partition(": ")
        known = bool(colon) and name in chosen
        chosen[name if known else ""] += [part.strip() for part in value.split(";")] if known else [option]
    shown: dict[str, dict[str, Table]] = {}
    for make, found in measured.items():
        for table in (Table(*table) for table in found.get(command, {}).get("tables", ())):
            if all(part in table.title for part in chosen[""]):
                kept = narrowed(table, chosen["columns"], chosen["rows"])
                shown.setdefault(table.title, {})[f"{make_text(make)} {found[command]['date']}"] = kept
    return "\n\n".join(map(markdown, shown.values())) or NOT_MEASURED


def narrowed(table: Table, columns: Sequence[str], rows: Sequence[str]) -> Table:
    """Return a table with the columns and rows named, or all. Its first column is always kept."""
    kept = [at for at, name in enumerate(table.columns) if at == 0 or not columns or name in columns]
    cells = [
        [row[at] for at in kept]
        for row in table.rows
        if not rows or any(part in str(row[0]) for part in rows)
    ]
    return Table(table.title, [table.columns[at] for at in kept], cells)


def markdown(found: dict[str, Table]) -> str:
    """Return a table, its title in the first heading, with the columns of each machine side by side.

    ``found``: the table by make and date. Rows of the same name, in one or more cells, are one row.
    """
    first = next(iter(found.values()))
    names = len(found) > 1 and next(n for n in range(1, len(first.columns)) if unique(found.values(), n))
    head = " ".join((first.title, f"({first.columns[0]})" if first.columns[0] else "")).strip()
    if not names:
        [when] = found
        columns, rows = [f"{head}, {when}", *first.columns[1:]], list(first.rows)
    else:
        named = [{tuple(row[:names]): row for row in table.rows} for table in found.values()]
        keys = dict.fromkeys(key for rows in named for key in rows)
        columns = [head, *first.columns[1:names]]
        columns += [f"{name}, {when}" for name in first.columns[names:] for when in found]
        places = [(at, rows) for at in range(names, len(first.columns)) for rows in named]
        rows = [[*key, *(known[key][at] if key in known else "" for at, known in places)] for key in keys]
    numeric = [any(not isinstance(row[at], str) for row in rows) for at in range(len(columns))]
    rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
    return "\n".join([row_of(columns), rule, *(row_of(list(map(cell_text, row))) for row in rows)])


def unique(tables: Iterable[Table], cells: int) -> bool:
    """Whether no two rows of a table have the same first cells."""
    return all(len({tuple(row[:cells]) for row in table.rows}) == len(table.rows) for table in tables)


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def cell_text(cell: object) -> str:
    """Return a cell with three digits."""
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell).strip()
    size = abs(cell)
    return f"{cell:,.0f}" if size >= 100 else f"{cell:.1f}" if size >= 10 else f"{cell:.2f}"


def runs(measured: Measured) -> str:
    """Return a line for each machine and date."""
    lines: dict[tuple[str, str], list[str]] = {}
    loads: dict[tuple[str, str], list[float]] = {}
    entries = sorted((item for found in measured.values() for item in found.items()), key=itemgetter(0))
    for command, result in entries:
        key = result["date"], machine_text(result["machine"])
        lines.setdefault(key, []).append(f"`{command}`" + "\\*" * ("note" in result))
        loads.setdefault(key, []).extend(result["load"])
    rows = [["date", "machine", "load average", "commands"], ["---"] * 4]
    for key in sorted(lines, reverse=True):
        load = f"{min(loads[key]):g} to {max(loads[key]):g}" if loads[key] else "not noted"
        rows.append([*key, load, ", ".join(lines[key])])
    notes = {result["note"] for _, result in entries if "note" in result}
    return "\n".join([*map(row_of, rows), *(f"\n\\* {note[0].upper()}{note[1:]}." for note in sorted(notes))])


def make_text(make: str) -> str:
    """Return the name of a file of results as that of a make: ``AMD``, ``Intel``, ``GPU``."""
    return make.title() if make == "intel" else make.upper()


def machine_text(machine: dict[str, Any]) -> str:
    names = [name for name in ("kernel", "python", *results.PACKAGES) if machine.get(name)]
    host = [f"{machine['cores']} cores of {machine['processor']}", *machine["gpus"]]
    if "memory_gib" in machine:
        host.append(f"{machine['memory_gib']} GiB")
    return ", ".join(host + [f"{name} {machine[name]}" for name in names])


def aims(measured: Measured) -> str:
    """Return the aims that are missed, each with its reason, and those that are met or not measured."""
    rows, met, unknown = [["below its aim", "aim", "measured", "why"], ["---"] * 4], [], []
    for aim in SPEC["aims"]:
        values = {
            make_text(make): float(f"{value:.4g}")
            for make, found in measured.items()
            if (value := figure(found, *aim["cell"])) is not None
        }
        if not values:
            unknown.append(aim["what"])
            continue
        bound = f"at least {aim['at_least']:g}" if "at_least" in aim else f"at most {aim['at_most']:g}"
        bound += f" {aim['unit']}" if "unit" in aim else ""
        shown = ", ".join(f"{value:g} ({make})" for make, value in values.items())
        if all(aim.get("at_least", value) <= value <= aim.get("at_most", value) for value in values.values()):
            met.append(f"{aim['what']}, {bound}: {shown}")
        else:
            rows.append([aim["what"], bound, shown, aim.get("why", "not known")])
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
