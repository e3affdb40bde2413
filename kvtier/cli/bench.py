"""``kvtier bench``: compare each tier and transport with the limit of its medium."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape

from kvtier.cli.options import (
    JSONFile,
    PlotFile,
    check_outputs,
    epilog,
    parse_chunk_size,
    select,
    write_outputs,
)
from kvtier.cli.terminal import AsJson, ConfigFile, messages, output, print_json, table
from kvtier.concurrency.processes import exit_on_signals
from kvtier.errors import LayoutError
from kvtier.units import format_size, parse_size

if TYPE_CHECKING:
    from kvtier.integrations.vllm.sizes import ModelSizes
    from kvtier.lab.bench.rows import Extent, Row
    from kvtier.lab.bench.turns import Advance
    from kvtier.plugins import Plugins
    from kvtier.settings import Settings, TierSettings

EXAMPLES = epilog(
    "kvtier bench",
    "kvtier bench --config /etc/kvtier.yaml --tier pool --in-flight 16",
    "kvtier bench --size 4MiB --output today.json --plot today.png",
    "kvtier bench --model Qwen/Qwen3-Next-80B-A3B-Instruct",
)
TRANSPORT = "transport"
SPARE_BYTES = 64 << 20
"""Additional memory of the interpreter and client libraries."""

PROMPTS = (1_024, 8_192, 32_768)


class Target(NamedTuple):
    """A tier or transport to measure."""

    name: str
    type: str
    bytes: Callable[[Extent], int]
    """Memory that the measurement takes."""
    measure: Callable[[Extent, Advance], Row]
    mask: Callable[[str], str] = str
    """Takes secrets out of an error message."""


def bench(
    config: ConfigFile = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            "-t",
            metavar="NAME",
            help="Measure only this tier or transport, by name or type. Repeatable.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only print how much this model (a folder or name) stores. Needs vLLM; loads no weights.",
        ),
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a chunk.")] = "32MiB",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks transferred per round.")] = 16,
    in_flight: Annotated[int, typer.Option(min=1, help="Chunks per batch.")] = 4,
    turns: Annotated[
        int, typer.Option(min=1, help="Number of rounds, alternating with the medium's limit.")
    ] = 5,
    as_json: AsJson = False,
    json_file: JSONFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure each configured tier and transport, alternating with the limit of its medium.

    Without settings: memory, a disk in a temporary directory, and tcp on loopback.

    Test chunks have random keys and are deleted afterwards. Other data and running cache processes are not
    affected. Exit status 1 if a measurement fails.
    """
    from kvtier.cli.checks_backend import exit_command
    from kvtier.lab.bench.report import json_of, remarks_of, save_plot, table_of
    from kvtier.lab.bench.rows import Extent

    threads = threading.enumerate()
    extent = Extent(parse_chunk_size(size), chunks, min(in_flight, chunks), turns)
    check_outputs(json_file, plot)
    if model is not None:
        _describe(model, json_file, as_json=as_json)
        return
    with _targets(config, tier or []) as targets:
        rows = _measure_all(targets, extent)
    results = json_of(rows, extent)
    if as_json:
        print_json(results)
    else:
        output().print(table_of(rows, extent))
        for remark in remarks_of(rows):
            output().print(remark)
    write_outputs(results, json_file, plot, partial(save_plot, rows, extent))
    exit_command(threads, failed=any(row.error is not None for row in rows))


@contextmanager
def _targets(config: Path | None, names: list[str]) -> Iterator[list[Target]]:
    """Yield the targets, in the order of the settings. Raises: ``BadParameter``: an unknown name."""
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    settings = load_settings(file=config)
    plugins = Plugins.load(settings.plugins)
    with _tiers(settings, plugins) as tiers:
        targets = [_tier_target(plugins, tier, checksum=settings.checksum) for tier in tiers]
        if settings.peer.used or settings.origin("tiers").kind == "default":
            targets.append(_transport_target(plugins, settings))
        yield select(targets, names, "--tier") if names else targets


@contextmanager
def _tiers(settings: Settings, plugins: Plugins) -> Iterator[list[TierSettings]]:
    """Yield the configured tiers, or by default memory and a temporary disk tier."""
    from tempfile import TemporaryDirectory

    from kvtier.backends.disk.backend import DiskSettings

    tiers = plugins.tier_settings(settings)
    if settings.origin("tiers").kind != "default":
        yield tiers
        return
    with TemporaryDirectory(prefix="kvtier-bench-") as folder:
        capacity = parse_size("1TiB")
        yield [*tiers, DiskSettings(name="disk", type="disk", capacity=capacity, path=Path(folder, "disk"))]


