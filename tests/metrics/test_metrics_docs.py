"""The page on metrics and the dashboard say what the processes say."""

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

from tests.controller.controlling import running_controller
from tests.metrics.scraping import settings, watched

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
VLLM = (DOCS / "vllm.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "kvtier.json").read_text())
UNITS = ("bytes", "seconds", "chunks")


class Row(NamedTuple):
    """One of a table on the page."""

    kind: str
    unit: str
    labels: frozenset[str]
    meaning: str


def table(heading: str) -> dict[str, Row]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = {}
    for line in re.findall(r"^\| `\w+` \|.*$", section, re.MULTILINE):
        name, kind, unit, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert name not in rows
        rows[name.strip("`")] = Row(kind, unit, frozenset(re.findall(r"\w+", labels)), meaning)
    return rows


CACHE, CONTROLLER = table("Of a cache process"), table("Of the controller")
ENGINE = set(re.findall(r"^\| `(kvtier_\w+)[`{]", VLLM, re.MULTILINE))


def as_row(family: Metric) -> tuple[str, Row]:
    ends = {"counter": "_total", "info": "_info"}
    name = family.name + ends.get(family.type, "")
    unit = next((unit for unit in UNITS if unit in family.name.split("_")), "")
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    labels.update(getattr(family, "_labelnames", ()))  # Also where nothing has been counted yet.
    kind = "gauge" if family.type == "info" else family.type
    return name, Row(kind, unit, frozenset(labels), family.documentation.rstrip("."))


def check(told: dict[str, Row], documented: dict[str, Row]) -> None:
    assert told.keys() == documented.keys()
    for name, row in told.items():
        listed = documented[name]
        assert listed._replace(unit="") == row._replace(unit=""), name
        assert not row.unit or listed.unit == row.unit, name


async def test_the_table_lists_all_metrics_of_a_cache_process_and_no_other(tmp_path: Path) -> None:
    async with watched(settings(tmp_path)) as one:
        told = dict(as_row(family) for family in one.metrics.registry.collect())
        check(told, CACHE)
        served = await one.scrape()
        assert {name.removesuffix("_total").removesuffix("_info") for name in told} == {
            name.removesuffix("_info") for name in served.families
        }


@pytest.mark.loop_may_block("the controller describes its calls")
async def test_the_table_lists_all_metrics_of_the_controller_and_no_other(tmp_path: Path) -> None:
    async with running_controller(tmp_path) as running, running.instance("decode-1"):
        accepted = await running.ask("/clear", instance="decode-1", tier="ram")
        await running.ended(accepted)
        text = (await running.client.get("/metrics")).text
    told = dict(as_row(family) for family in text_string_to_metric_families(text))
    check(told, CONTROLLER)


def test_names_have_units_where_they_have_any() -> None:
    for name, row in {**CACHE, **CONTROLLER}.items():
        assert name.startswith(("kvtier_", "process_"))
        assert (row.kind == "counter") == name.endswith("_total")
        assert row.unit or name.endswith("_info"), name


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> list[str]:
    texts = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    texts += [
        variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable
    ]
    return texts + re.findall(r"^\| [^`|]*\? \| `(.+)` \|$", PAGE, re.MULTILINE)


SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.mark.parametrize("query", queries())
def test_every_query_asks_for_what_there_is(query: str) -> None:
    known = {**CACHE, **CONTROLLER}
    names = re.findall(r"\b(?:kvtier|process)_\w+", query)
    assert names
    for name in names:
        histogram = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        if histogram in known and known[histogram].kind == "histogram":
            labels = known[histogram].labels | {"le"}
        else:
            assert name in known or name in ENGINE, f"there is no {name}"
            labels = known[name].labels if name in known else frozenset({"tier"})
        asked = set(re.findall(rf"{name}{{([^}}]*)}}", query))
        for label in re.findall(r"(\w+)(?:=~|!=|=)", " ".join(asked)):
            assert label in labels | {"instance"}, f"{name} has no label {label}"
    for by in re.findall(r"by \(([^)]*)\)", query):
        known_labels = {label for row in known.values() for label in row.labels} | {"le", "instance"}
        assert {label.strip() for label in by.split(",")} <= known_labels


def test_the_dashboard_is_one() -> None:
    identifiers = [panel["id"] for panel in panels()]
    assert len(set(identifiers)) == len(identifiers)
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
        assert panel["title"]
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_dashboard_shows_what_matters() -> None:
    asked = " ".join(queries())
    for name in CACHE:
        if name.startswith("kvtier_") and name != "kvtier_tier_info":
            assert name.removesuffix("_total") in asked, f"no panel shows {name}"


def test_the_examples_are_yaml() -> None:
    examples = [yaml.safe_load(code) for code in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert examples[0]["metrics"]["listen"] == "127.0.0.1:9464"
    assert [job["job_name"] for job in examples[1]["scrape_configs"]] == [
        "kvtier",
        "kvtier-controller",
        "vllm",
    ]


async def test_a_real_prometheus_takes_all_of_it(tmp_path: Path) -> None:
    """It scrapes a cache, and understands every query."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus: apt-get install prometheus")
    async with watched(settings(tmp_path)) as one:
        target = str(one.client.base_url).removeprefix("http://")
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

        async def ask(query: str) -> Any:
            query = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
            answer = await client.get("/query", params={"query": query})
            assert answer.json()["status"] == "success", f"{query}: {answer.text}"
            return answer.json()["data"]["result"]

        with anyio.fail_after(30):
            while not await ask("kvtier_build_info"):
                await anyio.sleep(0.1)
        assert [series["value"][1] for series in await ask("up")] == ["1"]
        for query in queries():
            if not query.startswith("label_values"):
                await ask(query)
        assert await ask("kvtier_tier_used_bytes / kvtier_tier_capacity_bytes")
