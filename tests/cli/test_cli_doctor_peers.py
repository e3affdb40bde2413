"""`kvtier doctor` with peers: each is contacted, and errors are described."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import free_port

from .conftest import RAM, Kvtier, cache_process

SECRET = "sixteen or more characters"

Serve = Callable[..., str]
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a listening instance, and return its address."""
    with ExitStack() as stack:

        def start(**peer: Any) -> str:
            address = f"127.0.0.1:{free_port()}"
            folder = tmp_path / address
            folder.mkdir()
            settings = {"listen": address, "secret": SECRET, **peer}
            stack.enter_context(cache_process(folder, tiers=[RAM], peer=settings))
            return address

        yield start


@pytest.fixture
def doctor(kvtier: Kvtier, tmp_path: Path) -> Doctor:
    """Run the doctor with peers, and return its checks by name."""

    def run(*others: str, **peer: Any) -> dict[str, Any]:
        config = tmp_path / "doctor.yaml"
        settings = {"tiers": [RAM], "peer": {"others": list(others), "secret": SECRET, **peer}}
        config.write_text(json.dumps(settings))
        result = kvtier("doctor", "--config", str(config), "--json")
        assert SECRET not in result.output + result.errors
        return {check["name"]: check for check in json.loads(result.output)["checks"]}

    return run


def test_healthy_peer(serve: Serve, doctor: Doctor) -> None:
    address = serve()
    check = doctor(address)[f"peer {address}"]
    assert check["status"] == "ok"
    assert "tcp, connected in" in check["found"]
    assert "read answered in" in check["found"]


def test_healthy_peer_over_nixl(serve: Serve, doctor: Doctor) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    address = serve(transport="nixl")
    check = doctor(address, transport="nixl")[f"peer {address}"]
    assert check["status"] == "ok"
    assert check["found"].endswith("linked")


def test_errors_are_described(serve: Serve, doctor: Doctor) -> None:
    address = serve()
    other_secret = serve(secret=SECRET[::-1])
    no_listener = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        no_answer = f"127.0.0.1:{listener.getsockname()[1]}"
        checks = doctor(address, other_secret, no_listener, no_answer)
    assert checks[f"peer {address}"]["status"] == "ok"
    errors = {name: check["found"] for name, check in checks.items() if check["status"] == "fail"}
    assert "its peer.secret differs" in errors[f"peer {other_secret}"]
    assert "Connection refused" in errors[f"peer {no_listener}"]
    assert "in time" in errors[f"peer {no_answer}"]


def test_peer_with_another_transport(serve: Serve, doctor: Doctor) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    address = serve(transport="nixl")
    check = doctor(address)[f"peer {address}"]
    assert check["status"] == "fail"
    assert "peer.transport is nixl there and tcp here" in check["remedy"]


def test_targets_of_kv_transfers_are_contacted(kvtier: Kvtier, serve: Serve, tmp_path: Path) -> None:
    address = serve()
    config = tmp_path / "prefill.yaml"
    settings = {"tiers": [RAM], "peer": {"secret": SECRET}, "kv_transfer": {"targets": [address]}}
    config.write_text(json.dumps(settings))
    result = kvtier("doctor", "--config", str(config), "--json")
    checks = {check["name"]: check for check in json.loads(result.output)["checks"]}
    assert checks[f"peer {address}"]["status"] == "ok"
    assert checks["peer.secret"]["status"] == "warn"
    assert "openssl rand -hex 32" in checks["peer.secret"]["remedy"]


def test_listen_address(serve: Serve, doctor: Doctor) -> None:
    address = serve()
    assert "in use" in doctor(listen=address)[f"listening on {address}"]["found"]
    free = f"127.0.0.1:{free_port()}"
    assert "free" in doctor(listen=free)[f"listening on {free}"]["found"]
    elsewhere = doctor(listen="192.0.2.1:8200")["listening on 192.0.2.1:8200"]
    assert (elsewhere["status"], elsewhere["remedy"]) == (
        "fail",
        "set peer.listen to an address of this host",
    )


def test_missing_certificates(doctor: Doctor) -> None:
    tls = {"certificate": "/nonexistent/a", "key": "/nonexistent/b", "authority": "/nonexistent/c"}
    check = doctor("127.0.0.1:1", tls=tls)["peers"]
    assert check["status"] == "fail"
    assert "peer.tls.authority" in check["found"]
