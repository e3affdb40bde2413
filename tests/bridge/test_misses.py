"""Why the tokens of a lookup were not a hit, as the cache process tells the engine."""

from __future__ import annotations

import itertools
from collections import Counter

import anyio
import anyio.lowlevel
import pytest

from kvtier.bridge import protocol
from kvtier.bridge.protocol import Hello, Lookup, Outcome, RequestInfo, Reserve, Run, Weights
from kvtier.bridge.session import EngineSession
from kvtier.catalog.misses import AGAIN, Miss, MissReason
from kvtier.catalog.partial_matches import PromptTags, block_tags_of
from kvtier.memory.keys import ChunkKey, beginning_of, block_hashes, chunk_keys, join_keys, root_key
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.observability.requests import RequestLog
from kvtier.pipeline.found import Cut, FoundPrefix
from kvtier.pipeline.query import Query
from tests.rigs.engine_sessions import NAMESPACE, ROOT, engine_of
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

CHUNK, BLOCK = 64, 16
LAYOUT = ChunkLayout(CHUNK, (GroupLayout(BLOCK, (1024,)),))
NEW = MissReason.NEVER_STORED
TICKETS = itertools.count(1)


def prompt(seed: int, tokens: int = 4 * CHUNK) -> list[int]:
    return list(range(seed * 10_000, seed * 10_000 + tokens))


def keys_of(tokens: list[int], root: ChunkKey = ROOT) -> list[ChunkKey]:
    return chunk_keys(root, tokens, CHUNK, tail=True)


def store(engine: EngineSession, tokens: list[int], root: ChunkKey = ROOT) -> None:
    """Look a prompt up, and store it."""
    misses(engine, tokens, root)
    last = (len(tokens) - 1) % CHUNK + 1
    run = Run(root, join_keys(keys_of(tokens, root)), last, block_hashes=block_hashes(tokens, BLOCK))
    engine.commit(engine.reserve(Reserve(1, [run])).granted, 0)


def misses(
    engine: EngineSession,
    tokens: list[int],
    root: ChunkKey = ROOT,
    adapter: str = "",
    log: RequestLog | None = None,
    block: int = BLOCK,
) -> tuple[int, list[Miss]]:
    """Look a prompt up; return from which token on misses are explained, and how."""
    ticket = next(TICKETS)
    marks = block_tags_of(block_hashes(tokens, block))
    request = Lookup(
        ticket,
        join_keys(keys_of(tokens, root)),
        len(tokens),
        root=root,
        marks=marks,
        described=RequestInfo(adapter, beginning=beginning_of(tokens, block)),
    )
    answer, found = engine.look_up(request)
    explained = engine.explain(request, found, log or RequestLog(10, Counter()))
    engine.reads.release(answer.leases)
    assert explained is not None
    return explained.begins, explained.misses


def reasons(found: tuple[int, list[Miss]]) -> list[tuple[MissReason, int]]:
    return [(miss.reason, miss.tokens) for miss in found[1]]


async def test_what_is_held_needs_no_explanation() -> None:
    async with engine_of(LAYOUT) as (engine, _):
        store(engine, prompt(1))
        assert misses(engine, prompt(1)) == (4 * CHUNK, [])


async def test_a_new_prompt_was_never_stored() -> None:
    async with engine_of(LAYOUT) as (engine, _):
        store(engine, prompt(1))
        assert misses(engine, prompt(2)) == (0, [Miss(NEW, 4 * CHUNK)])


async def test_what_follows_the_stored_prompt_was_never_stored() -> None:
    """A conversation grows: nothing is wrong with it."""
    async with engine_of(LAYOUT) as (engine, _):
        store(engine, prompt(1, 2 * CHUNK))
        assert misses(engine, prompt(1)) == (2 * CHUNK, [Miss(NEW, 2 * CHUNK)])
        store(engine, prompt(2, 2 * CHUNK + BLOCK))
        assert reasons(misses(engine, prompt(2))) == [(NEW, 2 * CHUNK)]


@pytest.mark.parametrize("parts_at", [0, 1, 2 * BLOCK, CHUNK, CHUNK + BLOCK, 3 * CHUNK - 1])
async def test_a_prompt_that_parts_from_the_stored_one_diverges_at_that_block(parts_at: int) -> None:
    async with engine_of(LAYOUT) as (engine, _):
        store(engine, prompt(1))
        other = prompt(1)[:parts_at] + prompt(2)[parts_at:]
        _, [miss] = misses(engine, other)
        block = parts_at // BLOCK * BLOCK
        if block:
            assert (miss.reason, miss.position) == (MissReason.DIVERGES, block)
        else:
            assert miss.reason is NEW  # They share no block: just another prompt.


async def test_evicted_cleared_and_refused_chunks_are_told_apart() -> None:
    async with engine_of(LAYOUT, "40KiB") as (engine, cache):
        store(engine, prompt(1))
        assert reasons(misses(engine, prompt(1))) == []
        for seed in range(2, 12):
            store(engine, prompt(seed))
        found = misses(engine, prompt(1))
        assert reasons(found) == [(MissReason.EVICTED, 4 * CHUNK)]
        assert found[1][0].tier == "ram"
        store(engine, prompt(1))
        await cache.clear()
        assert reasons(misses(engine, prompt(1))) == [(MissReason.CLEARED, 4 * CHUNK)]