def _tier_target(plugins: Plugins, tier: TierSettings, *, checksum: bool) -> Target:
    from kvtier.cli.checks_backend import isolated_settings, without_secrets
    from kvtier.lab.bench.run import run
    from kvtier.lab.bench.tiers import measure_tier, memory_bytes, tier_bytes

    def measure(extent: Extent, advance: Advance) -> Row:
        backend_type = plugins.backend(tier.type)
        with isolated_settings(backend_type, tier, tier_bytes(extent)) as (settings, _):
            backend = backend_type(settings)
            return run(partial(measure_tier, backend, settings, extent, advance, checksum=checksum))

    return Target(tier.name, tier.type, memory_bytes, measure, lambda text: without_secrets(text, tier))


def _transport_target(plugins: Plugins, settings: Settings) -> Target:
    from kvtier.lab.bench.run import run
    from kvtier.lab.bench.transports import measure_transport, memory_bytes

    transport = plugins.transport_settings(settings)
    kind = plugins.transport(transport.type)
    raw = transport.model_dump(mode="json")

    def measure(extent: Extent, advance: Advance) -> Row:
        return run(partial(measure_transport, kind, raw, extent, advance))

    return Target(transport.type, TRANSPORT, memory_bytes, measure)


def _measure_all(targets: list[Target], extent: Extent) -> list[Row]:
    """Measure the targets one after the other. The progress bar is redrawn only between timed sections."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from kvtier.lab.bench.rows import Row
    from kvtier.lab.bench.run import describe_error
    from kvtier.lab.bench.tiers import steps_of

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    rows = []
    with exit_on_signals(), Progress(*columns, console=messages(), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(targets) * steps_of(extent))

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        for index, target in enumerate(targets):
            bar.update(task, description=f"{escape(target.name)} ({escape(target.type)})", refresh=True)
            try:
                _expect_memory(target.bytes(extent) + SPARE_BYTES)
                rows.append(target.measure(extent, advance))
            except Exception as error:  # A backend can raise any; the others are measured all the same.
                reason = target.mask(describe_error(error))
                rows.append(Row(target.name, target.type, error=reason))
            bar.update(task, completed=(index + 1) * steps_of(extent), refresh=True)
    return rows


def _expect_memory(needed: int) -> None:
    from kvtier.lab.bench.sides import BenchFailed
    from kvtier.memory.host import available_bytes

    free = available_bytes()
    if needed > free:
        reason = f"it needs {format_size(needed)} of memory, and {format_size(free)} are free"
        raise BenchFailed(f"{reason}: use a smaller --size or --chunks")


def _describe(model: str, json_file: Path | None, *, as_json: bool) -> None:
    """Print what a model stores. Raises :class:`LayoutError`."""
    from kvtier.memory.layout import CHUNK_TOKENS

    sizes = _sizes(model)
    prompts = {
        tokens: {"stored": sizes.stored(tokens), "per_token": sizes.per_token(tokens)} for tokens in PROMPTS
    }
    results = {"model": model, **sizes._asdict(), "prompts": prompts}
    write_outputs(results, json_file)
    if as_json:
        print_json(results)
        return
    layers = ", ".join(f"{count} {kind}" for kind, count in sizes.layers.items())
    output().print(f"{model}: {layers}", soft_wrap=True)
    output().print(f"a chunk of {CHUNK_TOKENS} tokens takes {format_size(sizes.chunk)}")
    if sizes.state:
        output().print(f"a state takes {format_size(sizes.state)}; a prompt stores two")
    rows = table("prompt", "stored", "per reusable token")
    for tokens in PROMPTS:
        stored, each = format_size(sizes.stored(tokens)), format_size(round(sizes.per_token(tokens)))
        rows.add_row(f"{tokens:,}", stored, each)
    output().print(rows)


def _sizes(model: str) -> ModelSizes:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from kvtier.integrations.vllm.sizes import model_sizes
    except ImportError as error:
        raise typer.BadParameter(f"--model needs vLLM, which cannot be imported: {error}") from error
    try:
        return model_sizes(model)
    except LayoutError:
        raise
    except Exception as error:  # Whatever vLLM raises for a model that it cannot describe.
        raise LayoutError(f"vLLM cannot describe {model}: {error}") from error
