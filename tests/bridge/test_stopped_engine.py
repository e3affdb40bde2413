"""An engine that is stopped (SIGSTOP, a debugger) while it holds memory of the cache process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bridge import server
from kvtier.bridge.client import status
from kvtier.bridge.protocol import Confirm, Confirmed
from kvtier.memory.keys import chunk_keys, root_key
from kvtier.plugins import Plugins
from tests.rigs.bridges import CHUNK_TOKENS as REAL_CHUNK_TOKENS
from tests.rigs.bridges import ROOT as REAL_ROOT
from tests.rigs.bridges import Start, store
from tests.rigs.scripted_engine import CHUNK_TOKENS, NAMESPACE, open_host
from tests.rigs.scripted_engine import store as store_scripted
from tests.rigs.waiting import wait_until

Plugins.load([])

STOPPED = """
import os, signal, sys
from pathlib import Path
from tests.rigs.bridges import CHUNK_TOKENS, ROOT, connect, reserve
from kvtier.memory.keys import chunk_keys
scheduler, worker = connect(Path(sys.argv[1]), "stopped")
keys = chunk_keys(ROOT, range(10**6, 10**6 + 200 * CHUNK_TOKENS), CHUNK_TOKENS)
granted = reserve(scheduler, ROOT, list(keys)).granted
worker.fill(granted)
print(len(granted), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_stopped_engine_does_not_keep_others_from_storing(tmp_path: Path, start: Start) -> None:
    socket = tmp_path / "socket"
    start()
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(socket)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        reserved = int(process.stdout.readline())
        keys = list(chunk_keys(REAL_ROOT, range(REAL_CHUNK_TOKENS * 60), REAL_CHUNK_TOKENS))
        for first in range(0, 60, 15):
            store(socket, keys[first : first + 15])
        assert status(socket)["counts"]["stored"] == 60
        assert 60 <= reserved <= 64, "half of 32 MiB"
        report = status(socket)
        assert report["reservations"]["bytes"] >= reserved * 256 * 1024
        assert report["counts"]["store_dropped"] == 200 - reserved
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_until(lambda: status(socket)["reservations"]["bytes"] == 0)


@pytest.mark.anyio
async def test_stopped_engine_keeps_only_memory_that_it_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loads fail when it is continued, and what it was storing may be stored by others."""
    keys = list(chunk_keys(root_key(NAMESPACE), range(CHUNK_TOKENS * 700), CHUNK_TOKENS))
    async with (
        open_host(tmp_path, reserve_share=1) as host,
        host.engine() as (stopped, workers),
        host.peer("scheduler", engine="other") as other,
    ):
        await store_scripted(stopped, workers, keys[:40])
        await host.server.cache.drain(30)
        found = await stopped.look_up(keys[:40])
        assert len(found.leases) == 40
        mine = await stopped.reserve(keys[40:], keys[39], ticket=2)
        assert not all(mine.leases), "no memory is left"

        async def others() -> int:
            asked = await other.reserve(keys[40:60], keys[39])
            granted = zip(mine.offsets, mine.leases, strict=True)
            assert not (set(asked.offsets) - {0}) & {offset for offset, lease in granted if lease}
            return sum(map(bool, asked.leases))

        assert await others() == 0
        monkeypatch.setattr(server, "STOPPED_SECONDS", 0.0)
        await others()
        assert await others() > 0
        assert await workers[0].request(Confirm(1, found.leases)) == Confirmed(1, held=False)
