"""Which addresses a request may have KV transferred to."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.bridge.protocol import KVTransfer, KVTransferResult
from kvtier.memory.keys import join_keys
from tests.rigs.scripted_engine import KEYS, ROOT, TOKENS, Peer, open_host

pytestmark = pytest.mark.anyio

PEER = {"secret": "0123456789abcdef" * 4}


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A server that no setting names."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def is_dialled(listener: socket.socket) -> bool:
    """Whether anything has connected to a server."""
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


async def transfer(scheduler: Peer, ticket: int, to: str) -> KVTransferResult:
    """Send the hint of a request to the cache process, and wait for its result."""
    result = await scheduler.request(KVTransfer(ticket, to, ROOT, join_keys(KEYS), TOKENS), KVTransferResult)
    assert result.ticket == ticket
    return result


@pytest.mark.parametrize(
    "settings",
    [{}, {"peer": {**PEER, "others": ["127.0.0.1:1"]}}, {"kv_transfer": {"targets": ["localhost:1"]}}],
    ids=["no-list", "another-peer", "another-target"],
)
async def test_no_address_that_only_a_request_names_is_dialled(
    tmp_path: Path, stranger: socket.socket, settings: dict[str, Any]
) -> None:
    async with open_host(tmp_path, **{"peer": PEER, **settings}) as host, host.peer("scheduler") as scheduler:
        result = await transfer(scheduler, 1, address(stranger))
        assert not is_dialled(stranger)
        assert (result.tokens, "kv_transfer.targets" in result.reason) == (0, True)


@pytest.mark.parametrize("by", ["others", "targets"])
async def test_addresses_in_the_settings_are_dialled(
    tmp_path: Path, stranger: socket.socket, by: str
) -> None:
    named = [address(stranger).replace("127.0.0.1", "LocalHost")]
    settings: dict[str, Any] = (
        {"peer": {**PEER, "others": named}} if by == "others" else {"kv_transfer": {"targets": named}}
    )
    stranger.close()
    async with open_host(tmp_path, **{"peer": PEER, **settings}) as host, host.peer("scheduler") as scheduler:
        result = await transfer(scheduler, 1, named[0].lower())
        assert "kv_transfer.targets" not in result.reason
        assert "refused" in result.reason


async def test_one_warning_for_all_addresses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client could otherwise fill the log, and the logs of all engines."""
    with caplog.at_level(logging.WARNING, "kvtier"):
        async with open_host(tmp_path, peer=PEER) as host, host.peer("scheduler") as scheduler:
            for ticket in range(1, 101):
                await transfer(scheduler, ticket, f"169.254.169.254:{ticket}")
    lines = [record.getMessage() for record in caplog.records if "169.254" in record.getMessage()]
    assert len(lines) == 1
    assert "kv_transfer.targets" in lines[0]
    assert "peer.others" in lines[0]


async def test_guessable_secret_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, secret in enumerate(("sixteen or more characters", PEER["secret"])):
        caplog.clear()
        (folder := tmp_path / str(number)).mkdir()
        async with open_host(folder, peer={"secret": secret}):
            pass
        assert ("openssl rand -hex 32" in caplog.text) == (secret != PEER["secret"])
        assert secret not in caplog.text


@pytest.mark.parametrize("targets", [[], ["127.0.0.1:1"]])
async def test_prefill_instance_that_can_transfer_nothing_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, targets: list[str]
) -> None:
    async with open_host(tmp_path, role="prefill", peer=PEER, kv_transfer={"targets": targets}):
        pass
    assert ("kv_transfer.targets" in caplog.text) == (not targets)
