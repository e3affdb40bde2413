"""`kvtier simulate`: its output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.cli import options
from tests.cli.conftest import Kvtier
from tests.lab.simulation.making import bailian_line, mooncake_line


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "made.jsonl"
    prompts = [[1, 2, 3], [4, 5], [1, 2, 6], [4, 5], [1, 2, 3]]
    path.write_text("".join(mooncake_line(1000 * at, ids) for at, ids in enumerate(prompts)))
    return path


def test_table_shows_each_policy_and_capacity(kvtier: Kvtier, trace: Path) -> None:
    result = kvtier("simulate", trace, "--capacity", "50%,1GiB", "--policy", "lru", "--windows", "2")
    assert result.status == 0, result
    assert "made.jsonl: 5 requests in 4s, 13 chunks of 512 tokens and 64MiB, 6 distinct" in result.output
    lines = result.output.splitlines()
    assert "Belady" in lines[1]
    assert "of trace" in lines[1]
    assert [line.split()[0] for line in lines[2:4]] == ["lru", "lru"]
    assert "53.8 %" in lines[3], "7 of 13 chunks, with room for all"


def test_json_has_all_results(kvtier: Kvtier, trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(bailian_line(0, range(64)) + bailian_line(5, range(64)))
    result = kvtier("simulate", trace, other, "--capacity", "100%", "--json", "--limit", "2")
    assert result.status == 0, result
    first, second = json.loads(result.output)["traces"]
    assert (first["name"], first["requests"], first["chunks"]) == ("made.jsonl", 2, 5)
    (row,) = second["rows"]
    assert (row["policy"], row["asked"], row["hits"]) == ("adaptive", 4, 2)
    assert row["hit_rate"] == row["belady_hit_rate"] == 0.5
    assert [tier["name"] for tier in row["tiers"]] == ["ram"]


def test_ends_of_answers_are_reported_unless_left_out(kvtier: Kvtier, trace: Path) -> None:
    """With 7 tokens each, at a request a second."""
    for arguments, ends in (
        ([], 4),
        (["--seconds-per-token", "0.4"], 2),
        (["--seconds-per-token", "0"], 0),
        (["--no-ends"], 0),
    ):
        result = kvtier("simulate", trace, "--capacity", "100%", "--policy", "lru", *arguments)
        remark = f"the ends of {ends} answers were reported to the policies"
        assert (remark in result.output) == (ends > 0), result
        result = kvtier("simulate", trace, "--capacity", "100%", "--json", *arguments)
        (row,) = json.loads(result.output)["traces"][0]["rows"]
        assert (row["ends"], row["stored_again"]) == (ends, 0)


def test_attention_makes_long_prompts_slower(kvtier: Kvtier, trace: Path) -> None:
    def seconds(*arguments: str) -> float:
        result = kvtier("simulate", trace, "--capacity", "100%", "--policy", "lru", "--json", *arguments)
        # Neither NaN nor Infinity is JSON.
        (row,) = json.loads(result.output, parse_constant=pytest.fail)["traces"][0]["rows"]
        return float(row["ttft_seconds"])

    assert seconds("--attention-tokens", "1e12") == pytest.approx(seconds())
    assert seconds("--attention-tokens", "512") > 1.5 * seconds()


def test_tiers_of_a_settings_file(kvtier: Kvtier, trace: Path, tmp_path: Path) -> None:
    settings = tmp_path / "kvtier.yaml"
    tiers = [
        {"name": "fast", "type": "cpu", "capacity": "256MiB"},
        {"name": "slow", "type": "disk", "path": str(tmp_path / "unused"), "capacity": "1GiB"},
    ]
    settings.write_text(json.dumps({"tiers": tiers}))
    measured = tmp_path / "bench.json"
    rows = [{"name": "slow", "get": {"gb_s": 5.5}}, {"name": "tcp", "get": None}]
    measured.write_text(json.dumps({"rows": rows}))
    target = tmp_path / "out.json"
    result = kvtier(
        "simulate", trace, "--config", settings, "--bench", measured, "--speed", "fast=9", "--output", target
    )
    assert result.status == 0, result
    assert "hits fast" in result.output
    (row,) = json.loads(target.read_text())["traces"][0]["rows"]
    assert sum(tier["hits"] for tier in row["tiers"]) == row["hits"] == 7
    assert not (tmp_path / "unused").exists(), "a simulation opens no tier"


def test_plot_is_saved_as_png(kvtier: Kvtier, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "rates.png"
    assert kvtier("simulate", trace, "--plot", target).status == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_names_what_to_install(
    kvtier: Kvtier, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    result = kvtier("simulate", trace, "--plot", tmp_path / "rates.png")
    assert result.status == 1
    assert "pip install" in result.errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "lru,mru"], "unknown eviction policy 'mru': use one of lru"),
        (["--capacity", "5%,many"], "'many' is not a size"),
        (["--capacity", "0%"], "use a percentage above 0"),
        (["--capacity", "1KiB"], "holds no chunk"),
        (["--speed", "ram"], "is not NAME=GB/s"),
        (["--speed", "ram=0"], "is not NAME=GB/s"),
        (["--speed", "disk=3"], "there is no tier 'disk': use one of ram"),
        (["--ratio", "ram=x"], "is not NAME=N"),
        (["--ratio", "ram=0"], "above 0"),
        (["--ratio", "ram=2"], "tier ram has no codec"),
        (["--ratio", "disk=3"], "there is no tier 'disk': use one of ram"),
        (["--bench", "absent.json"], "kvtier bench --output"),
        (["--chunk-tokens", "100"], "use a multiple of 512"),
        (["--token-bytes", "0"], "use a size from 1"),
        (["--output", "absent/out.json"], "there is no folder"),
        (["--output", "/dev/full"], "--output: cannot write /dev/full: No space left on device"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ],
)
def test_unusable_options_are_one_message(
    kvtier: Kvtier, trace: Path, arguments: list[str], reason: str
) -> None:
    result = kvtier("simulate", trace, *arguments)
    assert result.status != 0
    assert reason in result.message
    assert "Traceback" not in result.errors


def test_malformed_trace_is_one_message(kvtier: Kvtier, trace: Path) -> None:
    with trace.open("a") as file:
        file.write("{\n")
    result = kvtier("simulate", trace)
    assert result.status == 1
    assert "line 6" in result.errors
    assert "Traceback" not in result.errors
