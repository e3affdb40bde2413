"""The transport ``tcp`` and those that do not keep to its protocol, or to any pace."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kvtier.backends.base import Outcome
from kvtier.sockets.connection import Connection, Deadline
from kvtier.sockets.waiting import MOMENT_SECONDS
from kvtier.testing.backend import is_stained
from kvtier.testing.relay import Relay
from kvtier.testing.transport_pair import fill, holds, until
from kvtier.testing.transport_side import MIB, Certificate, Side, dial_to, pattern
from kvtier.transports.base import Access, Link, RemoteSpan
from kvtier.transports.tcp import TcpTransport
from kvtier.transports.tcp.wire import RequestReader, answer_bytes, encode_answer, encode_request
from tests.backends.certificates import make_certificate

pytestmark = pytest.mark.anyio

OK, FAILED = Outcome.OK, Outcome.FAILED
SHORT = 0.4
LONG = 60.0


@asynccontextmanager
async def side(
    deadline: float = LONG, capacity: int = 40 * MIB, proof: Certificate | None = None, **settings: int
) -> AsyncIterator[Side]:
    raw = {"type": "tcp", "deadline": deadline, **settings}
    async with Side.open(TcpTransport, raw, capacity, proof) as opened:
        yield opened


@asynccontextmanager
async def linked(to: Side, port: int | None = None, proof: Certificate | None = None) -> AsyncIterator[Link]:
    link = await to.transport.connect(to.transport.endpoint, dial_to(port or to.port, proof))
    try:
        yield link
    finally:
        await link.close()


@contextmanager
def stranger(to: Side) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", to.port)) as connected:
        connected.settimeout(30)
        yield connected


async def received(connected: socket.socket, length: int) -> bytes:
    data = await anyio.to_thread.run_sync(connected.recv, length, socket.MSG_WAITALL)
    assert isinstance(data, bytes)
    return data


async def assert_serves(served: Side, proof: Certificate | None = None) -> None:
    """Somebody else is served as if nothing had happened."""
    (span,) = served.grants.grant([5000], Access.READ, 3)
    async with linked(served, proof=proof) as link:
        view = memoryview(bytearray(5000))
        with anyio.fail_after(30):
            assert list(await link.read([(span, view)])) == [OK]
    assert view == pattern(3, 5000)


async def closed_by_peer(connected: socket.socket) -> bool:
    """Wait until the other side has closed the connection, whatever it said before."""

    def drain() -> bool:
        try:
            while connected.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
        return True

    return await anyio.to_thread.run_sync(drain)


# Who asks.


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n",
        b"\0" * 100,
        b"\xff" * 100_000,
        pattern(1, 5000),
        encode_request(Access.READ, []),
        encode_request(Access.READ, [RemoteSpan(1, 2, 1 << 63)]),
        encode_request(Access.WRITE, [RemoteSpan(1, 2, (1 << 64) - 1)] * 5),
        encode_request(Access.READ, [RemoteSpan(1, 2, 3)]) + b"and more",
    ],
)
async def test_garbage_ends_the_connection(garbage: bytes) -> None:
    async with side() as served:
        with stranger(served) as connected:
            connected.sendall(garbage)
            assert await closed_by_peer(connected)
        assert served.lent == 0
        await assert_serves(served)


async def test_half_a_request() -> None:
    """Who says half of it is not waited for; who says nothing is."""
    async with side(deadline=SHORT) as served:
        (span,) = served.grants.grant([5000], Access.READ, 1)
        request = encode_request(Access.READ, [span])
        with stranger(served) as silent, stranger(served) as connected:
            connected.sendall(request[:-1])
            assert await closed_by_peer(connected)
            silent.sendall(request)
            answer = await received(silent, answer_bytes(1) + 5000)
            assert answer[answer_bytes(1) :] == pattern(1, 5000)
        await until(lambda: served.lent == 0)


async def test_half_of_what_is_to_be_written() -> None:
    async with side(deadline=SHORT) as served:
        (span,) = served.grants.grant([MIB], Access.WRITE, 1)
        with stranger(served) as connected:
            connected.sendall(encode_request(Access.WRITE, [span]) + bytes(1000))
            await until(lambda: served.lent == 1)
            assert await closed_by_peer(connected)
        await until(lambda: served.lent == 0)
        await assert_serves(served)


async def test_who_leaves_in_the_middle() -> None:
    async with side() as served:
        readable, writable = (
            served.grants.grant([16 * MIB], access, 1)[0] for access in (Access.READ, Access.WRITE)
        )
        for request in (
            encode_request(Access.READ, [readable]),
            encode_request(Access.WRITE, [writable]) + bytes(100_000),
        ):
            with stranger(served) as connected:
                connected.sendall(request)
                await until(lambda: served.lent == 1)
            await until(lambda: served.lent == 0)
        await assert_serves(served)


@pytest.mark.parametrize("secured", [False, True])
async def test_who_closes_with_its_window_shut(tmp_path: Path, *, secured: bool) -> None:
    """Its end is acknowledged, and nothing else ever is: no error comes before the kernel's patience ends."""
    proof = None
    if secured:
        files = make_certificate(tmp_path / "certificate")
        proof = Certificate(str(files.certificate), str(files.key))
    async with side(proof=proof) as served:
        (span,) = served.grants.grant([16 * MIB], Access.READ, 1)
        connection = await anyio.to_thread.run_sync(dial_to(served.port, proof), Deadline(LONG))
        connection.deadline = Deadline(LONG)
        connection.send([encode_request(Access.READ, [span])])
        await until(lambda: served.lent == 1)
        # The thread that sends has left the socket to the loop.
        await anyio.sleep(3 * MOMENT_SECONDS)
        with connection.detach() as closing:
            socket.socket.shutdown(closing, socket.SHUT_WR)
            await until(lambda: served.lent == 0)
        await assert_serves(served, proof)


