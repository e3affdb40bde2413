"""Host names in requests are resolved for as long as their requests wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import anyio
import pytest

from kvtier import Settings
from kvtier.peers import targets as targets_module
from kvtier.peers.targets import RESOLVE_THREADS, Targets, UnnamedTarget

pytestmark = pytest.mark.anyio
FOUND = "10.0.0.9:8200"


class Registered:
    """Knows one instance."""

    async def who_serves(self, addresses: Sequence[str]) -> list[str]:
        return [address for address in addresses if address == FOUND]


async def test_names_of_requests_that_wait_no_more_are_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that take long would otherwise keep those of later requests waiting, maybe for hours."""
    answers, resolved = threading.Event(), list[str]()

    def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        resolved.append(host)
        if host.startswith("slow"):
            assert answers.wait(60)
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.9", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    targets = Targets(Settings(tiers=[{"name": "ram", "type": "cpu", "capacity": "8MiB"}]))
    targets.set_registered(Registered())

    async def refused(name: str) -> None:
        with pytest.raises(UnnamedTarget):
            await targets.find(name)

    try:
        monkeypatch.setattr(targets_module, "FIND_SECONDS", 0.05)
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(refused, f"slow{number}:8200")
    finally:
        answers.set()
    monkeypatch.setattr(targets_module, "FIND_SECONDS", 60)
    assert await targets.find("decode:8200") == FOUND
    assert len(resolved) <= RESOLVE_THREADS + 1
