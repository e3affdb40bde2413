"""The history of the fleet: counting, summing up, limits, and what a killed controller leaves."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from kvtier.fleet.controller import history as history_module
from kvtier.fleet.controller.answers import HistorySample
from kvtier.fleet.controller.history import LEVELS, MAX_KEYS, OTHERS, History
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.settings import Span
from kvtier.fleet.controller.state import FileState
from kvtier.fleet.member.protocol import Counters, RouteCount, TokenCount
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.running_controller import (
    MODEL,
    RunningController,
    heartbeat,
    hello,
    running_controller,
    unconnected,
)

pytestmark = pytest.mark.anyio

NAMESPACE = MODEL.namespace.hex()
ROUTES = [RouteCount("ssd", "ram", 100, 0)]


def counters(**counts: Any) -> Counters:
    nothing: dict[str, Any] = {
        "outages": [0] * 3, "corrupt": [0] * 3, "routes": [], "models": [], "tenants": [], "peers": [],
    }  # fmt: skip
    return Counters(**(nothing | counts))


def member(name: str = "one", looked_up: int = 0, found: int = 0, **counts: Any) -> Member:
    """Return an instance that has sent one heartbeat."""
    made = Member(hello(name, incarnation=7), [0, 1, 2], unconnected())
    made.models = [MODEL]
    made.heartbeat = heartbeat(4096, looked_up, found, counters(**counts))
    return made


async def fleet(history: History, span: Span = "hour") -> list[HistorySample]:
    return (await history.read(span, "fleet")).get("", [])


def recent(steps: int) -> list[float]:
    """Return the last points in time at which there could be a sample."""
    now = time.time() // 10 * 10
    return [now - 10 * n for n in range(steps - 1, -1, -1)]


async def test_samples_have_what_was_counted_since_the_one_before(state: FileState) -> None:
    history, (first, second) = History(state), recent(2)
    await history.sample([member("one", 100, 10), member("two", 50, 5)], first)
    models, tenants = [TokenCount(NAMESPACE, 90, 30, 2.0)], [TokenCount("team-a", 90, 30, 2.0)]
    changed = member("one", 190, 20, models=models, tenants=tenants, routes=ROUTES, misses={"evicted": 60})
    await history.sample([changed, member("two", 50, 5)], second)
    before, after = await fleet(history)
    assert (before.looked_up_tokens, before.hit_tokens["ram"], before.instances) == (0, 0, 2)
    assert (after.looked_up_tokens, after.hit_tokens, after.missed_tokens) == (
        90,
        dict.fromkeys(("ram", "ssd", "pool"), 10),
        {"evicted": 60},
    )
    assert (after.saved_seconds, after.gpu_seconds, after.moved_bytes) == (2.0, 2.0, {"ssd → ram": 100})
    assert after.used_bytes == {"ram": 8192, "ssd": 8192}, "that of a shared pool is not known"
    of_model, *_ = (await history.read("hour", "model"))["meta/llama"]
    assert (of_model.looked_up_tokens, of_model.hit_tokens, of_model.instances) == (90, {"any": 30}, 1)
    assert list(await history.read("hour", "tenant")) == ["team-a"]
    of_two = (await history.read("hour", "instance", "two"))["two"]
    assert [(sample.time, sample.looked_up_tokens) for sample in of_two] == [(first, 0), (second, 0)]
    assert await history.read("hour", "instance", "tw") == {}
    [total] = (await history.read("hour", "fleet", total=True))[""]
    assert (total.looked_up_tokens, total.instances, total.time) == (90, 2, second)
    assert total.seconds == 10.0, "the first sample is of no time"


async def test_restarts_and_disconnections_of_instances_lose_no_count(state: FileState) -> None:
    history, times = History(state), recent(4)
    await history.sample([member("one", 100)], times[0])
    await history.sample([], times[1])
    await history.sample([member("one", 130)], times[2])
    restarted = member("one", 5)
    restarted.hello = hello("one", incarnation=8)
    await history.sample([restarted], times[3])
    assert [sample.looked_up_tokens for sample in await fleet(history)] == [0, 0, 30, 5]
    assert [sample.instances for sample in await fleet(history)] == [1, 0, 1, 1]


async def test_samples_are_summed_up(state: FileState) -> None:
    history = History(state)
    start = time.time() // 3600 * 3600 - 2 * 3600
    for number in range(2 * 360):
        await history.sample([member("one", number, misses={"evicted": number})], start + 10 * number)
    days = await fleet(history, "day")
    assert [sample.looked_up_tokens for sample in days] == [59, *[60] * 11]
    assert [sample.seconds for sample in days] == [590.0, *[600.0] * 11]
    weeks = await fleet(history, "week")
    assert (weeks[0].looked_up_tokens, weeks[0].missed_tokens["evicted"]) == (359, 359)
    assert sum(sample.looked_up_tokens for sample in weeks) == 719


@pytest.mark.parametrize("span", list(LEVELS))
async def test_number_of_rows_is_limited(state: FileState, span: Span) -> None:
    history, level = History(state), list(LEVELS).index(span)
    step, points = LEVELS[span]
    for number in range(points + 50):
        samples = {"fleet:": HistorySample(), f"instance:{number}": HistorySample()}
        await history._write(level, number * step, samples)
    query = "SELECT COUNT(*) FROM history WHERE level = ?"
    ((rows,),) = state.connection.execute(query, (level,))
    assert rows == 2 * points


async def test_names_are_limited(state: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_SERIES", 3)
    history, times = History(state), recent(2)
    names = [f"tenant-{number}" for number in range(5)]
    reasons = [f"reason-{number}" for number in range(MAX_KEYS)]
    for at, tokens in zip(times, (0, 10), strict=True):
        tenants = [TokenCount(name, tokens, 0) for name in names]
        misses = dict.fromkeys(reasons, tokens)
        both = [
            member("one", tenants=tenants, misses=misses),
            member("two", misses={"another": tokens, "one more": tokens}),
        ]
        await history.sample(both, at)
    found = await history.read("hour", "tenant", total=True)
    assert {name: sample.looked_up_tokens for name, [sample] in found.items()} == {
        "tenant-0": 10, "tenant-1": 10, "tenant-2": 10, OTHERS: 20,
    }  # fmt: skip
    [total] = (await history.read("hour", "fleet", total=True))[""]
    assert (len(total.missed_tokens), total.missed_tokens[OTHERS]) == (MAX_KEYS + 1, 20)


async def test_what_a_killed_controller_has_begun_to_sum_up_goes_on(state: FileState) -> None:
    start = time.time() // 3600 * 3600 - 3600
    for number in range(250):
        if number % 50 == 0:  # Another controller, which knows no counters yet.
            history = History(state)
        await history.sample([member("one", number)], start + 10 * number)
    for span in ("day", "week"):
        assert sum(sample.looked_up_tokens for sample in await fleet(history, span)) == 5 * 49
    assert sum(sample.seconds for sample in await fleet(history, "week")) == 5 * 490


async def test_history_survives_a_full_disk(state: FileState, monkeypatch: pytest.MonkeyPatch) -> None:
    history, times = History(state), recent(3)
    await history.sample([member("one", 0)], times[0])
    ((pages,),) = state.connection.execute("PRAGMA page_count")
    state.connection.execute(f"PRAGMA max_page_count = {pages}")
    many = [member(f"instance-{number}", 10) for number in range(500)]
    await history.sample([member("one", 10), *many], times[1])
    state.connection.execute("PRAGMA max_page_count = 1000000")
    await history.sample([member("one", 15), *many], times[2])
    assert (await fleet(history))[-1].looked_up_tokens == 5


async def test_damaged_sample_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, times = tmp_path / "state.sqlite", recent(2)
    async with FileState.open(path) as state:
        history = History(state)
        for number, at in enumerate(times):
            await history.sample([member("one", number)], at)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE history SET sample = X'c1' WHERE time = ?", (int(times[0]),))
    connection.close()
    async with FileState.open(path) as state:
        assert [sample.looked_up_tokens for sample in await fleet(History(state))] == [1]
    assert "a damaged row is skipped, of 'fleet:'" in caplog.text


async def test_history_and_totals_over_http(controller: RunningController) -> None:
    history, members = controller.controller.history, controller.registry.members
    async with controller.holding("one", []) as one:
        for looked_up, at in zip((0, 500), recent(2), strict=True):
            tenants = [TokenCount("team-a", looked_up, 0, 0.0)]
            await one.send(heartbeat(0, looked_up, 0, counters(tenants=tenants)))
            await controller.wait_until(lambda wanted=looked_up: members["one"].heartbeat.looked_up == wanted)
            await history.sample(members.values(), at)
    answer = await controller.get("/history")
    assert (answer["span"], answer["step"]) == ("hour", 10)
    assert [sample["looked_up_tokens"] for sample in answer["history"][""]] == [0, 500]
    of_one = await controller.get("/history", of="instance", name="one")
    assert [sample["instances"] for sample in of_one["history"]["one"]] == [1, 1]
    totals = await controller.get("/history", of="tenant", span="day", total=True)
    assert [sample["looked_up_tokens"] for sample in totals["history"]["team-a"]] == [500]
    refused = await controller.client.get("/history", params={"of": "instance"})
    assert (refused.status_code, refused.json()["detail"]) == (422, "name: give the name of an instance")
    assert (await controller.client.get("/history", params={"span": "year"})).status_code == 422
    gone = (await controller.get("/instances"))["gone"]
    assert [(left["instance"], left["host"]) for left in gone] == [("one", "test-host")]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"outages": [0]}, "are not those of its 3 tiers"),
        ({"tenants": [TokenCount("x", 0, 0)] * 300}, "more than 32 peers or 256 models or routes"),
        ({"misses": {f"r{n}": 0 for n in range(100)}}, "have 100 reasons of misses"),
        ({"misses": {"a\x1b": 0}}, "not printable"),
        ({"routes": [RouteCount("", "ram", 0, 0)]}, "is empty"),
    ],
)
async def test_wrong_counters_are_refused(
    running: RunningController, wrong: dict[str, Any], reason: str
) -> None:
    async with running.connect("one") as instance:
        await instance.send(heartbeat(0, 0, 0, counters(**wrong)))
        assert reason in await instance.refusal()


async def test_killed_controller_has_its_history_again(tmp_path: Path) -> None:
    process = ControllerProcess(tmp_path)
    try:
        await anyio.to_thread.run_sync(process.start)
        async with httpx.AsyncClient(base_url=process.url, trust_env=False) as client:

            async def samples() -> Sequence[Any]:
                found: Sequence[Any] = (await client.get("/history")).json()["history"].get("", ())
                return found

            with anyio.fail_after(60):
                while not (before := await samples()):
                    await anyio.sleep(0.1)
            await anyio.to_thread.run_sync(process.kill)
            await anyio.to_thread.run_sync(process.start)
            assert (await samples())[: len(before)] == before
            day = (await client.get("/history", params={"span": "day"})).json()["history"][""]
            assert day[-1]["instances"] == 0
    finally:
        process.close()


async def test_controller_of_before_opens_the_file(tmp_path: Path) -> None:
    """A file without a history, of the same version, gets one."""
    path = tmp_path / "controller.sqlite"
    async with FileState.open(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE history")
    connection.close()
    async with running_controller(tmp_path) as controller:
        await controller.controller.history.sample([], time.time())
        assert (await controller.get("/history"))["history"][""]