async def test_who_does_not_read_takes_no_thread() -> None:
    """Many that ask and do not read: others are served meanwhile, and in time they are cut off."""
    async with side(deadline=3.0, threads=2) as served:
        (span,) = served.grants.grant([16 * MIB], Access.READ, 1)
        strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(12)]
        for connected in strangers:
            connected.sendall(encode_request(Access.READ, [span]))
        await until(lambda: served.lent == len(strangers))
        await assert_serves(served)
        assert served.lent > 0
        await until(lambda: served.lent == 0)
        for connected in strangers:
            connected.close()
        await assert_serves(served)


async def test_who_reads_slowly_gets_all() -> None:
    async with side() as served:
        size = 12 * MIB
        (span,) = served.grants.grant([size], Access.READ, 1)
        with stranger(served) as connected:
            connected.sendall(encode_request(Access.READ, [span]))
            data = bytearray()
            while len(data) < answer_bytes(1) + size:
                data += await received(connected, min(MIB, answer_bytes(1) + size - len(data)))
                await anyio.sleep(0.03)
        assert await holds(memoryview(data)[answer_bytes(1) :], 1)
        await until(lambda: served.lent == 0)


async def test_idle_connections_need_no_threads() -> None:
    async with side() as served:
        before = threading.active_count()
        strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
        await assert_serves(served)
        assert threading.active_count() < before + 25
        for connected in strangers:
            connected.close()


async def test_requests_that_come_at_once_are_answered_in_their_order() -> None:
    async with side() as served:
        spans = served.grants.grant([3000] * 30, Access.READ, 0)
        (target,) = served.grants.grant([3000], Access.WRITE, 50)
        with stranger(served) as connected:
            reads = [encode_request(Access.READ, [span]) for span in spans]
            write = encode_request(Access.WRITE, [target]) + pattern(99, 3000)
            connected.sendall(b"".join([*reads[:20], write, *reads[20:]]))
            for index in range(20):
                answer = await received(connected, answer_bytes(1) + 3000)
                assert answer == encode_answer(Access.READ, [True]) + pattern(index, 3000)
            assert await received(connected, answer_bytes(1)) == encode_answer(Access.WRITE, [True])
            for index in range(20, 30):
                answer = await received(connected, answer_bytes(1) + 3000)
                assert answer == encode_answer(Access.READ, [True]) + pattern(index, 3000)
        assert bytes(served.arena.view(target.offset, 3000)) == pattern(99, 3000)


# Who answers.


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that treats each connection so; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            with connected:
                answer(connected)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def say(answer: bytes, connected: socket.socket) -> None:
    connected.recv(1 << 16)
    connected.sendall(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100,
        b"\xff" * 200,
        encode_answer(Access.WRITE, [True]) + bytes(100),
        encode_answer(Access.READ, [True, True]) + bytes(100),
        encode_answer(Access.READ, [True])[:8] + b"\x07" + bytes(100),
    ],
)
async def test_an_answer_that_is_none(answer: bytes) -> None:
    """Failed long before the deadline: asking again does not mend that."""
    async with side() as here:
        with answering(partial(say, answer)) as port:
            async with linked(here, port) as link:
                view = here.arena.view(0, 5000)
                with anyio.fail_after(30):
                    assert list(await link.read([(RemoteSpan(1, 0, 5000), view)])) == [FAILED]
                assert is_stained(view)
                del view


async def test_nobody_listens() -> None:
    async with side() as here:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        async with linked(here, port) as link:
            with anyio.fail_after(30):
                for _ in range(2):
                    item = (RemoteSpan(1, 0, 500), memoryview(bytearray(500)))
                    assert list(await link.read([item] * 3)) == [FAILED] * 3


