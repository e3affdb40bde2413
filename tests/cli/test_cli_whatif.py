"""``kvtier whatif`` with reports made by hand, and of a real cache process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.bridge import client
from kvtier.bridge.protocol import WhatIfAnswer
from kvtier.observability.whatif.report import Report
from kvtier.observability.whatif.sentences import DISABLED, NOTHING_OBSERVED, UNRELIABLE, basis, findings
from kvtier.pipeline.query import Query
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, store
from tests.rigs.waiting import wait_until
from tests.rigs.whatif_reports import GIB, REPORT

from .conftest import Kvtier, cache_process


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> WhatIfAnswer:
    answer = WhatIfAnswer(1, True, REPORT)
    monkeypatch.setattr(client, "what_if", lambda _path: answer)
    return answer


@pytest.mark.usefixtures("answer")
def test_sentences_and_curves(kvtier: Kvtier) -> None:
    result = kvtier("whatif")
    assert result.status == 0
    lines = [line.split() for line in result.output.splitlines()]
    for line in (*basis(REPORT), *findings(REPORT)):
        assert line.split() in lines
    assert ["ram", "hit", "rate", "in", "ram", "or", "faster"] in lines
    assert ["50GiB", "45.0", "%", "25.0", "%", "█" * 10 + "░" * 8] in lines
    assert ["100GiB", "60.0", "%", "40.0", "%", "█" * 16 + "░" * 8, "today,", "policy", "lru"] in lines
    assert ["100GiB", "63.0", "%", "█" * 25, "policy", "arc"] in lines
    assert ["1000GiB", "60.0", "%", "█" * 24, "today,", "policy", "lru"] in lines, "not one of its points"


@pytest.mark.usefixtures("answer")
def test_one_tier(kvtier: Kvtier) -> None:
    output = kvtier("whatif", "--tier", "ssd").output
    assert "No change that was tried would gain 0.1 points of hit rate." in output
    assert "ssd is 4.0 times larger than useful" in output
    assert "ram" not in output
    result = kvtier("whatif", "--tier", "tape")
    assert result.status == 2
    assert "tape" in result.errors
    assert "ram, ssd" in result.errors


@pytest.mark.usefixtures("answer")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--add", "25GiB", "--tier", "ram"], ["+25GiB of ram: +3.5 points, saves 16 GPU minutes a day"]),
        (["--add=-50GiB", "--tier", "ram"], ["-50GiB of ram: -15.0 points, costs 1.1 GPU hours a day"]),
        (["--add", "-50GiB", "--tier", "ram"], ["-50GiB of ram: -15.0 points, costs 1.1 GPU hours a day"]),
        (
            ["--add", "50GiB"],
            ["+50GiB of ram: +7.0 points, saves 31 GPU minutes a day", "+50GiB of ssd: +0.0 points"],
        ),
        (["--add", "800GiB"], ["+800GiB of ssd: +0.0 points"]),
    ],
)
def test_a_capacity_of_ones_own(kvtier: Kvtier, arguments: list[str], expected: list[str]) -> None:
    assert kvtier("whatif", *arguments).output.splitlines() == expected


@pytest.mark.usefixtures("answer")
@pytest.mark.parametrize(
    ("add", "message"), [("5TiB", "25GiB to 400GiB"), ("-2TiB", "25GiB to 400GiB"), ("much", "is not a size")]
)
def test_a_capacity_that_is_not_known(kvtier: Kvtier, add: str, message: str) -> None:
    result = kvtier("whatif", f"--add={add}")
    assert (result.status, result.output) == (2, "")
    assert message in result.message


def test_a_sample_that_is_too_small(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = WhatIfAnswer(1, True, replace(REPORT, sampled=999))
    monkeypatch.setattr(client, "what_if", lambda _path: answer)
    output = kvtier("whatif").output
    assert UNRELIABLE in output
    assert "+50GiB" not in output
    result = kvtier("whatif", "--add", "50GiB")
    assert len(result.output.splitlines()) == 2
    assert result.message == f"Observed: 999 chunks. {UNRELIABLE}"


@pytest.mark.usefixtures("answer")
def test_json(kvtier: Kvtier) -> None:
    report = json.loads(kvtier("whatif", "--json").output)
    assert report["sampled"] == REPORT.sampled
    assert report["tiers"][0]["points"][0] == {
        "capacity_bytes": 25 * GIB,
        "hit_rate": 0.3,
        "fast_hit_rate": pytest.approx(0.1),
    }
    (change,) = json.loads(kvtier("whatif", "--json", "--tier", "ram", "--add", "50GiB").output)
    assert change["capacity_bytes"] == 150 * GIB
    assert change["gained"] == pytest.approx(0.07)
    (tier,) = json.loads(kvtier("whatif", "--json", "--tier", "ssd").output)["tiers"]
    assert tier["tier"] == "ssd"


@pytest.mark.parametrize(("enabled", "message"), [(True, NOTHING_OBSERVED), (False, DISABLED)])
def test_no_report(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch, enabled: bool, message: str) -> None:
    report: Report | None = None
    monkeypatch.setattr(client, "what_if", lambda _path: WhatIfAnswer(1, enabled, report))
    assert kvtier("whatif") == (0, f"{message}\n", "")
    assert kvtier("whatif", "--tier", "ram", "--json") == (0, "null\n", "")


def test_real_cache_process(kvtier: Kvtier, tmp_path: Path) -> None:
    with cache_process(tmp_path, tiers=[{"name": "ram", "type": "cpu", "capacity": "8MiB"}]) as running:
        assert kvtier("whatif", "--socket", running.socket).output == f"{NOTHING_OBSERVED}\n"
        scheduler, worker = store(running.socket, KEYS[:4])
        ticket = scheduler.look_up(Query(KEYS[:8], 8 * CHUNK_TOKENS))
        assert ticket is not None
        wait_until(lambda: client.what_if(running.socket).report is not None)
        report = json.loads(kvtier("whatif", "--config", running.config, "--json").output)
        scheduler.close()
        worker.close()
    assert not report["stopped"], "then it may have observed nothing"
    assert (report["chunks"], report["measured_hit_rate"]) == (8, 0.5)
    assert [(curve["tier"], curve["capacity_bytes"]) for curve in report["tiers"]] == [("ram", 8 << 20)]
