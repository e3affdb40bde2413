"""Write the tables of metrics in docs/ from the exporters: ``python tools/metrics_reference.py``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from prometheus_client import Metric, ProcessCollector

from kvtier import Settings, TieredCache
from kvtier.fleet.controller.events import EventLog
from kvtier.fleet.controller.metrics import ControllerMetrics
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.pins import Pins
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.controller.state import FileState
from kvtier.fleet.proxy.metrics import ProxyMetrics
from kvtier.fleet.proxy.proxy import Proxy
from kvtier.fleet.proxy.settings import ProxySettings
from kvtier.observability.metrics import CacheMetrics
from kvtier.plugins import Plugins

DOCS = Path(__file__).parents[1] / "docs"
SUFFIXES = {"counter": "_total", "info": "_info"}


async def pages() -> dict[Path, str]:
    """Return the pages with up-to-date tables. Blocks the event loop for a few milliseconds."""
    metrics, proxy = DOCS / "metrics.md", DOCS / "proxy.md"
    text = _with_table(metrics.read_text(), "Metrics of a cache process", await _cache_metrics())
    return {
        metrics: _with_table(text, "Metrics of the controller", await _controller_metrics()),
        proxy: _with_table(proxy.read_text(), "Metrics", await _proxy_metrics()),
    }


def _with_table(page: str, heading: str, families: Iterable[Metric]) -> str:
    """Replace the table that follows a heading."""
    table = "".join(f"{line}\n" for line in _table(families))
    pattern = rf"(?<=^## {heading}\n\n)(?:\|.*\n)+"
    assert re.search(pattern, page, re.MULTILINE), f"no table follows the heading {heading!r}"
    return re.sub(pattern, lambda _: table, page, flags=re.MULTILINE)


def _table(families: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | type | labels | meaning |"
    yield "|---|---|---|---|"
    for family in families:
        labels = dict.fromkeys(getattr(family, "_labelnames", ()))
        labels |= {label: None for sample in family.samples for label in sample.labels if label != "le"}
        kind = "gauge" if family.type == "info" else family.type
        name = family.name + SUFFIXES.get(family.type, "")
        meaning = family.documentation.rstrip(".")
        yield f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |"


async def _cache_metrics() -> list[Metric]:
    settings = Settings(tiers=[{"name": "ram", "type": "cpu", "capacity": "1MiB"}])
    async with TieredCache.open(settings, plugins=Plugins.load([])) as cache:
        with CacheMetrics.of(cache) as metrics:
            return list(metrics.registry.collect())


async def _controller_metrics() -> list[Metric]:
    with TemporaryDirectory() as folder:
        async with (
            FileState.open(Path(folder) / "state.sqlite") as state,
            Operations.open(Registry(), EventLog(state), Pins(state)) as operations,
        ):
            return list(ControllerMetrics(operations).collect())


async def _proxy_metrics() -> list[Metric]:
    async with Proxy.open(ProxySettings()) as proxy:
        return [
            *ProxyMetrics(proxy.statistics, proxy.admission, proxy.upstreams).collect(),
            *ProcessCollector(registry=None).collect(),
        ]


if __name__ == "__main__":
    for path, page in anyio.run(pages).items():
        path.write_text(page)
