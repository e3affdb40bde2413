"""The HTTP server without file descriptors."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from kvtier.http import MAX_ACCEPTED, REFUSAL, _Listener

WITHOUT_DESCRIPTORS = """
import logging, os, resource, socket
import anyio
from kvtier.http import serving
from tests.test_http import get, hello

async def main():
    async with serving(hello, "127.0.0.1:0") as address:
        clients = [socket.socket() for _ in range(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        descriptors = []
        try:
            while True:
                descriptors.append(os.dup(0))
        except OSError:
            pass
        for client in clients:
            client.setblocking(False)
            client.connect_ex(address)
        with anyio.fail_after(60):
            for client in clients:
                await anyio.wait_readable(client)
                assert client.recv(100).startswith(b"HTTP/1.1 503 ")
        for descriptor in descriptors:
            os.close(descriptor)
        assert (await get(address)).text == "hello"

logging.basicConfig(format="%(levelname)s %(message)s")
anyio.run(main)
"""


def test_connections_without_descriptors_are_closed_at_once() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "refuses connections: Too many open files: raise this process's limit (ulimit -n" in result.stderr


def test_refusing_connections_leaves_time_for_open_ones() -> None:
    """A client that connects again and again would otherwise keep the event loop from everything else."""
    with ExitStack() as stack:
        bound = socket.create_server(("127.0.0.1", 0), backlog=256)
        listener = stack.enter_context(_Listener(bound, 1, REFUSAL))
        listener.setblocking(False)
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(150)]
        stack.enter_context(listener.accept()[0])
        with pytest.raises(BlockingIOError):
            listener.accept()
        refused, _, _ = select.select(clients, [], [], 0)
        assert len(refused) == MAX_ACCEPTED - 1
        assert all(client.recv(1000) == REFUSAL for client in refused)
