"""Several controllers of one state, in this process: any of them can be asked, and one executes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import ByteStream, SocketAttribute

from kvtier.fleet.controller import serve, shared_state, standby
from kvtier.fleet.controller.shared_state import LEASE, SharedState
from kvtier.testing.servers import free_port
from tests.rigs.running_controller import (
    A_TO_B,
    KEYS,
    RAM,
    TIMEOUT_SECONDS,
    TOKENS,
    Gate,
    RunningController,
    ScriptedInstance,
    running_controller,
)
from tests.rigs.servers.redis import RedisServer
from tests.rigs.servers.running import running
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

TOKEN = "an unguessable token"


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running(RedisServer, tmp_path_factory) as server:
        yield server


@pytest.fixture
def server(module_server: RedisServer) -> Iterator[RedisServer]:
    yield module_server
    module_server.command("FLUSHALL")


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SETTLE_SECONDS", 0.0)


def leads(controller: RunningController) -> bool:
    return bool(controller.registry.term)


@asynccontextmanager
async def two(
    folder: Path, server: RedisServer, **changes: Any
) -> AsyncIterator[tuple[RunningController, RunningController]]:
    """Run a controller that leads and one that does not."""
    state = {"state": server.tier()["url"], **changes}
    async with running_controller(folder, **state) as first:
        await until(lambda: leads(first))
        async with running_controller(folder, **state) as second:
            yield first, second


@asynccontextmanager
async def instance(
    name: str, *controllers: RunningController, **held: Any
) -> AsyncIterator[list[ScriptedInstance]]:
    """Register an instance with each controller. They share what it holds."""
    async with AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(each.instance(name, **held)) for each in controllers]
        for side in sides:
            side.held = sides[0].held
        yield sides


async def test_both_answer_and_one_executes(tmp_path: Path, server: RedisServer) -> None:
    async with two(tmp_path, server) as (first, second):
        assert (await first.get("/healthz"))["leads"]
        assert not (await second.get("/healthz"))["leads"]
        assert "kvtier_controller_leads 0.0" in (await second.client.get("/metrics")).text
        async with instance("a", first, second, ram=KEYS), instance("b", first, second) as b:
            lookup = {"tokens": TOKENS}
            await until(lambda: len(second.registry.holders) == len(KEYS))
            assert await second.post("/lookup", **lookup) == await first.post("/lookup", **lookup)
            accepted = await second.post("/move", **A_TO_B)
            event = await second.wait_for_end(accepted)
            assert event["state"] == "done"
            assert event == await first.get(f"/events/{accepted['event_id']}")
            assert list(b[0].held[RAM]) == KEYS
            assert not b[1].commands
            assert {command.term for command in b[0].commands} == {first.registry.term}  # type: ignore[union-attr]
            for path in ("/instances", "/instances/a", "/pins", "/history", "/findings", "/about", "/peers"):
                assert (await second.get(path)).keys() == (await first.get(path)).keys(), path


async def test_one_that_has_just_started_asks_the_leader(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index is not complete: it would answer that nothing is held, and move nothing."""
    monkeypatch.setattr(shared_state, "LEASE_SECONDS", 60.0)
    state = {"state": server.tier()["url"]}
    async with running_controller(tmp_path, **state) as first:
        await until(lambda: leads(first))
        monkeypatch.setattr(serve, "SETTLE_SECONDS", 3600.0)
        acquire = SharedState.acquire

        async def acquire_late(*arguments: Any) -> int:
            await anyio.sleep(0.2)  # In which it does not know that there is one to ask.
            return await acquire(*arguments)

        monkeypatch.setattr(SharedState, "acquire", acquire_late)
        async with first.instance("a", ram=KEYS), running_controller(tmp_path, **state) as second:
            assert await second.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
            assert not second.registry.members


@pytest.mark.parametrize("other_is_ready", [True, False])
async def test_one_that_has_just_started_leads_only_if_no_other_one_can(
    other_is_ready: bool, tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"state": server.tier()["url"]}
    async with running_controller(tmp_path, **state) as first:
        await until(lambda: leads(first))
        monkeypatch.setattr(serve, "SETTLE_SECONDS", 3600.0)
        async with running_controller(tmp_path, **state) as starting:
            if not other_is_ready:
                await first.controller.finish()
                await until(lambda: leads(starting))
                return
            monkeypatch.setattr(serve, "SETTLE_SECONDS", 0.0)
            async with running_controller(tmp_path, **state) as ready:
                await first.controller.finish()
                await until(lambda: leads(ready) or leads(starting))
                assert leads(ready)


async def test_one_that_misses_reports_asks_the_leader(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "LEASE_SECONDS", 60.0)  # Without a leader it would answer itself.
    async with two(tmp_path, server) as (first, second), first.instance("a", ram=KEYS), second.connect("a"):
        await until(lambda: "a" in second.registry.members)
        assert await second.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}


