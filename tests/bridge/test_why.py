"""What a cache process keeps and answers for ``kvtier why``, also if it is asked for nonsense."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvtier.bridge import client
from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import Lookup, Outcome, RequestInfo
from kvtier.bridge.session import MAX_ASKED
from kvtier.catalog.misses import MissReason
from kvtier.errors import ChannelError
from kvtier.fleet.member.served_models import EngineModel
from kvtier.memory.keys import join_keys
from kvtier.observability.requests import RequestLog
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, LAYOUT, Start, hello, start
from tests.rigs.engine_sessions import engine_of

__all__ = ["start"]


def test_tokens_that_are_none_are_refused_and_harm_nobody(start: Start, tmp_path: Path) -> None:
    start()
    model = EngineModel(["llama"])
    socket = tmp_path / "socket"
    scheduler = SchedulerBridge(msgspec.structs.replace(hello("scheduler"), model=model), socket)
    scheduler.connect()
    try:
        assert client.why_prompt(socket, [1, 2, 3])[0].tokens == 3
        for tokens in ([-1], [1 << 32], [1 << 63]):
            with pytest.raises(ChannelError, match="token"):
                client.why_prompt(socket, tokens)
        assert client.why_prompt(socket, [1, 2, 3])[0].model == "llama"
        with pytest.raises(ChannelError, match="at most"):
            client.why(socket, last=-1)
        assert scheduler.responsive
    finally:
        scheduler.close()


@pytest.mark.anyio
async def test_requests_without_an_outcome_are_forgotten() -> None:
    """An engine does not say what became of requests that were cancelled before they ran."""
    async with engine_of(LAYOUT) as (engine, cache):
        log = RequestLog(10, cache.counts)
        for ticket in range(1, MAX_ASKED + 100):
            request = Lookup(ticket, join_keys(KEYS[:1]), CHUNK_TOKENS, described=RequestInfo())
            _, found = engine.look_up(request)
            engine.explain(request, found, log)
        for ticket in (1, MAX_ASKED + 99):
            engine.end(Outcome(ticket, f"r{ticket}", CHUNK_TOKENS, 0), log)
        [kept, forgotten] = [report.misses[0].reason for report in log.report("", 10).requests]
        assert (kept, forgotten) == (MissReason.NEVER_STORED, MissReason.NOT_LOOKED_UP)
