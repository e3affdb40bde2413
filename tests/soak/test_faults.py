from __future__ import annotations

import itertools
import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kvtier.bridge import server
from kvtier.bridge.protocol import Reserve, Run
from kvtier.memory.keys import join_keys
from kvtier.plugins import Plugins
from kvtier.testing.relay import Relay
from kvtier.testing.servers import free_port
from soak import faults, links, recovery
from soak.commands import INSTANCES, TIERS, Commands
from soak.disks import Disk
from soak.faults import Faults
from soak.findings import Record
from soak.lane import STUCK_SECONDS, Lane
from soak.oracle import Oracle, Question
from soak.pressure import held_by_engines, reserve_too_much
from soak.recovery import Recovery
from soak.schedule import Fault, Phase, Turn
from soak.stack import DISK_BYTES
from tests.rigs import scripted_engine as scripted
from tests.rigs.controller_stub import Stub
from tests.rigs.waiting import until

Plugins.load([])
TURN = Turn(0.0, 0, 0, 1, 0, None)
IDLE = {"engines": [{"leases": 0}], "reservations": {"bytes": 700, "void_bytes": 700}}
LEASES = {"engines": [{"leases": 2}], "reservations": {"bytes": 700, "void_bytes": 700}}
RESERVED = {"engines": [{"leases": 0}], "reservations": {"bytes": 800, "void_bytes": 700}}


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    known = Oracle(None, tmp_path)  # type: ignore[arg-type]
    known.questions = {(number, 0, None): Question([number] * 9, [1]) for number in range(8)}
    return known


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        yield sleeping
        sleeping.kill()


