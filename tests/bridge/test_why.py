"""What a cache process keeps and answers for ``kvtier why``, also if it is asked for nonsense."""

from __future__ import annotations

import signal
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import pytest
import yaml

from kvtier.bridge import client
from kvtier.bridge.client import SchedulerBridge
from kvtier.bridge.protocol import Explained, Explanation, Found, Lookup, Outcome, RequestInfo, Reserve, Run
from kvtier.bridge.session import MAX_ASKED, EngineSession
from kvtier.catalog.misses import Miss, MissReason
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.errors import ChannelError
from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.fleet.member.tokenizer import MARK
from kvtier.memory.keys import ChunkKey, block_hashes, chunk_keys, join_keys
from kvtier.observability.requests import RequestLog
from kvtier.pipeline.query import Query
from kvtier.rpc.client import UnixConnection
from tests.rigs.bridges import (
    CHUNK_TOKENS,
    KEYS,
    LAYOUT,
    ROOT,
    Start,
    _close_bridges,
    connect,
    hello,
    start,
    store,
)
from tests.rigs.engine_sessions import engine_of
from tests.rigs.vllm.models import add_tokenizer
from tests.rigs.waiting import wait_until

__all__ = ["_close_bridges", "start"]


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
            await anyio.lowlevel.checkpoint()
        for ticket in (1, MAX_ASKED + 99):
            engine.end(Outcome(ticket, f"r{ticket}", CHUNK_TOKENS, 0), log)
        [kept, forgotten] = [report.misses[0].reason for report in log.report("", 10).requests]
        assert (kept, forgotten) == (MissReason.NEVER_STORED, MissReason.NOT_LOOKED_UP)


@pytest.mark.anyio
async def test_request_that_asks_again_counts_once_and_is_explained_by_its_last_answer() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        log = RequestLog(10, cache.counts)
        keys, tokens = join_keys(KEYS[:2]), 2 * CHUNK_TOKENS
        for ticket in range(1, 5):
            request = Lookup(ticket, keys, tokens, described=RequestInfo())
            if ticket > 1:
                request = msgspec.structs.replace(request, repeated=True, renews=1)
            answer, found = engine.look_up(request)
            explanation = engine.explain(request, found, log)
            assert explanation is not None
            assert explanation.ticket == 1
            engine.reads.cancel(ticket)
            store_in(engine, KEYS[:1])
        assert len(answer.leases) == 1
        engine.end(Outcome(1, "r", tokens, 0, {"ram": CHUNK_TOKENS}), log)
        [report] = log.report("", 10).requests
        [miss] = report.misses
        assert (miss.reason, miss.tokens) == (MissReason.NEVER_STORED, CHUNK_TOKENS)
        assert cache.counts["lookup_tokens"] == tokens
        assert sum(cache.counts[f"hit_tokens_{tier.name}"] for tier in cache.tiers) == CHUNK_TOKENS


@pytest.mark.anyio
async def test_preempted_request_that_asks_again_does_not_count() -> None:
    """It is not known any more what it has found."""
    async with engine_of(LAYOUT) as (engine, cache):
        store_in(engine, KEYS[:1])
        request = Lookup(7, join_keys(KEYS[:2]), 2 * CHUNK_TOKENS, described=RequestInfo(), repeated=True)
        engine.look_up(request)
        engine.look_up(msgspec.structs.replace(request, ticket=8, renews=7))
        before = cache.counts["looked_up"], cache.counts["found_ram"]
        engine.look_up(msgspec.structs.replace(request, ticket=9, renews=7))
        assert (cache.counts["looked_up"], cache.counts["found_ram"]) == before
        engine.reads.cancel(9)
        assert not cache.counts["lookup_tokens"]
        assert not sum(cache.counts[f"hit_tokens_{tier.name}"] for tier in cache.tiers)
        engine.reads.cancel(7)
        engine.reads.cancel(8)


def store_in(engine: EngineSession, keys: Sequence[ChunkKey]) -> None:
    reserved = engine.reserve(Reserve(9, [Run(ROOT, join_keys(keys), CHUNK_TOKENS)]))
    engine.commit(reserved.leases, 0)


@pytest.mark.parametrize("stores", [False, True])
def test_what_an_engine_stores_without_waiting_for_an_answer_was_never_stored(
    start: Start, tmp_path: Path, *, stores: bool
) -> None:
    """The cache process gets all of it at once, as it was busy."""
    process = start()
    scheduler, _ = connect(tmp_path / "socket")
    process.send_signal(signal.SIGSTOP)
    tokens = 2 * CHUNK_TOKENS
    ticket = scheduler.look_up(Query(KEYS[:2], tokens), RequestInfo())
    assert ticket is not None
    if stores:
        assert scheduler.reserve([Run(ROOT, join_keys(KEYS[:2]), CHUNK_TOKENS)])
    scheduler.end(Outcome(ticket, "cmpl-1", tokens, 0))
    scheduler.send_outcomes()
    process.send_signal(signal.SIGCONT)
    expected = [Miss(MissReason.NEVER_STORED, tokens)]
    wait_until(lambda: client.why(tmp_path / "socket").requests)
    [report] = client.why(tmp_path / "socket").requests
    assert report.misses == expected
    [explanation] = await_explanations(scheduler)
    assert (explanation.ticket, explanation.misses) == (ticket, expected)


def test_lookups_are_answered_before_their_misses_are_explained(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start()
    scheduler, _ = connect(tmp_path / "socket")
    process.send_signal(signal.SIGSTOP)
    tickets = [
        scheduler.look_up(Query([key], CHUNK_TOKENS), RequestInfo()) for key in (KEYS[0], KEYS[1], KEYS[2])
    ]
    received: list[object] = []
    receive = UnixConnection.receive

    def recording(connection: UnixConnection[Any], wait: float = 0.0) -> list[Any]:
        messages = receive(connection, wait)
        received.extend(messages)
        return messages

    monkeypatch.setattr(UnixConnection, "receive", recording)
    process.send_signal(signal.SIGCONT)
    explanations = await_explanations(scheduler)
    assert [type(message) for message in received] == [Found, Found, Found, Explained]
    assert [explanation.ticket for explanation in explanations] == tickets


def await_explanations(scheduler: SchedulerBridge) -> list[Explanation]:
    explanations: list[Explanation] = []
    wait_until(
        lambda: (scheduler.poll(0.1), explanations.extend(scheduler.take_explanations()), explanations)[2]
    )
    return explanations


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
            scheduler.send_outcomes()
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
