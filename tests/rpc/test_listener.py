from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from kvtier.rpc.listener import accept_all
from tests.rigs.waiting import until

WITHOUT_DESCRIPTORS = """
import logging, os, resource, socket, sys
import anyio
from kvtier.rpc.listener import RECOVERY_SECONDS, accept_all

async def main():
    served = anyio.Event()

    async def serve(connected, address):
        connected.close()
        served.set()

    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    listener.setblocking(False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    descriptors = []
    try:
        while True:
            descriptors.append(os.dup(0))
    except OSError:
        pass
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept_all, listener, serve)
        client.connect(sys.argv[1])
        await anyio.sleep(3 * RECOVERY_SECONDS)
        assert not served.is_set()
        for descriptor in descriptors:
            os.close(descriptor)
        with anyio.fail_after(60):
            await served.wait()
        tasks.cancel_scope.cancel()

logging.basicConfig(format="%(levelname)s %(message)s")
anyio.run(main)
"""


@pytest.mark.anyio
async def test_each_connection_has_a_task_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    served: list[socket.socket] = []

    async def serve(connected: socket.socket, _address: object) -> None:
        with connected:
            served.append(connected)
            await anyio.sleep_forever()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accept_all, listener, serve)
            clients = []
            for _ in range(10):
                client = socket.socket(socket.AF_UNIX)
                client.connect(path)
                clients.append(client)
            await until(lambda: len(served) == len(clients))
            tasks.cancel_scope.cancel()
        assert all(connected.fileno() == -1 for connected in served), "cancelled with the listener"
        for client in clients:
            client.close()


def test_lack_of_descriptors_is_survived(tmp_path: Path) -> None:
    """``accept`` fails with EMFILE, and the connection stays in the backlog."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path / "socket")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("WARNING cannot accept connections on") == 1
    assert "Too many open files" in result.stderr
