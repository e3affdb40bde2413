"""Conversations over sockets, with identical results in native code and in Python."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kvtier import native
from kvtier.concurrency.sockets.connection import (
    BUFFER_BYTES,
    EXPECT,
    RECEIVE,
    SEND,
    Deadline,
    Operation,
    Progress,
    TLSConnection,
)
from kvtier.concurrency.sockets.executor import SMALL_BYTES, IoExecutor
from tests.rigs.certificates import make_certificate
from tests.rigs.tcp_server import connected

pytestmark = pytest.mark.usefixtures("implementation")

SECONDS = 60.0
LARGE = 4 * SMALL_BYTES


@contextmanager
def open_executor(max_threads: int = 2) -> Iterator[IoExecutor]:
    executor = IoExecutor(max_threads)
    try:
        yield executor
    finally:
        executor.close()


def get_operations(length: int) -> tuple[list[Operation], memoryview]:
    view = memoryview(bytearray(length))
    head = b"$%d\r\n" % length
    return [(SEND, [b"GET ", b"x\r\n"]), (EXPECT, [head]), (RECEIVE, [view]), (EXPECT, [b"\r\n"])], view


def test_expected_reply_is_received() -> None:
    operations, view = get_operations(5)
    with connected() as (connection, peer):
        peer.sendall(b"$5\r\nhello\r\n")
        assert connection.exchange(operations) == Progress(4)
        assert bytes(view) == b"hello"
        assert peer.recv(100) == b"GET x\r\n"
        assert not connection.buffered


@pytest.mark.parametrize("answer", [b"$-1\r\n", b"-ERR no\r\n", b"$6\r\nhello!\r\n", b"x"])
def test_unexpected_reply_stays_buffered(answer: bytes) -> None:
    operations, view = get_operations(5)
    with connected() as (connection, peer):
        peer.sendall(answer)
        assert connection.exchange(operations)[0::2] == (1, None)
        rest = memoryview(bytearray(len(answer)))
        connection.take(rest)
        assert bytes(rest) == answer
        assert bytes(view) == bytes(5)


def test_buffered_bytes_are_used_first() -> None:
    with connected() as (connection, peer):
        peer.sendall(b"+OK\r\n$5\r\nhello\r\n")
        assert connection.line() == b"+OK"
        operations, view = get_operations(5)
        assert connection.exchange(operations) == Progress(4)
        assert bytes(view) == b"hello"


def test_closed_connection_and_expired_deadline() -> None:
    operations, _ = get_operations(5)
    with connected() as (connection, peer):
        peer.sendall(b"$5\r\nhel")
        peer.shutdown(socket.SHUT_WR)
        progress = connection.exchange(operations)
        assert progress[:2] == (2, 3)
        assert isinstance(progress.error, ConnectionResetError)
    for seconds in (0.05, 0.0):
        with connected(seconds) as (connection, peer):
            progress = connection.exchange(operations[1:])
            assert progress[:2] == (0, 0)
            assert isinstance(progress.error, TimeoutError)


def test_send_fails_if_peer_has_closed_and_does_not_read() -> None:
    """Detected immediately. The window stays closed, so TCP itself would only time out much later."""
    with connected() as (connection, peer):
        peer.shutdown(socket.SHUT_WR)
        progress = connection.exchange([(SEND, [bytes(64 << 20)])])
        assert isinstance(progress.error, ConnectionError)


def test_send_over_tls_fails_if_peer_has_closed_and_does_not_read(tmp_path: Path) -> None:
    files = make_certificate(tmp_path / "certificate")
    client_context = ssl.create_default_context(cafile=files.certificate)
    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(files.certificate, files.key)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        accepted = pool.submit(lambda: server_context.wrap_socket(listener.accept()[0], server_side=True))
        connection = TLSConnection(socket.AF_INET, client_context, "127.0.0.1")
        stack.callback(connection.close)
        stack.enter_context(Deadline(SECONDS).bounds(connection))
        connection.connect(listener.getsockname())
        peer = stack.enter_context(accepted.result())
        socket.socket.shutdown(peer, socket.SHUT_WR)
        progress = connection.exchange([(SEND, [bytes(64 << 20)])])
        assert isinstance(progress.error, ConnectionResetError)


def test_any_pieces_and_any_replies() -> None:
    """Progress, received views and buffered rest match, for any expectations."""
    noise = random.Random(5)
    for _ in range(150):
        script = noise.randbytes(noise.randrange(1, 3000))
        offsets = sorted(noise.choices(range(len(script) + 1), k=4))
        expected: list[bool] = []
        views: list[tuple[int, memoryview]] = []
        operations: list[Operation] = []
        for start, stop in zip([0, *offsets], [*offsets, len(script)], strict=True):
            if noise.random() < 0.5:
                expectation = bytearray(script[start:stop])
                if expectation and noise.random() < 0.3:
                    expectation[noise.randrange(len(expectation))] ^= 1
                operations.append((EXPECT, [bytes(expectation)]))
                expected.append(bytes(expectation) == script[start:stop])
            else:
                views.append((start, memoryview(bytearray(stop - start))))
                operations.append((RECEIVE, [views[-1][1][:7], views[-1][1][7:]]))
                expected.append(True)
        completed = expected.index(False) if False in expected else len(expected)
        with connected() as (connection, peer):
            sender = threading.Thread(target=partial(send_in_pieces, peer, script, noise.random()))
            sender.start()
            progress = connection.exchange(operations)
            received = sum(len(buffer) for _, buffers in operations[:completed] for buffer in buffers)
            rest = memoryview(bytearray(len(script) - received))
            connection.take(rest)
            sender.join()
        assert progress[0::2] == (completed, None)
        assert rest == script[received:]
        for start, view in views:
            stop = start + len(view)
            assert view == (script[start:stop] if stop <= received else bytes(len(view)))


def send_in_pieces(peer: socket.socket, script: bytes, seed: float) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    noise = random.Random(seed)
    while script:
        length = noise.randrange(1, len(script) + 1)
        peer.sendall(script[:length])
        script = script[length:]


# In the event loop, and in threads.


@pytest.mark.anyio
@pytest.mark.parametrize("length", [5, SMALL_BYTES - 100, LARGE])
async def test_converse_in_event_loop(length: int) -> None:
    operations, view = get_operations(length)
    with connected() as (connection, peer), open_executor() as executor:
        task = asyncio.ensure_future(executor.converse(connection, operations))
        assert await anyio.to_thread.run_sync(peer.recv, 7, socket.MSG_WAITALL) == b"GET x\r\n"
        value = bytes([7]) * length
        await anyio.to_thread.run_sync(partial(send_in_pieces, peer, b"$%d\r\n%b\r\n" % (length, value), 0.5))
        assert await task == Progress(4)
        assert view == value


@pytest.mark.anyio
@pytest.mark.parametrize("length", [5, LARGE])
@pytest.mark.parametrize("halves", [(b"$", b"-1\r\n"), (b"$-1\r\n", b""), (b"-", b"ERR no\r\n")])
async def test_unexpected_reply_in_two_pieces(length: int, halves: Sequence[bytes]) -> None:
    operations, _ = get_operations(length)
    with connected() as (connection, peer), open_executor() as executor:
        task = asyncio.ensure_future(executor.converse(connection, operations))
        for half in halves:
            peer.sendall(half)
            await anyio.lowlevel.checkpoint()
        progress = await task
        assert progress[0::2] == (1, None)
        assert await anyio.to_thread.run_sync(connection.line) == b"".join(halves)[:-2]


@pytest.mark.anyio
@pytest.mark.parametrize("length", [5, LARGE])
async def test_converse_ends_at_deadline(length: int) -> None:
    operations, _ = get_operations(length)
    with connected(0.5) as (connection, _peer), open_executor() as executor:
        progress = await executor.converse(connection, operations)
        assert progress[:2] == (1, 0)
        assert isinstance(progress.error, OSError)


@pytest.mark.anyio
@pytest.mark.parametrize("length", [5, LARGE])
async def test_converse_fails_if_peer_has_closed_and_does_not_read(length: int) -> None:
    """Write until the kernel accepts no more: how much it buffers is not specified."""

    async def write_until_blocked() -> Progress:
        while (progress := await executor.converse(connection, [(SEND, [bytes(length)])])) == Progress(1):
            await anyio.lowlevel.checkpoint()
        return progress

    with connected() as (connection, peer), open_executor() as executor:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.socket(fileno=os.dup(connection.fileno())) as sender, suppress(BlockingIOError):
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            while True:
                sender.send(bytes(1 << 20), socket.MSG_DONTWAIT)
        task = asyncio.ensure_future(write_until_blocked())
        await anyio.sleep(0.05)
        peer.shutdown(socket.SHUT_WR)
        with anyio.fail_after(SECONDS):
            progress = await task
        assert progress.operations == 0
        assert isinstance(progress.error, ConnectionError)


@pytest.mark.anyio
@pytest.mark.parametrize("length", [5, LARGE])
async def test_cancelled_converse_writes_nothing_later(length: int) -> None:
    """Cancels without delay, and writes nothing afterwards."""
    operations, view = get_operations(length)
    with connected() as (connection, peer), open_executor() as executor:
        task = asyncio.ensure_future(executor.converse(connection, operations))
        await anyio.to_thread.run_sync(peer.recv, 7, socket.MSG_WAITALL)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert connection.exchange([(RECEIVE, [view])]).error is not None
        assert view == bytes(length)


@pytest.mark.anyio
async def test_more_conversations_than_threads() -> None:
    with ExitStack() as stack:
        executor = stack.enter_context(open_executor(2))
        pairs = [stack.enter_context(connected()) for _ in range(12)]
        requests = [get_operations(LARGE) for _ in pairs]
        tasks = [
            asyncio.ensure_future(executor.converse(connection, operations))
            for (connection, _), (operations, _) in zip(pairs, requests, strict=True)
        ]
        answer = b"$%d\r\n%b\r\n" % (LARGE, bytes([3]) * LARGE)
        for _, peer in pairs:
            await anyio.to_thread.run_sync(peer.sendall, answer)
        assert [await task for task in tasks] == [Progress(4)] * len(pairs)
        assert all(view == bytes([3]) * LARGE for _, view in requests)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# Native code only.


def test_unknown_operations_are_refused(implementation: str) -> None:
    if implementation == "python":
        pytest.skip("only native code checks its arguments")
    with connected() as (connection, _):
        scratch = bytearray(BUFFER_BYTES)
        unknown: list[list[Operation]] = [
            [(3, [b""])],
            [(-1, [b""])],
            [(EXPECT, [])],
            [(EXPECT, [b"a", b"b"])],
        ]
        for operations in unknown:
            with pytest.raises(ValueError, match="no such operation"):
                native.core.exchange(connection.fileno(), operations, scratch, 1)
        with pytest.raises(BufferError):
            native.core.exchange(connection.fileno(), [(RECEIVE, [b"read-only"])], scratch, 1)
        with pytest.raises(BufferError):
            native.core.exchange(connection.fileno(), [(SEND, [memoryview(b"abcd")[::2]])], scratch, 1)
    assert native.core.exchange(-1, [(SEND, [b"x"])], scratch, 1)[2] == errno.EBADF