@asynccontextmanager
async def scripted_leader(
    server: RedisServer, answer: Callable[[ByteStream], Awaitable[None]]
) -> AsyncIterator[list[bytes]]:
    """Give the lease to one that receives requests, which it yields, and answers like this."""
    received: list[bytes] = []

    async def accept(stream: ByteStream) -> None:
        async with stream:
            received.append(await stream.receive())
            await answer(stream)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        server.command("HSET", LEASE, "term", "7", "url", url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, accept)
            yield received
            tasks.cancel_scope.cancel()


async def nothing(_: ByteStream) -> None:
    """Close the connection at once."""


async def never(_: ByteStream) -> None:
    """Leave a client waiting."""
    await anyio.sleep_forever()


async def a_part(stream: ByteStream) -> None:
    """Close the connection in the middle of an answer."""
    await stream.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nevent\r\n")


async def test_what_a_leader_may_have_begun_is_not_repeated(tmp_path: Path, server: RedisServer) -> None:
    async with (
        scripted_leader(server, nothing) as received,
        running_controller(tmp_path, state=server.tier()["url"]) as controller,
    ):
        refused = await controller.post_refused("/clear", 503, instance="a")
        assert "the leading controller ended before it answered" in refused["detail"]
        assert len(received) == 1


@pytest.mark.parametrize("answer", [nothing, never])
async def test_reading_is_repeated_at_the_next_leader(
    answer: Callable[[ByteStream], Awaitable[None]], tmp_path: Path, server: RedisServer
) -> None:
    async with (
        scripted_leader(server, answer) as received,
        running_controller(tmp_path, state=server.tier()["url"]) as controller,
        anyio.create_task_group() as tasks,
    ):

        async def read() -> None:
            assert await controller.get("/events") == {"events": []}

        tasks.start_soon(read)
        await until(lambda: received)
        server.command("DEL", LEASE)


