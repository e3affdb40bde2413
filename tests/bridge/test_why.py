"""What a cache process keeps and answers for ``kvtier why``, also if it is asked for nonsense."""

from __future__ import annotations

import subprocess
from array import array
from pathlib import Path

import msgspec
import pytest
import yaml

from kvtier.bridge import client
from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import Lookup, Outcome, RequestInfo
from kvtier.bridge.session import MAX_ASKED
from kvtier.catalog.misses import MissReason
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.errors import ChannelError
from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.fleet.member.tokenizer import MARK
from kvtier.memory.keys import block_hashes, chunk_keys, join_keys
from kvtier.observability.requests import RequestLog
from kvtier.pipeline.query import Query
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, LAYOUT, ROOT, Start, hello, start, store
from tests.rigs.engine_sessions import engine_of
from tests.rigs.vllm.models import add_tokenizer
from tests.rigs.waiting import wait_until

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


TEXT = "a secret text of a user"


def test_text_is_shown_only_where_the_operator_allows_it(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    source = TokenizerSource(str(add_tokenizer(tmp_path)))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for allowed in (False, True):
        process = start() if not allowed else start_showing(start, tmp_path)
        scheduler, worker = store(tmp_path / "socket", KEYS[:2])
        scheduler.close()
        greeting = msgspec.structs.replace(hello("scheduler"), model=EngineModel(["llama"], source))
        scheduler = SchedulerBridge(greeting, tmp_path / "socket")
        scheduler.connect()
        assert scheduler.welcome is not None
        assert scheduler.welcome.show_text is allowed
        for number in range(3):
            behind = [*tokenizer.encode(f"{TEXT} {number}").ids, *range(CHUNK_TOKENS)][:CHUNK_TOKENS]
            tokens = [*range(CHUNK_TOKENS), *behind]
            keys = chunk_keys(ROOT, tokens, CHUNK_TOKENS)
            tags = PromptTags(ROOT, block_tags_of(block_hashes(tokens, 16)), CHUNK_TOKENS // 16)
            # Whatever an engine sends: here it is always the prompt.
            info = RequestInfo(prompt=array("I", tokens).tobytes())
            ticket = scheduler.look_up(Query(keys, len(tokens), block_tags=tags), info)
            assert ticket is not None
            scheduler.end(Outcome(ticket, "cmpl-1", len(tokens), 0, {"ram": CHUNK_TOKENS}))
        wait_until(lambda: len(client.why(tmp_path / "socket", seconds=120).requests) == 3)
        report = client.why(tmp_path / "socket", seconds=120)
        [breaker] = report.breakers
        assert (breaker.position, breaker.parted) == (CHUNK_TOKENS, 3)
        [prompt] = client.why_prompt(tmp_path / "socket", tokens, seconds=120)
        before, after = (tokenizer.decode(part) for part in (tokens[48:64], tokens[64:96]))
        expected = f"{before}{MARK}{after}" if allowed else ""
        assert (breaker.text, prompt.text) == (expected, expected)
        assert (TEXT in expected) is allowed
        shown = f"{report}{prompt}{client.status(tmp_path / 'socket')}"
        assert (TEXT in shown) is allowed
        assert str(tokens[64:70])[1:-1] not in shown
        scheduler.close()
        worker.close()
        process.kill()
        _, errors = process.communicate()
        assert TEXT not in errors


def start_showing(start: Start, folder: Path) -> subprocess.Popen[str]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"why": {"show_text": True}}))
    return start()


def test_a_tokenizer_that_cannot_be_loaded_costs_only_the_text(start: Start, tmp_path: Path) -> None:
    start_showing(start, tmp_path)
    store(tmp_path / "socket", KEYS[:2])
    nowhere = EngineModel(["llama"], TokenizerSource("/nowhere"))
    scheduler = SchedulerBridge(
        msgspec.structs.replace(hello("scheduler"), model=nowhere), tmp_path / "socket"
    )
    scheduler.connect()
    [prompt] = client.why_prompt(
        tmp_path / "socket", [*range(CHUNK_TOKENS), *([5] * CHUNK_TOKENS)], seconds=60
    )
    assert (prompt.misses[0].position, prompt.text) == (CHUNK_TOKENS, "")
    scheduler.close()
