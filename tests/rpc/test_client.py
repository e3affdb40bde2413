"""The synchronous client with a scripted server on a Unix socket: no error of the server blocks or raises."""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ChannelClosed, ChannelError, ProtocolError, Rejected
from kvtier.rpc import client
from kvtier.rpc.calls import MAX_CALLS, Call
from kvtier.rpc.client import Client, UnixConnection
from kvtier.rpc.frames import Pong, Refused
from kvtier.rpc.wire import MAX_UNSENT_BYTES
from tests.rigs.open_files import open_files
from tests.rigs.scripted_server import ScriptedServer
from tests.rigs.waiting import wait_until
from tests.rpc.endpoints import Answer, Ask, Hello, Note, Welcome, decode

VERSION = 3


def connect(path: Path) -> UnixConnection[Welcome]:
    return UnixConnection(path, Hello(VERSION), Welcome, VERSION, decode, "the server")


class Caller(Client[Welcome]):
    """A client that records what it receives."""

    def __init__(self, path: Path) -> None:
        self.starts = 0
        self.losses = 0
        self.received: list[Any] = []
        super().__init__(path, "the server", self._count_start, None)

    def _count_start(self) -> None:
        self.starts += 1

    def _open(self) -> UnixConnection[Welcome]:
        return connect(self._path)

    def _connected(self, connection: UnixConnection[Welcome]) -> None:
        assert connection.welcome == Welcome(VERSION)

    def _lost(self) -> None:
        self.losses += 1

    def _receive(self, message: Any) -> None:
        self.received.append(message)

    def ask(self, text: str) -> Call[str]:
        call = self.call("questions", lambda ticket: Ask(ticket, text), Answer, lambda answer: answer.text)
        assert call is not None
        return call

    def wait_until_lost(self) -> None:
        wait_until(lambda: (self.poll(), not self.connected)[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def server(path: Path) -> Iterator[ScriptedServer]:
    instance = ScriptedServer(path, decode)
    yield instance
    instance.close()


@contextmanager
def calling(path: Path) -> Iterator[Caller]:
    caller = Caller(path)
    try:
        yield caller
    finally:
        caller.close()


@pytest.fixture
def caller(path: Path, server: ScriptedServer) -> Iterator[Caller]:
    """A client that is connected to the server."""
    with calling(path) as instance:
        greet(instance, server)
        yield instance


def greet(caller: Caller, server: ScriptedServer) -> None:
    assert not caller.ready(), "it waited for the welcome"
    server.accept()
    assert server.receive(Hello) == Hello(VERSION)
    server.send(Welcome(VERSION))
    wait_until(caller.ready)


# The greeting.


def test_descriptor_comes_with_the_welcome(path: Path, server: ScriptedServer) -> None:
    before = open_files()
    connection = connect(path)
    server.accept()
    with (path.parent / "file").open("w+") as file:
        file.write("hello")
        file.flush()
        server.send(Welcome(VERSION), Note(b"1"), fds=[file.fileno()])
    assert connection.await_welcome(10) == [Note(b"1")]
    assert connection.welcome == Welcome(VERSION)
    with os.fdopen(connection.take_fd()) as received:
        received.seek(0)
        assert received.read() == "hello"
    with pytest.raises(ProtocolError, match="the server sent no file descriptor"):
        connection.take_fd()
    connection.close()
    server.disconnect()
    assert open_files() == before


def test_descriptor_that_is_not_taken_is_closed(path: Path, server: ScriptedServer) -> None:
    before = open_files()
    connection = connect(path)
    server.accept()
    server.send(Welcome(VERSION), fds=[0])
    connection.await_welcome(10)
    connection.close()
    server.disconnect()
    assert open_files() == before


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (Refused("not today"), Rejected, "the server rejects this process: not today"),
        (
            Welcome(4),
            ProtocolError,
            "the server: the client speaks .* 3 and the server version 4: install the same",
        ),
        (Note(b""), ProtocolError, "the server: the first message is Note, not Welcome"),
    ],
    ids=["refused", "version", "message"],
)
def test_other_greetings(
    path: Path,
    server: ScriptedServer,
    reply: Any,
    error: type[ChannelError],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection = connect(path)
    server.accept()
    server.send(reply)
    with pytest.raises(error, match=text):
        connection.await_welcome(10)
    with calling(path) as caller:
        assert not caller.ready()
        server.accept()
        server.send(reply)
        wait_until(lambda: (caller.ready(), "the server is not connected" in caplog.text)[1])
        assert not caller.connected


def test_await_welcome_times_out_and_closes_connection(path: Path, server: ScriptedServer) -> None:
    connection = connect(path)
    with pytest.raises(ChannelClosed, match=r"the server does not answer on .*: no welcome within 0.05 s"):
        connection.await_welcome(0.05)
    server.accept()
    assert server.receive(Hello)
    assert server.is_disconnected()


def test_listener_that_sends_no_welcome_does_not_block(
    path: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GREETING_SECONDS", 0.05)
    with calling(path) as caller:
        monkeypatch.setattr(caller, "wait", lambda *_: pytest.fail("it blocks"))
        assert not caller.ready()
        server.accept()
        before = open_files()
        assert not caller.ready()
        assert open_files() == before, "one attempt at a time"
        assert caller.starts == 0
        wait_until(lambda: (caller.ready(), caller.starts == 1)[1])
        assert server.receive(Hello)
        assert not caller.accepts_requests
        caller.retry_now()
        greet(caller, server)


def test_full_backlog_does_not_block(path: Path) -> None:
    """A blocking connect(2) would wait for room in the backlog."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(0)
    callers = [Caller(path) for _ in range(8)]
    assert not any(caller.ready() for caller in callers)
    assert any(caller.starts for caller in callers), "the backlog is not full"
    for caller in callers:
        caller.close()
    listener.close()


def test_missing_server_is_reported_and_retried_rarely(path: Path) -> None:
    with calling(path) as caller:
        with pytest.raises(ChannelError, match="the server does not answer on"):
            caller.connect()
        started = time.monotonic()
        while time.monotonic() < started + 0.3:
            assert not caller.accepts_requests
        assert caller.starts == 1
        caller.retry_now()
        assert not caller.ready()
        assert caller.starts == 2


def test_lack_of_descriptors_is_not_an_exception(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with calling(path) as caller, monkeypatch.context() as patch:
        patch.setattr(client.socket, "socket", fail)
        assert not caller.ready()
        with pytest.raises(ChannelError, match=r"cannot connect to the server: .*Too many open files"):
            caller.connect()


def test_descriptors_beyond_a_thousand(path: Path, server: ScriptedServer) -> None:
    """``select.select`` would raise ``ValueError`` for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    descriptors = [os.dup(0)]
    try:
        while descriptors[-1] < 1024:
            descriptors.append(os.dup(0))
        with calling(path) as caller:
            greet(caller, server)
            call = caller.ask("hello")
            server.send(Answer(server.receive(Ask).ticket, "HELLO"))
            assert caller.await_reply(call, 10) == "HELLO"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Calls.


def test_late_reply_finds_its_call(caller: Caller, server: ScriptedServer) -> None:
    first, second = caller.ask("1"), caller.ask("2")
    assert caller.await_reply(first, 0.002) is None
    assert caller.late
    waited = caller.waited
    assert caller.await_reply(second, 60) is None
    assert caller.waited == waited, "no second wait"
    server.send(Answer(second.ticket, "two"), Answer(first.ticket, "one"))
    wait_until(lambda: (caller.poll(), first.settled)[1])
    assert not caller.late
    assert (caller.await_reply(first, 0), caller.await_reply(second, 0)) == ("one", "two")
    assert len(caller.calls) == 0


def test_further_replies_have_no_call(caller: Caller, server: ScriptedServer) -> None:
    call = caller.ask("hello")
    server.send(Answer(call.ticket, "one"), Answer(call.ticket, "two"), Note(b"3"))
    wait_until(lambda: (caller.poll(), len(caller.received) == 3)[1])
    assert call.result == "one"
    assert caller.received == [Answer(call.ticket, "one"), Answer(call.ticket, "two"), Note(b"3")]


def test_waits_end_with_the_connection(caller: Caller, server: ScriptedServer) -> None:
    call = caller.ask("hello")
    server.disconnect()
    started = time.monotonic()
    assert caller.await_reply(call, 60) is None
    assert time.monotonic() < started + 30
    assert isinstance(call.error, ChannelClosed)
    assert caller.losses == 1
    assert not caller.send(Note(b""))
    assert caller.call("questions", lambda ticket: Ask(ticket, ""), Answer, lambda *_: None) is None


def test_wrong_reply_ends_the_connection(
    caller: Caller, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    call = caller.call("questions", lambda ticket: Ask(ticket, ""), Pong, lambda *_: None)
    assert call is not None
    server.send(Answer(call.ticket, "hello"))
    caller.wait_until_lost()
    assert isinstance(call.error, ProtocolError)
    assert "the other side answers questions with Answer: continuing without" in caplog.text


def test_refusal_is_known_even_if_the_connection_is_closed_before_it_is_read(
    path: Path, server: ScriptedServer
) -> None:
    connection = connect(path)
    server.accept()
    server.send(Refused("not today"))
    server.disconnect()
    with pytest.raises(Rejected, match="not today"):
        connection.send(Ask(1, "hello"))
    connection.close()


def test_later_refusal_ends_the_connection(
    caller: Caller, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    call = caller.ask("hello")
    server.send(Refused("not this"))
    caller.wait_until_lost()
    assert call.error is not None
    assert "the server rejects this process: not this" in caplog.text


def test_unanswered_calls_are_limited(caller: Caller) -> None:
    for _ in range(MAX_CALLS):
        caller.ask("")
    assert caller.call("questions", lambda ticket: Ask(ticket, ""), Answer, lambda *_: None) is None
    assert caller.connected


def test_unresponsive_server_gets_no_requests_until_it_answers(
    caller: Caller, server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caller.expect_answers_within(0.05)
    caller.update()
    assert caller.accepts_requests
    call = caller.ask("hello")
    wait_until(lambda: (caller.update(), not caller.responsive)[1])
    assert caller.connected
    assert not caller.accepts_requests
    started = time.monotonic()
    assert caller.await_reply(call, 60) is None
    assert time.monotonic() < started + 30
    server.send(Answer(call.ticket, "HELLO"))
    wait_until(lambda: caller.accepts_requests)
    assert call.result == "HELLO"
    assert caplog.text.count("the server has not answered for") == 1
    assert "(open: 1 questions)" in caplog.text
    assert caplog.text.count("the server answers again") == 1


def test_server_that_never_reads_is_congested_and_then_disconnected(caller: Caller) -> None:
    note = Note(bytes(1 << 20))
    while caller.accepts_requests:
        assert caller.send(note)
    assert caller.connected
    for _ in range(2 + MAX_UNSENT_BYTES // len(note.data)):
        caller.send(note)
    assert not caller.connected


def test_congestion_ends_when_the_server_reads(caller: Caller, server: ScriptedServer) -> None:
    sent = 0
    while caller.accepts_requests:
        caller.send(Note(bytes(1 << 18)))
        sent += 1
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [server.receive(Note) for _ in range(sent)])
        wait_until(lambda: (caller.poll(), caller.accepts_requests)[1])
        assert len(reading.result(10)) == sent


# Reconnecting.


def test_lost_connection_is_replaced(caller: Caller, server: ScriptedServer) -> None:
    call = caller.ask("hello")
    server.disconnect()
    caller.wait_until_lost()
    assert call.error is not None
    greet(caller, server)
    assert caller.losses == 1
    call = caller.ask("again")
    assert server.receive(Ask) == Ask(call.ticket, "again")
    server.send(Answer(call.ticket, "AGAIN"))
    assert caller.await_reply(call, 10) == "AGAIN"


def test_closed_client_does_not_reconnect(path: Path, server: ScriptedServer) -> None:
    before = open_files()
    with calling(path) as caller:
        greet(caller, server)
        call = caller.ask("hello")
        caller.close()
        assert isinstance(call.error, ChannelClosed)
        assert not caller.ready()
        caller.update()
        assert not caller.accepts_requests
        assert server.receive(Ask)
        assert server.is_disconnected()
        caller.close()
    server.disconnect()
    assert open_files() == before


def test_client_that_is_closed_while_greeting_leaves_nothing(path: Path, server: ScriptedServer) -> None:
    before = open_files()
    with calling(path) as caller:
        assert not caller.ready()
    server.accept()
    assert server.receive(Hello)
    assert server.is_disconnected()
    server.disconnect()
    assert open_files() == before
