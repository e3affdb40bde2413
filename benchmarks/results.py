"""Results of benchmarks as JSON: their tables, with date, machine and load.

There is a file for each make of processor, with one entry for each command, such as ``disk`` or
``look_up --busy``. A new result replaces that of the same command only, so that each names its own date and
machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "results"
TABLES = "BENCHMARK_TABLES"
"""Variable that names the file to which a benchmark appends its tables, one JSON value a line."""
PACKAGES = ("torch", "vllm", "lmcache", "redis")

Result = dict[str, Any]
"""``date``, ``commit``, ``machine``, ``load`` (averages before and after), ``seconds``, ``tables``; perhaps a
``note``."""


class Table(NamedTuple):
    """What a benchmark has printed."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def record(table: Table) -> None:
    """Append a table to the file of :data:`TABLES`, if that is set, with floats of four digits."""
    if path := os.environ.get(TABLES):
        rows = [[_short(cell) for cell in row] for row in table.rows]
        with Path(path).open("a") as file:
            file.write(json.dumps([table.title, list(table.columns), rows]) + "\n")


def recorded(path: Path) -> list[Table]:
    """Return the tables that were appended to a file."""
    return [Table(*json.loads(line)) for line in path.read_text().splitlines()]


def load(path: Path) -> dict[str, Result]:
    """Return the results of a file by command; none if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else {}


def load_all(folder: Path = FOLDER) -> dict[str, dict[str, Result]]:
    """Return the results of all files of a folder, by the name of the file and the command."""
    return {path.stem: load(path) for path in sorted(folder.glob("*.json"))}


def newest(measured: dict[str, dict[str, Result]]) -> dict[str, Result]:
    """Return the newest result of each command."""
    found: dict[str, Result] = {}
    for results in measured.values():
        for command, result in results.items():
            if command not in found or result["date"] >= found[command]["date"]:
                found[command] = result
    return found


def default_file() -> Path:
    """Return the file for results of this machine, such as ``intel.json``."""
    return FOLDER / f"{re.sub('[^a-z].*', '', describe_machine()['processor'].lower())}.json"


def figure(results: dict[str, Result], command: str, title: str, row: str, column: str) -> float | None:
    """Return a cell of the first table whose title contains ``title``; ``None`` if it was not measured.

    ``row``: the first cell, or the first two with a comma between them. Of a text, it is the first number.
    """
    for found, columns, rows in results.get(command, {}).get("tables", ()):
        if title not in found or column not in columns:
            continue
        at = columns.index(column)
        for cells in rows:
            names = [str(cell).strip() for cell in cells]
            if row in (names[0], ", ".join(names[:2])):
                return _number(cells[at])
    return None


def save(path: Path, results: dict[str, Result]) -> None:
    """Write the results with one row of a table on each line, so that a difference can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_lines(results)))


def _lines(results: dict[str, Result]) -> Iterator[str]:
    for at, command in enumerate(sorted(results)):
        result = {name: value for name, value in results[command].items() if name != "tables"}
        yield f"{',' if at else '{'}\n{json.dumps(command)}: {json.dumps(result, ensure_ascii=False)[:-1]}, "
        yield '"tables": ['
        for number, (title, columns, rows) in enumerate(results[command]["tables"]):
            lines = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in rows)
            head = json.dumps([title, columns], ensure_ascii=False)[:-1]
            yield f"{',' if number else ''}\n  {head}, [\n    {lines}\n  ]]"
        yield "\n]}"
    yield "\n}\n" if results else "{}\n"


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, kernel and versions, without any name of the host."""
    gpus = Path("/proc/driver/nvidia/gpus").glob("*/information")
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20)),
        "gpus": [_field(str(path), "Model") for path in gpus],
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        **versions,
    }


def commit() -> str:
    """Return the commit that is checked out, with ``+`` if files differ from it; empty without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except FileNotFoundError:
        return ""


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def load_average() -> float:
    return round(os.getloadavg()[0], 1)


def _field(path: str, name: str) -> str:
    """Return the value of the first ``name: value`` of a file."""
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _number(cell: object) -> float | None:
    if isinstance(cell, str):
        number = re.search(r"-?[\d,]*\.?\d+", cell)
        return float(number[0].replace(",", "")) if number else None
    return float(cell) if isinstance(cell, (int, float)) else None


def _short(cell: object) -> object:
    return float(f"{cell:.4g}") if isinstance(cell, float) else cell
