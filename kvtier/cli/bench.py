"""``kvtier bench``: each tier and transport beside the limit of its medium, in one run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape

from kvtier.cli.terminal import ConfigFile, ends_on_signals, messages, output

if TYPE_CHECKING:
    from kvtier.bench.rows import Extent, Row
    from kvtier.bench.tiers import Advance
    from kvtier.plugins import Plugins
    from kvtier.settings import Settings, TierSettings

EXAMPLES = """
Examples:

  kvtier bench

  kvtier bench --config /etc/kvtier.yaml --tier pool --in-flight 16

  kvtier bench --size 4MiB --json today.json --plot today.png
"""

LARGEST_SIZE = "1GiB"
TRANSPORT = "transport"
SPARE_BYTES = 64 << 20
"""What the interpreter and client libraries take besides."""


class Target(NamedTuple):
    """A tier or transport that is to be measured."""

    name: str
    type: str
    bytes: Callable[[Extent], int]
    """How much memory that takes."""
    measure: Callable[[Extent, Advance], Row]


def bench(
    config: ConfigFile = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier", "-t", metavar="NAME", help="Only this tier or transport, by name or type; repeatable."
        ),
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="How large a chunk is.")] = "32MiB",
    chunks: Annotated[int, typer.Option(min=1, help="How many chunks a turn moves.")] = 16,
    in_flight: Annotated[int, typer.Option(min=1, help="How many of them in one batch.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="How often each side has its turn.")] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there, for programs.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw them. Needs `pip install 'kvtier\\[bench]'`."),
    ] = None,
) -> None:
    """Measure each tier and transport of the settings, in turns with the limit of its medium.

    Without any settings: memory, a disk in a temporary folder, and tcp on loopback.

    Chunks have keys of their own and are deleted afterwards; what others have stored is not touched, nor is a
    running cache process. Exit status 1 where one of them fails.
    """
    from kvtier.bench.plot import expect_matplotlib, save_plot
    from kvtier.bench.report import json_of, remarks_of, table_of
    from kvtier.cli.checks_backend import end_threads
    from kvtier.cli.doctor import leave

    threads = threading.enumerate()
    extent = _extent(size, chunks, in_flight, turns)
    for path in (json_file, plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}: make it, or write another")
    if plot is not None:
        expect_matplotlib()
    with _targets(config, tier or []) as targets:
        rows = _measured(targets, extent)
    output().print(table_of(rows, extent))
    for remark in remarks_of(rows):
        output().print(remark)
    if json_file is not None:
        json_file.write_text(json.dumps(json_of(rows, extent), indent=2) + "\n")
    if plot is not None:
        save_plot(rows, extent, plot)
    failed = any(row.error is not None for row in rows)
    if not end_threads(threads):
        leave(1 if failed else 0)
    if failed:
        raise typer.Exit(1)


def _extent(size: str, chunks: int, in_flight: int, turns: int) -> Extent:
    from kvtier.bench.rows import Extent
    from kvtier.header import OBJECT_ALIGNMENT
    from kvtier.units import parse_size

    try:
        length = parse_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--size") from error
    if not 0 < length <= parse_size(LARGEST_SIZE):
        raise typer.BadParameter(f"write a size from 1 to {LARGEST_SIZE}", param_hint="--size")
    pages = -(-length // OBJECT_ALIGNMENT)
    return Extent(pages * OBJECT_ALIGNMENT, chunks, min(in_flight, chunks), turns)


@contextmanager
def _targets(config: Path | None, names: list[str]) -> Iterator[list[Target]]:
    """What is to be measured, in the order of the settings. Raises ``BadParameter`` for a name of nothing."""
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    settings = load_settings(file=config)
    plugins = Plugins.load(settings.plugins)
    with _tiers(settings, plugins) as tiers:
        targets = [_tier_target(plugins, one, checksum=settings.checksum) for one in tiers]
        if settings.peer.used or settings.origin("tiers").kind == "default":
            targets.append(_transport_target(plugins, settings))
        yield _chosen(targets, names)


@contextmanager
def _tiers(settings: Settings, plugins: Plugins) -> Iterator[list[TierSettings]]:
    """The tiers of the settings; where they name none, memory, and a disk that is there meanwhile."""
    from tempfile import TemporaryDirectory

    from kvtier.backends.disk import DiskSettings
    from kvtier.units import parse_size

    tiers = plugins.tier_settings(settings)
    if settings.origin("tiers").kind != "default":
        yield tiers
        return
    with TemporaryDirectory(prefix="kvtier-bench-") as folder:
        most = parse_size("1TiB")
        yield [*tiers, DiskSettings(name="disk", type="disk", capacity=most, path=Path(folder, "disk"))]


def _chosen(targets: list[Target], names: list[str]) -> list[Target]:
    found: list[Target] = []
    for name in names:
        matching = [target for target in targets if target.name == name] or [
            target for target in targets if target.type == name
        ]
        if not matching:
            there = ", ".join(f"{target.name} ({target.type})" for target in targets)
            raise typer.BadParameter(
                f"nothing here is called {name!r}: write one of {there}", param_hint="--tier"
            )
        found += matching
    return [target for target in targets if target in found] if names else targets


def _tier_target(plugins: Plugins, tier: TierSettings, *, checksum: bool) -> Target:
    from kvtier.bench.run import in_words, run
    from kvtier.bench.tiers import measure_tier, memory_bytes, tier_bytes
    from kvtier.cli.checks_backend import harmless, without_secrets

    def measure(extent: Extent, advance: Advance) -> Row:
        backend_type = plugins.backend(tier.type)
        try:
            with harmless(backend_type, tier, tier_bytes(extent)) as (settings, _):
                backend = backend_type(settings)
                return run(partial(measure_tier, backend, settings, extent, advance, checksum=checksum))
        except Exception as error:
            return _failed(tier.name, tier.type, without_secrets(in_words(error), tier))

    return Target(tier.name, tier.type, memory_bytes, measure)


def _transport_target(plugins: Plugins, settings: Settings) -> Target:
    from kvtier.bench.links import measure_transport, memory_bytes
    from kvtier.bench.run import in_words, run

    transport = plugins.transport_settings(settings)
    kind = plugins.transport(transport.type)
    raw = transport.model_dump(mode="json")

    def measure(extent: Extent, advance: Advance) -> Row:
        try:
            return run(partial(measure_transport, kind, transport, raw, extent, advance, settings.plugins))
        except Exception as error:
            return _failed(transport.type, TRANSPORT, in_words(error))

    return Target(transport.type, TRANSPORT, memory_bytes, measure)


def _failed(name: str, kind: str, why: str) -> Row:
    from kvtier.bench.rows import Row

    return Row(name, kind, error=why)


def _measured(targets: list[Target], extent: Extent) -> list[Row]:
    """One after the other, with a bar that moves while nothing is timed."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvtier.bench.tiers import steps_of
    from kvtier.units import format_size

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows = []
    with ends_on_signals(), Progress(*columns, console=messages(), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(targets) * steps_of(extent))

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        for index, target in enumerate(targets):
            bar.update(task, description=f"{escape(target.name)} ({escape(target.type)})", refresh=True)
            needed, free = target.bytes(extent) + SPARE_BYTES, available_bytes()
            if needed > free:
                why = f"it takes {format_size(needed)} of memory and {format_size(free)} are free"
                rows.append(_failed(target.name, target.type, f"{why}: choose a smaller --size or --chunks"))
            else:
                rows.append(target.measure(extent, advance))
            bar.update(task, completed=(index + 1) * steps_of(extent), refresh=True)
    return rows


def available_bytes() -> int:
    """How much memory the system can give without swapping (proc(5), MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return sys.maxsize
