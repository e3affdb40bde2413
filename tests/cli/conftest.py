"""Run commands in this process or in their own, and create a disk tier's folder to inspect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
from anyio.from_thread import start_blocking_portal

from kvtier.backends.disk.backend import object_path
from kvtier.backends.disk.folder import ObjectFolder
from kvtier.cli import checks, main
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from tests.rigs.bridges import CHUNK_TOKENS, is_serving
from tests.rigs.forks import Forked, python
from tests.rigs.servers.redis import RedisServer
from tests.rigs.waiting import wait_until

PAYLOAD_BYTES = 5000
RAM = {"name": "ram", "type": "cpu", "capacity": "64MiB"}


class Result(NamedTuple):
    """A command's exit status and output."""

    status: int
    output: str
    errors: str

    @property
    def message(self) -> str:
        """The errors without the frame and the line breaks of their display."""
        return " ".join(self.errors.replace("│", " ").split())


Kvtier = Callable[..., Result]


@pytest.fixture(autouse=True)
def _quick_vllm_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one takes seconds to print its version. Commands in their own process start it."""
    monkeypatch.setattr(checks, "which", lambda *_, **__: "/bin/true")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KVTIER_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="package")
def _signatures_read_once() -> Iterator[None]:
    """Typer reads the signatures of all commands in each run: a third of the CPU of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_params_from_function", cache(typer.main.get_params_from_function))
        yield


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Kvtier:
    """Run a command in this process."""

    def run(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        code = exited.value.code
        return Result(code if isinstance(code, int) else 0, printed.out, printed.err)

    return run


def fork(*arguments: object, **variables: str) -> Forked:
    """Run a command in a forked process."""
    return python(
        "kvtier",
        *map(str, arguments),
        environment={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


class Running(NamedTuple):
    """A cache process."""

    pid: int
    socket: Path
    config: Path


@contextmanager
def cache_process(folder: Path, **settings: Any) -> Iterator[Running]:
    """Run ``kvtier serve`` in a forked process for the duration of the block."""
    socket, config = folder / "kv.sock", folder / "kvtier.yaml"
    config.write_text(json.dumps({"socket": str(socket), "chunk_tokens": CHUNK_TOKENS, **settings}))  # YAML.
    process = fork("serve", "--config", config)
    try:
        wait_until(lambda: is_serving(socket))
        yield Running(process.pid, socket, config)
    finally:
        process.kill()
        process.communicate()


def spawn(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start a command as a user does."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvtier", *map(str, arguments)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def store(folder: Path, number: int, *, last_used: float = 1e9) -> Path:
    """Write a chunk object as the disk backend does."""
    key = ChunkKey(number.to_bytes(2, "big") + bytes(30))
    content = bytearray(object_bytes(PAYLOAD_BYTES))
    content[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES] = os.urandom(PAYLOAD_BYTES)
    header = ChunkHeader(key, ChunkKey(bytes(32)), bytes([number % 256]) * 32, PAYLOAD_BYTES)
    header.seal(memoryview(content))
    path = object_path(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (last_used, last_used))
    return path


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """Lock a folder as a cache process does, and yield the name of the holder."""
    with start_blocking_portal() as portal:
        claimed = portal.call(lambda: ObjectFolder.open("ssd", folder, direct=False))
        try:
            yield (folder / ".lock").read_text()
        finally:
            portal.call(claimed.close)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A real Redis."""
    if missing := RedisServer.missing():
        pytest.skip(missing)
    folder = tmp_path / "server"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A disk tier's folder with three chunks, of which number 2 was used last."""
    path = tmp_path / "disk"
    for number in range(3):
        store(path, number, last_used=1e9 + number)
    return path
