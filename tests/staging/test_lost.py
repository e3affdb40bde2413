"""Lost staging buffers, before a task has noticed. With real processes that is a race of 0.25 s."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from anyio import CancelScope

from kvtier.concurrency.breaker import Backoff
from kvtier.memory.header import ChunkHeader
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.memory.slices import Slices
from kvtier.peers.grants import GrantBook
from kvtier.peers.staging import buffers
from kvtier.peers.staging.buffers import EngineStaging, Staging
from kvtier.settings.peer import PeerSettings
from kvtier.testing.backend import make_key

pytestmark = pytest.mark.anyio

LAYOUT = ChunkLayout(64, (GroupLayout(16, (4096,)),))


async def test_buffers_are_lost_from_the_moment_that_a_process_exits() -> None:
    nixl_process = SimpleNamespace(exited=asyncio.Event())
    slices = Slices(1 << 20)
    grants = GrantBook(slices, PeerSettings(lease=5, share=1.0))
    staging = Staging(LAYOUT, cast("Any", [nixl_process]), grants, slices, cast("Any", None), 1.0)
    engine = EngineStaging(cast("Any", None), bytes(32), LAYOUT)
    engine._current = staging
    header = ChunkHeader(make_key(1), make_key(0), bytes(32), 16384)
    assert engine.current is staging
    assert await staging.verify(cast("Any", [None])) == [True]

    nixl_process.exited.set()

    assert staging.closed, "what was loaded from it is not confirmed"
    assert engine.current is None, "nothing is looked up in it, and no peer writes to it"
    assert staging.take(header) is None
    assert await staging.verify(cast("Any", [None])) == [False]


async def test_pauses_start_again_after_buffers_that_have_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class RecordedBackoff(Backoff):
        def next(self) -> float:
            pauses.append(super().next())
            return 0.0

    now = 0.0
    lifetimes = iter([0.0, 0.0, 0.0, buffers.MAX_PAUSE_SECONDS + 1, 0.0])

    class Engine(EngineStaging):
        async def _serve(self, workers: Sequence[object]) -> None:
            nonlocal now
            lifetime = next(lifetimes, None)
            if lifetime is None:
                scope.cancel()
            now += lifetime or 0.0

    monkeypatch.setattr(buffers, "Backoff", RecordedBackoff)
    monkeypatch.setattr(buffers, "time", SimpleNamespace(monotonic=lambda: now))
    scope = CancelScope()
    await Engine(cast("Any", None), bytes(32), LAYOUT)._run(scope, [])
    assert pauses[1] > pauses[0], "buffers that are lost at once are recreated ever more slowly"
    assert pauses[3] <= buffers.MIN_PAUSE_SECONDS
