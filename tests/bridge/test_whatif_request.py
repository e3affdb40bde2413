"""What other settings would bring, asked for over the bridge."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import anyio.abc
import pytest
from anyio import to_thread

from kvtier.bridge import client, protocol
from kvtier.bridge.protocol import Status, StatusReport, WhatIf, WhatIfAnswer
from kvtier.errors import Rejected
from kvtier.instance import Instance
from kvtier.observability.whatif.report import Report
from kvtier.rpc.frames import Refused, describe_mismatch, encode
from kvtier.rpc.listener import listening
from tests.rigs.scripted_engine import open_host
from tests.rigs.whatif_reports import REPORT

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("report", [REPORT, None])
async def test_observer_gets_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report | None
) -> None:
    monkeypatch.setattr(Instance, "what_if", lambda _: report)
    async with open_host(tmp_path) as host:
        answer = await to_thread.run_sync(client.what_if, host.path)
        assert answer == WhatIfAnswer(1, True, report)


async def test_switched_off(tmp_path: Path) -> None:
    async with open_host(tmp_path, whatif={"enabled": False}) as host:
        answer = await to_thread.run_sync(client.what_if, host.path)
        assert answer == WhatIfAnswer(1, False, None)


async def test_engines_may_ask_as_well_and_other_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Instance, "what_if", lambda _: REPORT)
    async with open_host(tmp_path) as host, host.peer("scheduler") as scheduler:
        await scheduler.send(WhatIf(1), Status(2))
        assert await scheduler.receive() == WhatIfAnswer(1, True, REPORT)
        await scheduler.receive(StatusReport)


async def test_older_process_is_reported_with_both_versions(tmp_path: Path) -> None:
    reason = describe_mismatch(protocol.VERSION, protocol.VERSION - 1)

    async def refuse(connected: socket.socket) -> None:
        stream = await anyio.abc.SocketStream.from_socket(connected)
        async with stream:
            await stream.receive()
            await stream.send(encode(Refused(reason)))

    async with listening(tmp_path / "socket", refuse):
        with pytest.raises(Rejected, match="install the same kvtier on both"):
            await to_thread.run_sync(client.what_if, tmp_path / "socket")
