"""`kvtier doctor` with peers: each is called, and what is wrong with it is said in words."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.bridge import client
from kvtier.errors import ChannelError
from kvtier.testing.servers.base import free_port

from .conftest import Kvtier

SECRET = "sixteen or more characters"
RAM = {"name": "ram", "type": "cpu", "capacity": "16MiB"}
PATIENCE_SECONDS = 30

Serve = Callable[..., str]
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Runs instances that listen, and tells their addresses."""
    running: list[subprocess.Popen[bytes]] = []

    def start(**peer: Any) -> str:
        address = f"127.0.0.1:{free_port()}"
        path = tmp_path / f"{len(running)}.sock"
        settings = {
            "tiers": [RAM],
            "socket": str(path),
            "peer": {"listen": address, "secret": SECRET, **peer},
        }
        config = tmp_path / f"{len(running)}.yaml"
        config.write_text(json.dumps(settings))
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "kvtier", "serve", "--config", str(config)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                client.status(path)
                return address
            except ChannelError:
                assert time.monotonic() < until
                time.sleep(0.02)

    yield start
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def doctor(kvtier: Kvtier, tmp_path: Path) -> Doctor:
    """What the doctor says of the peers, by the names of its checks."""

    def ask(*others: str, **peer: Any) -> dict[str, Any]:
        config = tmp_path / "doctor.yaml"
        settings = {"tiers": [RAM], "peer": {"others": list(others), "secret": SECRET, **peer}}
        config.write_text(json.dumps(settings))
        result = kvtier("doctor", "--config", str(config), "--json")
        assert SECRET not in result.output + result.errors
        return {check["name"]: check for check in json.loads(result.output)["checks"]}

    return ask


def test_a_peer_that_is_well(serve: Serve, doctor: Doctor) -> None:
    address = serve()
    check = doctor(address)[f"peer {address}"]
    assert check["status"] == "ok"
    assert "tcp, called in" in check["found"]
    assert "answers a read in" in check["found"]


def test_a_peer_over_nixl(serve: Serve, doctor: Doctor) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    address = serve(transport="nixl")
    check = doctor(address, transport="nixl")[f"peer {address}"]
    assert check["status"] == "ok"
    assert check["found"].endswith("linked")


def test_what_is_wrong_is_said_in_words(serve: Serve, doctor: Doctor) -> None:
    address = serve()
    stranger = serve(secret=SECRET[::-1])
    nobody = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        checks = doctor(address, stranger, nobody, mute)
    assert checks[f"peer {address}"]["status"] == "ok"
    said = {name: check["found"] for name, check in checks.items() if check["status"] == "fail"}
    assert "peer.secret is another one there" in said[f"peer {stranger}"]
    assert "Connection refused" in said[f"peer {nobody}"]
    assert "in time" in said[f"peer {mute}"]


def test_another_transport_there(serve: Serve, doctor: Doctor) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    address = serve(transport="nixl")
    check = doctor(address)[f"peer {address}"]
    assert check["status"] == "fail"
    assert "peer.transport is nixl there and tcp here" in check["remedy"]


def test_the_port_to_listen_on(serve: Serve, doctor: Doctor) -> None:
    address = serve()
    assert "in use" in doctor(listen=address)[f"listening on {address}"]["found"]
    free = f"127.0.0.1:{free_port()}"
    assert "free" in doctor(listen=free)[f"listening on {free}"]["found"]
    elsewhere = doctor(listen="192.0.2.1:8200")["listening on 192.0.2.1:8200"]
    assert (elsewhere["status"], elsewhere["remedy"]) == (
        "fail",
        "write an address of this host in peer.listen",
    )


def test_certificates_that_are_missing(doctor: Doctor) -> None:
    tls = {"certificate": "/nonexistent/a", "key": "/nonexistent/b", "authority": "/nonexistent/c"}
    check = doctor("127.0.0.1:1", tls=tls)["peers"]
    assert check["status"] == "fail"
    assert "peer.tls.authority" in check["found"]
