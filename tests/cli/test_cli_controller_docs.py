"""The commands and calls in the controller's documentation work as documented."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import typer

from kvtier.catalog.misses import Miss, MissReason
from kvtier.cli import make_app
from kvtier.observability.requests import RequestReport
from tests.rigs.fleet import MODEL, fleet

from .conftest import Kvtier

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "controller.md"
EXAMPLE = ROOT / "examples" / "controller" / "README.md"
TEXT = PAGE.read_text()


class Call(NamedTuple):
    """A ``curl`` call on the page."""

    method: str
    path: str
    body: Any


def calls() -> Iterator[tuple[Call, Any]]:
    """Yield each call on the page with its documented answer."""
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL):
        for line, answer in re.findall(r"^\$ (.*)\n(.*)$", block, re.MULTILINE):
            yield call(line), json.loads(answer)


def call(line: str) -> Call:
    words = [word for word in shlex.split(line) if word != "-s"]
    assert words[0] == "curl"
    path = words[1].removeprefix("localhost:9000")
    if len(words) == 2:
        return Call("GET", path, None)
    assert words[2] == "--json"
    return Call("POST", path, json.loads(words[3]))


def shape(value: Any) -> Any:
    """Return the names and types of a value, without the values."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


@pytest.mark.anyio
async def test_every_call_is_answered_as_documented(tmp_path: Path, kvtier: Kvtier) -> None:
    shown = list(calls())
    assert len(shown) >= 10
    paths = {call.path.partition("?")[0].split("/")[1] for call, _ in shown}
    assert paths >= {"lookup", "move", "prefetch", "pin", "unpin", "clear", "events", "instances", "healthz"}
    tokens = shown[0][0].body["tokens"]
    event_ids: dict[str, str] = {}
    """Event ids of this run, by those on the page."""
    async with fleet(tmp_path, kvtier, "decode-1", "decode-2") as running:
        await running.store("decode-1", tokens)
        await running.wait_for_heartbeats()
        missed = Miss(MissReason.DIVERGES, 1136, position=288)
        report = RequestReport(1.0, "cmpl-7f3a-0", "vllm", 1424, 0, {"ram": 288}, [missed], 0.1)
        running.instances["decode-1"].requests.add(report)
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, verify=False) as http:
            for request, answer in shown:
                path = re.sub("[0-9a-f]{16}", lambda found: event_ids[found[0]], request.path)
                response = await http.request(request.method, path, json=request.body)
                given = response.json()
                if "event_id" in answer and "event_id" in given:
                    event_ids[answer["event_id"]] = given["event_id"]
                    await http.get(f"/events/{given['event_id']}?wait=30")
                assert comparable(given) == comparable(answer), request


def comparable(answer: Any) -> Any:
    """Return what is the same in every run: shapes, and some values."""
    same = {
        name: answer[name] for name in ("num_tokens", "kind", "state", "detail", "known") if name in answer
    }
    for event in answer.get("events", ()):
        # The page shows only the newest of a list.
        return {"events": {"kind": answer["events"][0]["kind"], **shape(event)}}
    if "instances" in answer and isinstance(answer["instances"], list):
        first = {**answer["instances"][0]}
        tier = shape(first.pop("tiers"))
        return {"instances": shape({**first, "hit_rate": None, "looked_up_tokens": 0}), "tiers": tier}
    return {**shape(answer), **same}


def commands(text: str) -> list[list[str]]:
    """Return the `kvtier` commands on a page, from blocks and inline code."""
    blocks = "\n".join(re.findall(r"^ *```\n(.*?)```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    found = re.findall(r"^ *(?:\S+=\S+ )*(kvtier [^\n#&|]*)", blocks, re.MULTILINE)
    found += re.findall(r"`(kvtier [^`]*)`", text)
    return [shlex.split(command.replace("\n", " ")) for command in dict.fromkeys(found)]


def expand(words: list[str]) -> Iterator[list[str]]:
    """Yield each alternative of `a|b`, in a table `a\\|b`, without placeholders."""
    for name in re.split(r"\\?\|", words[1]):
        yield [name, *(word for word in words[2:] if not word.startswith("["))]


@pytest.mark.parametrize(
    "page",
    [
        PAGE,
        EXAMPLE,
        ROOT / "README.md",
        ROOT / "docs" / "disaggregated.md",
        ROOT / "examples" / "disaggregated" / "README.md",
    ],
    ids=lambda page: f"{page.parent.name}/{page.name}",
)
def test_documented_options_exist(page: Path) -> None:
    group = typer.main.get_command(make_app())
    known = group.commands  # type: ignore[attr-defined]
    found = [words for command in commands(page.read_text()) for words in expand(command)]
    assert found
    for name, *arguments in found:
        options = {option for parameter in known[name].params for option in parameter.opts}
        if not hasattr(known[name], "commands"):  # Options of subcommands are checked elsewhere.
            assert {word for word in arguments if word.startswith("--")} <= options


def test_walk_through_uses_the_files_of_the_example() -> None:
    """Its settings files, model and ports are those of examples/controller."""
    for number, port in ((1, 8200), (2, 8201)):
        text = (EXAMPLE.parent / f"instance{number}.yaml").read_text()
        assert f'"127.0.0.1:{port}"' in text
        assert f"instance_id: instance-{number}" in text
        assert f"instance{number}.yaml" in TEXT
        assert f"instance-{number}" in TEXT
    assert MODEL in TEXT
    assert MODEL in EXAMPLE.read_text()