async def test_answer_that_is_cut_off_is_not_repeated(
    tmp_path: Path, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        scripted_leader(server, a_part) as received,
        running_controller(tmp_path, state=server.tier()["url"]) as controller,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await controller.client.get("/events")
        assert len(received) == 1
    assert "Exception" not in caplog.text, "nor is another one begun"


async def test_query_is_forwarded(tmp_path: Path, server: RedisServer) -> None:
    async with two(tmp_path, server) as (_, second):
        assert (await second.client.get("/history", params={"span": "year"})).status_code == 422


async def test_one_that_has_restarted_sends_nothing_to_itself(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease still names its address: each request would go round in circles until that expires."""
    sent: list[str] = []

    async def exchange(_: standby.Forwarded, http: httpx.AsyncClient, url: str) -> None:
        sent.append(url)
        raise httpx.ConnectError("refused")

    address = f"127.0.0.1:{free_port()}"
    server.command("HSET", LEASE, "term", "7", "url", f"http://{address}")
    async with (
        running_controller(tmp_path, state=server.tier()["url"], listen=address) as controller,
        anyio.create_task_group() as tasks,
    ):

        async def read() -> None:
            assert await controller.get("/events") == {"events": []}

        monkeypatch.setattr(standby.Forwarded, "exchange", exchange)
        tasks.start_soon(read)
        await anyio.sleep(3 * standby.RETRY_SECONDS)
        server.command("DEL", LEASE)
    assert not sent


async def test_errors_are_those_of_the_leader(tmp_path: Path, server: RedisServer) -> None:
    async with two(tmp_path, server) as (first, second):
        for method, path, body in (
            ("GET", "/events/none", None),
            ("GET", "/nowhere?a=b%20c", None),
            ("POST", "/move", b"{}"),
            ("POST", "/clear", b'{"instance": "none"}'),
            ("DELETE", "/events", None),
            ("POST", "/pin", b"x" * (65 << 20)),
        ):
            answers = [await each.client.request(method, path, content=body) for each in (first, second)]
            assert answers[0].status_code == answers[1].status_code >= 400, path
            assert answers[0].content == answers[1].content
            assert len(answers[1].headers.get_list("date")) == 1


async def test_token_is_checked_by_each(tmp_path: Path, server: RedisServer) -> None:
    async with two(tmp_path, server, token=TOKEN) as (_, second):
        assert await second.get("/events") == {"events": []}
        async with httpx.AsyncClient(base_url=second.url, trust_env=False, verify=False) as client:
            assert (await client.get("/events")).status_code == 401
            assert (await client.get("/")).status_code == 200


async def test_requests_of_other_sites_are_not_forwarded(tmp_path: Path, server: RedisServer) -> None:
    async with two(tmp_path, server) as (_, second):
        foreign = {"Origin": "http://example.com"}
        assert (await second.client.post("/clear", json={}, headers=foreign)).status_code == 403
        own = {"Origin": second.url}
        assert (await second.client.post("/clear", json={}, headers=own)).status_code == 422


@pytest.mark.parametrize("target", ["@127.0.0.1:{port}/events", "http://127.0.0.1:{port}/events", "*"])
async def test_request_is_forwarded_to_the_leader_only(
    target: str, tmp_path: Path, server: RedisServer
) -> None:
    async with two(tmp_path, server) as (_, second), await anyio.create_tcp_listener() as elsewhere:
        port = elsewhere.extra(SocketAttribute.local_port)
        request = f"GET {target.format(port=port)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        reached = anyio.Event()

        async def accept(_: ByteStream) -> None:
            reached.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(elsewhere.serve, accept)
            async with await anyio.connect_tcp("127.0.0.1", second.port) as client:
                await client.send(request.encode())
                with anyio.fail_after(TIMEOUT_SECONDS):
                    assert (await client.receive()).startswith(b"HTTP/1.1 404")
            tasks.cancel_scope.cancel()
        assert not reached.is_set()


async def test_stream_is_forwarded_until_the_reader_leaves(tmp_path: Path, server: RedisServer) -> None:
    async with two(tmp_path, server) as (first, second), instance("a", first, second, ram=KEYS):
        async with second.client.stream("GET", "/stream") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            await until(lambda: first.events.listeners or first.controller.operations.events.listeners)
            accepted = await second.post("/clear", instance="a")
            async for line in response.aiter_lines():
                if line.startswith("data:") and accepted["event_id"] in line:
                    assert json.loads(line[5:])["kind"] == "clear"
                    break
        await until(lambda: not first.controller.operations.events.listeners)


async def test_request_that_is_stored_as_the_leader_stops_is_accepted(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        two(tmp_path, server) as (first, second),
        instance("a", first, second, ram=KEYS) as a,
        anyio.create_task_group() as tasks,
    ):
        state: Any = first.controller._state
        execute, opened = state._server.eval, anyio.Event()

        async def wait(*arguments: Any) -> Any:
            await opened.wait()
            return await execute(*arguments)

        async def clear() -> None:
            accepted = await first.post("/clear", instance="a")
            assert (await second.wait_for_end(accepted))["state"] == "done"

        monkeypatch.setattr(state._server, "eval", wait)
        tasks.start_soon(clear)
        await until(lambda: state._unsaved)
        await first.controller.finish()
        await until(lambda: not leads(first))
        opened.set()
    assert not a[0].held[RAM]


async def test_stream_ends_when_another_one_leads(tmp_path: Path, server: RedisServer) -> None:
    """Its reader would see the instances, but no operation of the next leader."""
    async with two(tmp_path, server) as (first, _), first.client.stream("GET", "/stream") as response:
        await first.controller.finish()
        with anyio.fail_after(TIMEOUT_SECONDS):
            await response.aread()


async def test_next_one_continues_when_the_leader_stops(tmp_path: Path, server: RedisServer) -> None:
    async with (
        two(tmp_path, server) as (first, second),
        instance("a", first, second, ram=KEYS) as a,
        instance("b", first, second) as b,
    ):
        b[0].before = gate = Gate()
        accepted = await first.post("/move", **A_TO_B)
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                # Forwarded to the first one until that stops, then answered here.
                assert (await second.wait_for_end(accepted))["state"] == "done"

            tasks.start_soon(wait)
            await gate.reached.wait()
            await first.controller.finish()
        assert leads(second)
        assert list(b[0].held[RAM]) == KEYS
        assert not a[0].held[RAM]


async def test_without_a_leader_requests_are_refused_and_lookups_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "WAIT_SECONDS", 0.2)
    with RedisServer(tmp_path) as server:
        state = server.tier()["url"]
        async with running_controller(tmp_path, state=state) as controller:
            await until(lambda: leads(controller))
            async with controller.instance("a", ram=KEYS):
                await anyio.to_thread.run_sync(server.kill)
                refused = await controller.post_refused("/pin", 503, instance="a", tier="ram", tokens=TOKENS)
                assert "does not answer, so the request cannot be stored: retry" in refused["detail"]
                await until(lambda: not leads(controller))
                refused = await controller.post_refused("/pin", 503, instance="a", tier="ram", tokens=TOKENS)
                assert "no controller leads: is the server that --state names reachable?" in refused["detail"]
                assert (await controller.client.get("/events")).headers["Retry-After"] == "1"
                assert await controller.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
                await anyio.to_thread.run_sync(server.start)
                await until(lambda: leads(controller))
                assert "a" in controller.registry.members
                await controller.done("/pin", instance="a", tier="ram", tokens=TOKENS)


async def test_bug_of_a_leader_ends_its_term_and_no_lookup(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "PAUSE_SECONDS", 0.1)
    async with running_controller(tmp_path, state=server.tier()["url"]) as controller:
        with monkeypatch.context() as patched:
            patched.setattr(serve, "Pins", lambda state: 1 / 0)
            await until(lambda: "ZeroDivisionError" in caplog.text)
            assert not leads(controller)
            assert (await controller.get("/healthz"))["status"] == "ok"
        await until(lambda: leads(controller))
        assert await controller.get("/events") == {"events": []}


async def test_one_may_start_before_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SETTLE_SECONDS", 3600.0)
    server = RedisServer(tmp_path)
    async with (
        running_controller(tmp_path, state=server.tier()["url"]) as controller,
        controller.instance("a", ram=KEYS),
    ):
        assert not leads(controller)
        # It may not know all instances yet, but there is nobody else to ask.
        assert await controller.held(tokens=TOKENS) == {"a": {"ram": len(TOKENS)}}
        with server:
            await until(lambda: leads(controller))
            assert await controller.get("/events") == {"events": []}
