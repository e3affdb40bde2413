"""``kvtier simulate``: replay traces of requests on caches of other sizes and policies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvtier.cli.options import (
    ALL,
    JSONFile,
    PlotFile,
    check_outputs,
    epilog,
    parse_bytes,
    parsed,
    write_outputs,
)
from kvtier.cli.terminal import AsJson, messages, output, print_json

if TYPE_CHECKING:
    from kvtier.lab.simulation.replay import Model
    from kvtier.lab.simulation.study import Study
    from kvtier.lab.simulation.trace import Trace
    from kvtier.observability.whatif.simulated_cache import SimulatedTiers
    from kvtier.plugins import Plugins

EXAMPLES = epilog(
    "kvtier simulate mooncake.jsonl.xz",
    "kvtier simulate --policy all --capacity 1%,5%,20GiB --plot rates.png mooncake.jsonl recording.kvtier",
    "kvtier simulate --config /etc/kvtier.yaml --speed disk=5.5 recording.kvtier",
)

DEFAULT_CAPACITIES = "1%,5%,10%"


def simulate(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Recordings of kvtier, or traces of Mooncake or Bailian; also .gz or .xz. Each is reported "
            "separately.",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "--tiers", "-c", metavar="FILE", help="Simulate the tiers of this settings file."
        ),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Without --config: capacities of a memory tier, as a percentage of the trace's distinct "
            f"bytes, or as a size. Default: {DEFAULT_CAPACITIES}.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME,...",
            help="Eviction policies to compare, or `all`. Default: those of --config, or adaptive. "
            "Repeatable.",
        ),
    ] = None,
    kv_size: Annotated[
        str,
        typer.Option(
            "--token-bytes", metavar="SIZE", help="KV bytes of a token. The default is that of Llama 3.1 8B."
        ),
    ] = "128KiB",
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a chunk. A recording has its own.")
    ] = 512,
    prefill: Annotated[
        float,
        typer.Option("--prefill-tokens-per-second", min=1e-3, help="How fast the engine computes a prompt."),
    ] = 10_000,
    attention: Annotated[
        float | None,
        typer.Option(
            "--attention-tokens",
            min=1,
            help="Behind how many tokens the next one takes twice as long: about 32,768 for a dense model of "
            "8 billion parameters. By default, all take the same time.",
        ),
    ] = None,
    speed: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=GB/S", help="How fast a tier is read. Repeatable."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take speeds of tiers from a file of `kvtier bench --output`."),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="How many times its capacity a tier with a codec holds, as `kvtier status` shows. Default: "
            "1.4 with `lossless`. Repeatable.",
        ),
    ] = None,
    windows: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=1000, help="Also show the hit rate in N equal parts of the time."
        ),
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Read only the first N requests of each trace.")
    ] = None,
    seconds_per_token: Annotated[
        float,
        typer.Option(min=0, help="How long answers take a token, where a trace has only their length."),
    ] = 0.02,
    no_ends: Annotated[
        bool, typer.Option("--no-ends", help="Do not report the ends of answers to the policies.")
    ] = False,
    as_json: AsJson = False,
    json_file: JSONFile = None,
    plot: PlotFile = None,
) -> None:
    """Replay traces of requests, and show what caches of other sizes and policies make of them.

    Each request is looked up and stored by the same catalog, policies and plans that serve, without bytes
    and without waiting. Belady's optimum is the highest hit rate that any policy can have.
    """
    from kvtier.lab.simulation.replay import Model
    from kvtier.lab.simulation.report import json_of, save_plot
    from kvtier.lab.simulation.trace import Trace
    from kvtier.observability.whatif.simulated_cache import configured
    from kvtier.plugins import IDENTITY, Plugins
    from kvtier.settings import load_settings

    check_outputs(json_file, plot)
    if config is not None and capacity is not None:
        raise typer.BadParameter("--capacity is for a simulation without --config, which has capacities")
    settings = load_settings(file=config)
    plugins = Plugins.load(settings.plugins)
    model = Model(parse_bytes(kv_size, "--token-bytes"), prefill, attention)
    given = _numbers(speed or [], "--speed", "NAME=GB/s: for example disk=5.5")
    ratios = _numbers(ratio or [], "--ratio", "NAME=N: for example disk=1.4")
    speeds = (_measured(bench) if bench is not None else {}) | given
    policies = _policies(plugins, policy or [])
    studies = []
    for path in traces:
        with messages().status(f"reading {escape(str(path))}"):
            trace = Trace.read(path, chunk_tokens, limit, seconds_per_token)
        if no_ends:
            trace = trace.without_ends()
        if config is None:
            caches = _sized(plugins, trace, model, capacity or DEFAULT_CAPACITIES, policies, speeds)
        else:
            caches = [configured(plugins, settings, name, speeds, ratios) for name in policies or (None,)]
        names = caches[0].names
        for option, numbers in (("--speed", given), ("--ratio", ratios)):
            if unknown := sorted(numbers.keys() - set(names)):
                reason = f"there is no tier {unknown[0]!r}: use one of {', '.join(names)}"
                raise typer.BadParameter(reason, param_hint=option)
        for tier in caches[0].settings:
            if tier.name in ratios and tier.codec["type"] == IDENTITY:
                reason = f"tier {tier.name} has no codec: set one in {config or 'a file for --config'}"
                raise typer.BadParameter(reason, param_hint="--ratio")
        if bench is not None and not speeds.keys() & set(names):
            reason = f"{bench} has no results of a tier {', '.join(names)}"
            raise typer.BadParameter(reason, param_hint="--bench")
        studies.append(_study(trace, plugins, caches, model, windows))
        if not as_json:
            _print(studies[-1], windows=windows > 0)
    results = json_of(studies, model)
    if as_json:
        print_json(results)
    write_outputs(results, json_file, plot, partial(save_plot, studies))


def _sized(
    plugins: Plugins,
    trace: Trace,
    model: Model,
    capacity: str,
    policies: Sequence[str],
    speeds: dict[str, float],
) -> list[SimulatedTiers]:
    from kvtier.lab.simulation.replay import capacity_of
    from kvtier.observability.whatif.simulated_cache import one_tier
    from kvtier.settings import DEFAULT_EVICTION

    parse = partial(capacity_of, trace=trace, model=model)
    return [
        one_tier(plugins, policy, parsed(parse, text, "--capacity"), speeds)
        for text in capacity.split(",")
        for policy in policies or [DEFAULT_EVICTION]
    ]


def _policies(plugins: Plugins, given: Sequence[str]) -> list[str]:
    """Return the names of policies. Raises :class:`SettingsError`, which lists the known ones."""
    names = [name.strip() for text in given for name in text.split(",")]
    known = plugins.names("kvtier_eviction_policies")
    names = [each for name in names for each in (known if name == ALL else [name])]
    for name in names:
        plugins.eviction(name)
    return list(dict.fromkeys(names))


def _numbers(given: Sequence[str], option: str, form: str) -> dict[str, float]:
    """Return numbers by tier, such as GB/s. Raises ``BadParameter``, which names the form."""
    numbers = {}
    for text in given:
        name, _, number = text.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            numbers[name] = math.nan
        if not name or not 0 < numbers[name] < math.inf:
            raise typer.BadParameter(f"{text!r} is not {form}, above 0", param_hint=option)
    return numbers


def _measured(path: Path) -> dict[str, float]:
    """Return GB/s by tier, as `kvtier bench --output` has written them. Raises ``BadParameter``."""
    try:
        rows = json.loads(path.read_text())["rows"]
        return {row["name"]: float(row["get"]["gb_s"]) for row in rows if row["get"] is not None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise typer.BadParameter(
            f"{path}: does not have the results of `kvtier bench --output` ({reason})", param_hint="--bench"
        ) from error


def _study(
    trace: Trace, plugins: Plugins, caches: Sequence[SimulatedTiers], model: Model, windows: int
) -> Study:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from kvtier.lab.simulation.study import steps_of, study

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages(), transient=True) as bar:
        task = bar.add_task(escape(trace.name), total=steps_of(trace, caches))
        return study(trace, plugins, caches, model, windows=windows, advance=partial(bar.advance, task))


def _print(study: Study, *, windows: bool) -> None:
    from kvtier.lab.simulation.report import headline_of, remarks_of, table_of, windows_table

    output().print(escape(headline_of(study)))
    output().print(table_of(study))
    if windows:
        output().print()
        output().print(windows_table(study))
    for remark in remarks_of(study):
        output().print(f"[dim]{escape(remark)}[/dim]")
    output().print()