async def test_an_end_that_a_longer_chunk_replaced_was_not_cleared() -> None:
    """The longer chunk is hit up to the last whole block; without it, nothing is."""
    short, long = prompt(1, CHUNK + 2 * BLOCK + 5), prompt(1, 2 * CHUNK)
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, short)
        assert reasons(misses(engine, short)) == []
        store(engine, long)
        await until(lambda: keys_of(short)[1] not in cache.catalog)
        assert misses(engine, short) == (CHUNK, [Miss(MissReason.SHORTER_THAN_A_BLOCK, 2 * BLOCK + 5)])
        assert await cache.explain_prompt(NAMESPACE, LAYOUT, short) == (
            [("ram", CHUNK + 2 * BLOCK)],
            [Miss(MissReason.SHORTER_THAN_A_BLOCK, 5)],
        )
        await cache.clear([keys_of(long)[1]])
        assert reasons(misses(engine, short)) == [(MissReason.REPLACED, 2 * BLOCK + 5)]
        await cache.clear()
        assert reasons(misses(engine, short)) == [
            (MissReason.CLEARED, CHUNK),
            (MissReason.REPLACED, 2 * BLOCK + 5),
        ]


@pytest.mark.parametrize("blocks", [0, 2])
async def test_the_end_of_a_beginning_is_shorter_than_a_block(blocks: int) -> None:
    async with engine_of(LAYOUT) as (engine, _):
        store(engine, prompt(1))
        length = CHUNK + blocks * BLOCK + 5
        found = misses(engine, prompt(1, length))
        assert found == (CHUNK, [Miss(MissReason.SHORTER_THAN_A_BLOCK, length - CHUNK)])


async def test_an_end_that_comes_too_late_is_missed_for_that() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, prompt(1))
        tokens = prompt(1, CHUNK + 2 * BLOCK + 5)
        tags = PromptTags(ROOT, block_tags_of(block_hashes(tokens, BLOCK)), CHUNK // BLOCK)
        found = FoundPrefix(Query(keys_of(tokens), len(tokens), block_tags=tags))
        found.taken, found.chunk_tokens, found.cut = 1, CHUNK, Cut(MissReason.TOO_LATE, 0, 2.0)
        [miss] = cache.explain(found)
        assert (miss.reason, miss.tokens) == (MissReason.TOO_LATE, 2 * BLOCK + 5)


async def test_a_save_that_did_not_end_and_one_without_room_have_failed() -> None:
    async with engine_of(LAYOUT, reserve_share=0.01) as (engine, _):
        tokens = prompt(1, 64 * CHUNK)
        run = Run(ROOT, join_keys(keys_of(tokens)), CHUNK)
        reserved = engine.reserve(Reserve(1, [run]))
        granted = reserved.granted
        assert 0 < len(granted) < 64
        assert reasons(misses(engine, tokens)) == [
            (MissReason.BEING_STORED, len(granted) * CHUNK),
            (MissReason.STORE_FAILED, (64 - len(granted)) * CHUNK),
        ]
        engine.writes.abandon(granted)
        assert reasons(misses(engine, tokens)) == [(MissReason.STORE_FAILED, 64 * CHUNK)]


async def test_what_is_held_behind_a_gap_is_missed_for_the_same_reason() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, prompt(1))
        await cache.clear([keys_of(prompt(1))[1]])
        found = misses(engine, prompt(1))
        assert found[0] == CHUNK
        assert reasons(found) == [(MissReason.CLEARED, 3 * CHUNK)]


async def test_the_same_prompt_of_another_tenant_adapter_or_model_is_named() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        cache.identify(NAMESPACE, "model", "")
        assert reasons(misses(engine, prompt(1))) == [(NEW, 4 * CHUNK)]
        store(engine, prompt(1))
        _, [miss] = misses(engine, prompt(1), root_key(NAMESPACE, "tenant"))
        assert (miss.reason, miss.field) == (MissReason.OTHER_SALT, "cache_salt")
        _, [miss] = misses(engine, prompt(1), root_key(NAMESPACE, "", b"style"), adapter="style")
        assert (miss.reason, miss.field) == (MissReason.OTHER_ADAPTER_OR_IMAGE, "adapter")
        for model, weights, layout, reason, field in (
            ("model", "v2", LAYOUT, MissReason.OTHER_WEIGHTS, "weights"),
            ("other", "", LAYOUT, MissReason.OTHER_MODEL_OR_LAYOUT, "model"),
            (
                "model",
                "",
                ChunkLayout(CHUNK, (GroupLayout(BLOCK, (2048,)),)),
                MissReason.OTHER_MODEL_OR_LAYOUT,
                "layers",
            ),
            (
                "model",
                "",
                ChunkLayout(CHUNK, (GroupLayout(BLOCK, (512,)),), platform="cuda"),
                MissReason.OTHER_MODEL_OR_LAYOUT,
                "kind of device",
            ),
        ):
            namespace = root_key(NAMESPACE, f"{model} {weights} {layout}")
            cache.identify(namespace, model, weights)
            hello = Hello(protocol.VERSION, field, "scheduler", 0, layout, namespace)
            other = EngineSession(cache, hello, itertools.count(1_000))
            other.use_weights(Weights(namespace, weights))
            _, [miss] = misses(other, prompt(1), root_key(namespace))
            assert (miss.reason, miss.field) == (reason, field)
            other.close()


