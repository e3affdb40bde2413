"""The metrics page and the dashboard match the exported metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.observability.metrics.scraping import ScrapedCache
from tests.rigs.running_controller import running_controller
from tools.metrics_reference import pages

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
VLLM = (DOCS / "vllm.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "kvtier.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((DOCS / "grafana" / "alerts.yml").read_text())


class Row(NamedTuple):
    """A row of a table on the page."""

    kind: str
    labels: frozenset[str]
    meaning: str


def table(heading: str) -> dict[str, Row]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = {}
    for line in re.findall(r"^\| `\w+` \|.*$", section, re.MULTILINE):
        name, kind, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert name not in rows
        rows[name.strip("`")] = Row(kind, frozenset(re.findall(r"\w+", labels)), meaning)
    return rows


CACHE, CONTROLLER = table("Metrics of a cache process"), table("Metrics of the controller")
ENGINE = set(re.findall(r"^\| `(kvtier_\w+)[`{]", VLLM, re.MULTILINE))


def as_row(family: Metric) -> tuple[str, Row]:
    suffixes = {"counter": "_total", "info": "_info"}
    name = family.name + suffixes.get(family.type, "")
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    labels.update(getattr(family, "_labelnames", ()))  # For families without samples yet.
    kind = "gauge" if family.type == "info" else family.type
    return name, Row(kind, frozenset(labels), family.documentation.rstrip("."))


async def test_tables_are_up_to_date() -> None:
    for path, page in (await pages()).items():
        assert path.read_text() == page, "run: python tools/metrics_reference.py"


async def test_table_of_cache_metrics_is_complete(scraped: ScrapedCache) -> None:
    exported = dict(as_row(family) for family in scraped.metrics.registry.collect())
    assert exported == CACHE
    served = await scraped.scrape()
    assert {name.removesuffix("_total").removesuffix("_info") for name in exported} == {
        name.removesuffix("_info") for name in served.families
    }


@pytest.mark.loop_may_block("the controller describes its calls")
async def test_table_of_controller_metrics_is_complete(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as running, running.instance("decode-1"):
        accepted = await running.post("/clear", instance="decode-1", tier="ram")
        await running.wait_for_end(accepted)
        text = (await running.client.get("/metrics")).text
    exported = dict(as_row(family) for family in text_string_to_metric_families(text))
    assert exported == CONTROLLER


def test_names_have_prefix_and_suffix() -> None:
    for name, row in {**CACHE, **CONTROLLER}.items():
        assert name.startswith(("kvtier_", "process_"))
        assert (row.kind == "counter") == name.endswith("_total")


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> list[str]:
    texts = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    texts += [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    texts += [
        variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable
    ]
    answers = re.findall(r"^\| [^`|]*\? \| (.+) \|$", PAGE, re.MULTILINE)
    return texts + re.findall(r"`([^`]+)`", "\n".join(answers))


SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.mark.parametrize("query", queries())
def test_queries_use_existing_metrics_and_labels(query: str) -> None:
    known = {**CACHE, **CONTROLLER}
    names = re.findall(r"\b(?:kvtier|process)_\w+", query)
    assert names or query.startswith("up{")
    for name in names:
        histogram = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        if histogram in known and known[histogram].kind == "histogram":
            labels = known[histogram].labels | {"le"}
        else:
            assert name in known or name in ENGINE, f"unknown metric {name}"
            labels = known[name].labels if name in known else frozenset({"tier"})
        selectors = set(re.findall(rf"{name}{{([^}}]*)}}", query))
        for label in re.findall(r"(\w+)(?:=~|!=|=)", " ".join(selectors)):
            assert label in labels | {"instance"}, f"{name} has no label {label}"
    for by in re.findall(r"by \(([^)]*)\)", query):
        known_labels = {label for row in known.values() for label in row.labels} | {"le", "instance"}
        assert {label.strip() for label in by.split(",")} <= known_labels


def test_dashboard_is_valid() -> None:
    identifiers = [panel["id"] for panel in panels()]
    assert len(set(identifiers)) == len(identifiers)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    occupied: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & occupied, f"{panel['title']} overlaps another panel"
        occupied |= cells
        assert panel["title"]
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_dashboard_shows_every_cache_metric() -> None:
    expressions = " ".join(queries())
    for name in CACHE:
        if name.startswith("kvtier_") and name != "kvtier_tier_info":
            assert name.removesuffix("_total") in expressions, f"no panel shows {name}"


def test_alerts_are_explained() -> None:
    section = PAGE.split("\n## Dashboard and alerts\n")[1].split("\n## ")[0]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert f"`{rule['alert']}`" in section
            assert rule["annotations"]["summary"]


def test_promtool_accepts_the_alerts() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    subprocess.run([program, "check", "rules", DOCS / "grafana" / "alerts.yml"], check=True)


def test_examples_are_valid_yaml() -> None:
    examples = [yaml.safe_load(code) for code in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert examples[0]["metrics"]["listen"] == "127.0.0.1:9464"
    assert [job["job_name"] for job in examples[1]["scrape_configs"]] == [
        "kvtier",
        "kvtier-controller",
        "vllm",
    ]


async def test_real_prometheus_accepts_metrics_and_queries(scraped: ScrapedCache, tmp_path: Path) -> None:
    """Prometheus scrapes a cache and evaluates every query."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is missing: apt-get install prometheus")
    target = str(scraped.client.base_url).removeprefix("http://")
    job = {"job_name": "kvtier", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    with (tmp_path / "log").open("wb") as log:
        process = await anyio.to_thread.run_sync(
            lambda: subprocess.Popen(
                [
                    program,
                    f"--config.file={tmp_path / 'prometheus.yml'}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stderr=log,
            )
        )
    try:
        await query_all(await address(tmp_path / "log"))
    finally:
        process.terminate()
        await anyio.to_thread.run_sync(process.wait)


async def address(log: Path) -> str:
    with anyio.fail_after(30):
        while not (found := re.search(r'Listening on" address=(\S+)', log.read_text())):
            await anyio.sleep(0.05)
    return found[1]


async def query_all(server: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://{server}/api/v1", trust_env=False, verify=False) as client:

        async def evaluate(query: str) -> Any:
            query = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
            response = await client.get("/query", params={"query": query})
            assert response.json()["status"] == "success", f"{query}: {response.text}"
            return response.json()["data"]["result"]

        with anyio.fail_after(60):
            # It listens before it can answer queries.
            while (await client.get(f"http://{server}/-/ready")).status_code != 200:
                await anyio.sleep(0.1)
            while not await evaluate("kvtier_build_info"):
                await anyio.sleep(0.1)
        assert [series["value"][1] for series in await evaluate("up")] == ["1"]
        for query in queries():
            if not query.startswith("label_values"):
                await evaluate(query)
        assert await evaluate("kvtier_tier_used_bytes / kvtier_tier_capacity_bytes")