async def test_goes_on_at_the_byte_where_it_stopped() -> None:
    """A peer whose every connection breaks after a thousand bytes."""
    content = pattern(1, 20_000)
    asked: list[RemoteSpan] = []

    def answer(connected: socket.socket) -> None:
        reader = RequestReader()
        while (request := reader.next()) is None:
            data = connected.recv(1 << 16)
            if not data:
                return
            reader.feed(data)
        asked.extend(request.spans)
        payload = b"".join(content[span.offset : span.offset + span.length] for span in request.spans)
        connected.sendall(encode_answer(Access.READ, [True] * len(request.spans)) + payload[:1000])
        # Closed with a request unread, what was sent would be lost.
        connected.shutdown(socket.SHUT_WR)
        while connected.recv(1 << 16):
            pass

    async with side(connections=1) as here:
        with answering(answer) as port:
            async with linked(here, port) as link:
                views = [memoryview(bytearray(length)) for length in (300, 4100, 1, 0, 2500)]
                offsets = [17, 5000, 19_999, 3, 700]
                items = [
                    (RemoteSpan(7, offset, len(view)), view)
                    for offset, view in zip(offsets, views, strict=True)
                ]
                with anyio.fail_after(30):
                    assert list(await link.read(items)) == [OK] * 5
    for offset, view in zip(offsets, views, strict=True):
        assert view == content[offset : offset + len(view)]
    assert RemoteSpan(7, 5700, 3400) in asked


async def test_reading_and_writing_over_one_connection() -> None:
    """Neither side waits for the other to take what it sends."""
    async with side(connections=1, capacity=80 * MIB) as served:
        (source,) = served.grants.grant([16 * MIB], Access.READ, 1)
        (target,) = served.grants.grant([16 * MIB], Access.WRITE, 2)
        async with linked(served) as link:
            fetched, sent = (memoryview(bytearray(16 * MIB)) for _ in range(2))
            await fill(sent, 5)
            outcomes: list[Outcome] = []

            async def read() -> None:
                outcomes.extend(await link.read([(source, fetched)]))

            async def write() -> None:
                outcomes.extend(await link.write([(sent, target)]))

            with anyio.fail_after(30):
                for _ in range(3):
                    async with anyio.create_task_group() as tasks:
                        for call in (read, write, read, write):
                            tasks.start_soon(call)
        assert outcomes == [OK] * 12
        assert await holds(fetched, 1)
        assert await holds(served.arena.view(target.offset, 16 * MIB), 5)


async def test_closing_while_connecting() -> None:
    """A peer that does not answer keeps nobody from leaving."""
    waiting = threading.Event()

    def dial(deadline: Deadline) -> Connection:
        connection = Connection(socket.AF_INET)
        try:
            with deadline.bounds(connection), socket.create_server(("127.0.0.1", 0)) as listener:
                connection.connect(listener.getsockname())
                waiting.set()
                connection.take(memoryview(bytearray(1)))
        except BaseException:
            connection.close()
            raise
        return connection

    async with side() as here:
        link = await here.transport.connect(here.transport.endpoint, dial)
        with anyio.move_on_after(0.2):
            await link.read([(RemoteSpan(1, 0, 10), memoryview(bytearray(10)))])
        assert waiting.is_set()
        began = time.monotonic()
        await link.close()
        assert time.monotonic() - began < 10


async def test_what_dials_may_have_faults(caplog: pytest.LogCaptureFixture) -> None:
    """Told once, and the batch fails by its deadline."""

    def dial(_: Deadline) -> Connection:
        raise ZeroDivisionError("a fault")

    async with side(deadline=SHORT) as here:
        link = await here.transport.connect(here.transport.endpoint, dial)
        assert list(await link.read([(RemoteSpan(1, 0, 1), memoryview(bytearray(1)))])) == [FAILED]
        await link.close()
    assert "a fault" in caplog.text


async def test_views_and_spans_must_be_equally_long() -> None:
    async with side() as here, linked(here) as link:
        with pytest.raises(ValueError, match="5000"):
            await link.read([(RemoteSpan(1, 0, 5000), memoryview(bytearray(10)))])


@pytest.mark.parametrize("ends", ["cut", "deadline", "cancelled"])
async def test_nothing_waits_to_be_collected(ends: str) -> None:
    """Who closes an arena gets its memory back, however a transfer has ended."""

    async def once() -> None:
        async with side(deadline=SHORT) as served, side(deadline=SHORT) as here:
            (span,) = await anyio.to_thread.run_sync(served.grants.grant, [32 * MIB], Access.READ, 1)
            with Relay.to(served.port) as relay:
                async with linked(here, relay.port) as link:
                    relay.hold_after(MIB)
                    call = asyncio.ensure_future(link.read([(span, here.arena.view(0, 32 * MIB))]))
                    await until(lambda: relay.is_holding)
                    if ends == "cut":
                        relay.cut()
                    elif ends == "cancelled":
                        call.cancel()
                    await asyncio.wait([call])
                    assert call.cancelled() or list(call.result()) == [FAILED]
                    del call

    def arenas() -> int:
        return Path("/proc/self/maps").read_text().count("kvtier-arena")

    gc.collect()
    before = arenas()
    gc.disable()
    try:
        await once()
        await until(lambda: arenas() <= before)
    finally:
        gc.enable()