async def test_a_report_has_each_token_once() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        log = RequestLog(10, cache.counts)
        store(engine, prompt(1, 2 * CHUNK))
        tokens = prompt(1, 4 * CHUNK + 5)
        begins, _found = misses(engine, tokens)
        assert begins == 2 * CHUNK
        ticket = next(TICKETS) - 1
        engine.end(Outcome(ticket, "r", len(tokens), BLOCK, {"ram": 2 * CHUNK - BLOCK}), log)
        [report] = log.report("r", 10).requests
        assert report.hits == {"ram": 2 * CHUNK - BLOCK}
        assert report.engine_tokens == BLOCK
        assert sum(miss.tokens for miss in report.misses) == len(tokens) - 2 * CHUNK
        assert cache.counts["miss_tokens_never_stored"] == len(tokens) - 2 * CHUNK


async def test_where_prompts_of_one_template_part_is_counted_with_what_it_costs() -> None:
    async with engine_of(LAYOUT, "64MiB") as (engine, cache):
        log = RequestLog(10, cache.counts)
        for number in range(20):
            same = [7] * (number % 4 == 0)  # A quarter of the prompts has no date.
            date = same or [100_000 + number]
            tokens = [*prompt(1)[: CHUNK + BLOCK], *date * BLOCK, *prompt(1)[CHUNK + 2 * BLOCK :]]
            misses(engine, tokens, log=log)
            store(engine, tokens)
        [breaker] = log.report("", 0).breakers
        assert breaker.position == CHUNK + BLOCK
        assert breaker.parted == breaker.again == 15
        assert breaker.passed == 19
        behind = 4 * CHUNK - CHUNK - BLOCK
        assert breaker.tokens_per_day == 24 * 15 * behind, "as of an hour, not of a moment"


async def test_a_prompt_is_explained_without_a_request() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, prompt(1, 2 * CHUNK))
        counted = cache.counts["looked_up"]
        hits, found = await cache.explain_prompt(NAMESPACE, LAYOUT, prompt(1, 3 * CHUNK + 7))
        rest = Miss(MissReason.SHORTER_THAN_A_BLOCK, 7)
        assert (hits, found) == ([("ram", 2 * CHUNK)], [Miss(NEW, CHUNK), rest])
        other = [*prompt(1)[:BLOCK], 5, *prompt(1)[BLOCK + 1 : 2 * CHUNK]]
        hits, [miss] = await cache.explain_prompt(NAMESPACE, LAYOUT, other)
        assert (hits, miss.reason, miss.position) == ([("ram", BLOCK)], MissReason.DIVERGES, BLOCK)
        assert miss.tokens == 2 * CHUNK - BLOCK
        assert await cache.explain_prompt(NAMESPACE, LAYOUT, []) == ([], [])
        assert cache.counts["looked_up"] == counted


async def test_of_many_prompts_none_is_taken_for_another_by_chance() -> None:
    async with engine_of(LAYOUT, "4MiB") as (engine, _):
        for seed in range(2, 600):
            store(engine, prompt(seed, CHUNK))
            await anyio.lowlevel.checkpoint()
        for seed in range(600, 700):
            assert {miss.reason for miss in misses(engine, prompt(seed))[1]} == {NEW}
            await anyio.lowlevel.checkpoint()


async def test_a_date_in_the_first_block_and_then_the_same_again() -> None:
    async with engine_of(LAYOUT) as (engine, _):
        template = prompt(1, 12 * CHUNK)
        store(engine, template)
        _, [miss] = misses(engine, [7, 7, *template[2:]])
        assert (miss.reason, miss.position, miss.field) == (MissReason.DIVERGES, 0, AGAIN)


async def test_an_engine_with_other_blocks_is_named() -> None:
    async with engine_of(LAYOUT) as (engine, cache):
        store(engine, prompt(1))
        layout = ChunkLayout(CHUNK, (GroupLayout(2 * BLOCK, (2048,)),))
        namespace = root_key(NAMESPACE, "other blocks")
        hello = Hello(protocol.VERSION, "other", "scheduler", 0, layout, namespace)
        other = EngineSession(cache, hello, itertools.count(1_000))
        other.use_weights(Weights(namespace, ""))
        _, [miss] = misses(other, prompt(1), root_key(namespace), block=2 * BLOCK)
        assert (miss.reason, miss.field) == (MissReason.OTHER_MODEL_OR_LAYOUT, "--block-size")
        other.close()