class FakeEngine:
    """An engine that never answers."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.params: list[Any] = []

    def submit(self, *_: Any, params: Any, **__: Any) -> int:
        self.params.append(params)
        return len(self.params)

    def finished(self, _number: int) -> bool:
        return False


def make_lane(oracle: Oracle, record: Record, pid: int = 0) -> Lane:
    lane = Lane(0, lambda: nullcontext(FakeEngine(pid)), [], oracle, record, unlisted="127.0.0.1:9")  # type: ignore[arg-type]
    lane.open()
    return lane


def make_faults(oracle: Oracle, record: Record, lane: Any, host: Any) -> Faults:
    stack: Any = SimpleNamespace(
        hosts=[host], redis=None, controller=SimpleNamespace(url="http://127.0.0.1:9")
    )
    return Faults(7, stack, [lane], oracle, record)


def inject(injector: Faults, kind: str, target: str, seconds: float = 0.0, amount: int = 3) -> None:
    injector.run(Phase("tcp", 1.0, (Fault(0.0, kind, target, seconds, amount),), (), ((), ())))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_engine_is_stopped_within_the_block(oracle: Oracle, process: subprocess.Popen[bytes]) -> None:
    lane = make_lane(oracle, Record(), process.pid)
    before = time.monotonic()
    with lane.stopped():
        while state(process.pid) != "T":
            time.sleep(0.001)
    while state(process.pid) == "T":
        time.sleep(0.001)
    [(began, ended)] = lane.pauses
    assert before <= began < ended


@pytest.mark.parametrize("stopped", ["never", "before", "still", "in-parts", "too-short"])
def test_request_of_a_stopped_engine_is_not_stuck(
    oracle: Oracle, process: subprocess.Popen[bytes], stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record()
    lane = make_lane(oracle, record, process.pid)
    sent = 1000.0
    now = sent + 2 * STUCK_SECONDS
    clock = iter([sent, *([sent + 1.0] if stopped == "still" else []), *itertools.repeat(now, 9)])
    monkeypatch.setattr("soak.lane.time", SimpleNamespace(monotonic=lambda: next(clock)))
    lane.send(TURN)
    match stopped:
        case "before":  # The request was sent while it was stopped.
            lane.pauses.append((sent - 1000.0, now - 1.0))
        case "in-parts":
            lane.pauses += [(sent + 1.0, sent + 0.8 * STUCK_SECONDS), (now - 0.9 * STUCK_SECONDS, now)]
        case "too-short":
            lane.pauses.append((sent - 1000.0, sent + 0.1 * STUCK_SECONDS))
    with lane.stopped() if stopped == "still" else nullcontext():
        lane.collect_answers()
    assert record.found == ({"stuck request": 1} if stopped in ("never", "too-short") else {})


def test_hinted_request_names_an_unlisted_address(oracle: Oracle) -> None:
    record = Record()
    lane = make_lane(oracle, record)
    lane.send(TURN)
    lane.send(TURN._replace(hinted=True))
    hint = {"kvtier": {"kv_transfer": {"to": "127.0.0.1:9"}}}
    assert lane.engine.params == [None, hint]  # type: ignore[attr-defined]
    assert record.counts["requests that name an unlisted address"] == 1


def test_connection_to_an_unlisted_address_is_a_finding(tmp_path: Path) -> None:
    record = Record()
    with Relay.to(free_port()) as relay:
        log = tmp_path / "log"
        log.write_text(f"KV transfer to 127.0.0.1:{relay.port} refused: ...")
        stack: Any = SimpleNamespace(unlisted=relay, hosts=[SimpleNamespace(cache=SimpleNamespace(log=log))])
        Recovery(stack, [], None, record).check_unlisted()  # type: ignore[arg-type]
        assert not record.found
        socket.create_connection(("127.0.0.1", relay.port)).close()
        while not relay.accepted:
            time.sleep(0.001)
        Recovery(stack, [], None, record).check_unlisted()  # type: ignore[arg-type]
        assert record.found == {"connection to an unlisted address": 1}
        log.write_text("")
        relay.accepted = 0
        Recovery(stack, [], None, record).check_unlisted()  # type: ignore[arg-type]
    assert record.found == {"connection to an unlisted address": 1, "fault without effect": 1}


@pytest.mark.parametrize("reclaimed", [True, False])
@pytest.mark.parametrize(("amount", "tries", "held"), [(0, 3, 2), (1, 4, 100)])
def test_engine_is_stopped_while_it_holds_something(
    oracle: Oracle,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    *,
    amount: int,
    tries: int,
    held: int,
    reclaimed: bool,
) -> None:
    monkeypatch.setattr(faults, "RECLAIM_SECONDS", 0.0)
    status = {"now": [IDLE, IDLE, LEASES, RESERVED, RESERVED]}

    def reserve(_socket: Path) -> int:
        if reclaimed:
            status["now"] = [IDLE]
        return 1

    def ask() -> Any:
        now = status["now"]
        return now.pop(0) if len(now) > 1 else now[0]

    monkeypatch.setattr(faults, "reserve_too_much", reserve)
    record = Record()
    lane = make_lane(oracle, record, process.pid)
    host = SimpleNamespace(cache=SimpleNamespace(status=ask, socket=Path()))
    inject(make_faults(oracle, record, lane, host), "stop-engine-long", "engine-0", amount=amount)
    assert len(lane.pauses) == tries
    assert record.applied[0].hit == held
    assert record.counts == ({"stopped engines reclaimed": 1} if reclaimed else {})
    assert record.found == ({} if reclaimed else {"leak": 1})


@pytest.mark.anyio
async def test_more_is_reserved_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted.open_host(tmp_path) as host, host.peer() as scheduler, host.peer() as worker:
        await scheduler.greet()
        await worker.greet("worker", 0)
        await scheduler.request(
            Reserve(1, [Run(scripted.ROOT, join_keys(scripted.KEYS), scripted.CHUNK_TOKENS)])
        )
        assert held_by_engines(host.server.status()).reserved_bytes > 0
        assert 0 < await anyio.to_thread.run_sync(reserve_too_much, host.path) < 10
        assert held_by_engines(host.server.status()).reserved_bytes > 0
        monkeypatch.setattr(server, "STOPPED_SECONDS", 0.0)
        await anyio.to_thread.run_sync(reserve_too_much, host.path)
        await until(lambda: not any(held_by_engines(host.server.status())))


def test_each_cut_connection_counts_once(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, asked = Record(), []
    inodes = iter([None, 5, 5, 6])

    def cut(_folder: Path, pid: int, role: str, path: Path) -> int | None:
        asked.append((pid, role, path))
        inode = next(inodes)
        if inode == 6:
            injector.stop()
        return inode

    monkeypatch.setattr(links, "cut", cut)
    monkeypatch.setattr(faults, "CUT_SECONDS", 0.0)
    monkeypatch.setenv("SOAK_HOOKS", str(tmp_path))
    host = SimpleNamespace(cache=SimpleNamespace(socket=Path("socket")))
    injector = make_faults(oracle, record, make_lane(oracle, record, 3), host)
    inject(injector, "cut-worker", "engine-0", 600.0)
    assert asked == [(3, "worker", Path("socket"))] * 4
    assert record.applied[0].hit == 2


def test_damage_is_undone_after_its_time(oracle: Oracle, tmp_path: Path) -> None:
    record, disk = Record(), Disk(tmp_path, None)
    file = disk.tier / "000" / "a.kv"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    injector = make_faults(oracle, record, None, SimpleNamespace(disk=disk))
    injecting = threading.Thread(target=inject, args=(injector, "hide-folders", "disk-0", 600.0))
    injecting.start()
    while file.exists():
        time.sleep(0.001)
    injector.stop()
    injecting.join()
    assert file.read_bytes() == b"x"
    assert record.applied[0].hit == 1


def test_disk_beyond_its_capacity_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RECOVERY_SECONDS", 0.0)
    record, disk = Record(), Disk(tmp_path, None)
    disk.tier.mkdir()
    stack: Any = SimpleNamespace(hosts=[SimpleNamespace(number=0, disk=disk)])
    check = Recovery(stack, [], None, record)  # type: ignore[arg-type]
    for length, findings in ((DISK_BYTES, 0), (DISK_BYTES + 1, 1)):
        with (disk.tier / "a.kv").open("wb") as file:
            file.truncate(length)
        check.wait_for(check.beyond_capacity, "keep its capacity")
        assert record.found.total() == findings


@pytest.fixture
def controller() -> Iterator[Stub]:
    """Accepts all commands but one, and has no pins."""
    with Stub().serving() as stub:
        stub.respond("POST /lookup", lambda body: {"instances": {"instance-1": {held_in(body): 9}}})
        for command in ("pin", "move", "unpin"):
            stub.respond(f"POST /{command}", {"event_id": "e"})
        stub.respond("GET /events/e", {"result": {"chunks": 2}})
        stub.respond("GET /pins", {"pins": []})
        yield stub


def held_in(body: Any) -> str:
    return "ram" if body["tokens"] == [1] * 9 else "ssd"


def test_chunks_are_pinned_cleared_and_moved_and_unpinned_at_the_end(
    oracle: Oracle, controller: Stub
) -> None:
    record = Record()
    processed = Commands(controller.url, oracle, record.count).operate(random.Random(1))
    places = len(INSTANCES) * len(TIERS)
    commands = ("/pin", "/clear", "/move", "/unpin")
    sent = [(path, body) for call, _, body, _ in controller.requests if (path := call[5:]) in commands]
    names = [path for path, _ in sent]
    assert {name: names.count(name) for name in names} == {
        "/pin": places,
        "/clear": places,
        "/move": places * (places - 1),
        "/unpin": len(INSTANCES),
    }
    assert names[-len(INSTANCES) :] == ["/unpin"] * len(INSTANCES)
    assert [body["tokens"] for _, body in sent] == [[1] * 9] * len(sent), "what is held in memory"
    assert processed == 2 * (len(sent) - places)
    assert record.counts == {
        "chunks of pin": 2 * places,
        "chunks of move": 2 * places * (places - 1),
        "chunks of unpin": 2 * len(INSTANCES),
    }


def test_commands_to_a_controller_that_is_gone_are_not_accepted(oracle: Oracle) -> None:
    commands = Commands(f"http://127.0.0.1:{free_port()}", oracle, Record().count)
    assert commands.operate(random.Random(1)) == 0
    assert "does not answer" in commands.move(1)


def test_pin_that_is_left_is_a_finding(controller: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "RECOVERY_SECONDS", 0.0)
    record = Record()
    check = Recovery(SimpleNamespace(controller=controller), [], None, record)  # type: ignore[arg-type]
    check.wait_for(check.pins_left, "be without pins")
    assert not record.found
    controller.respond("GET /pins", {"pins": [{"instance": "instance-0"}]})
    check.wait_for(check.pins_left, "be without pins")
    assert record.found == {"failed recovery": 1}
