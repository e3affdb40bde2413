"""``kvtier why`` of a real cache process."""

from __future__ import annotations

import json
from pathlib import Path

from kvtier.bridge import client
from kvtier.bridge.protocol import Outcome, RequestInfo
from kvtier.catalog.misses import ADVICE, Miss, MissReason, text_of
from kvtier.cli.why import sentence_of
from kvtier.observability.breakers import Breaker
from kvtier.pipeline.query import Query
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, store
from tests.rigs.waiting import wait_until

from .conftest import Kvtier, cache_process


def test_every_reason_has_advice_and_its_place_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "why.md").read_text()
    for reason in MissReason:
        assert ADVICE[reason]
        assert f"| `{reason}` |" in page


def test_last_requests_with_what_to_do(kvtier: Kvtier, tmp_path: Path) -> None:
    with cache_process(tmp_path, tiers=[{"name": "ram", "type": "cpu", "capacity": "8MiB"}]) as running:
        empty = kvtier("why", "--socket", running.socket)
        assert empty.status == 1
        assert empty.output == "The cache process has seen no request since it started.\n"
        scheduler, worker = store(running.socket, KEYS[:4])
        tokens = 8 * CHUNK_TOKENS
        ticket = scheduler.look_up(Query(KEYS[:8], tokens), RequestInfo())
        assert ticket is not None
        scheduler.end(Outcome(ticket, "cmpl-[red]1", tokens, 0, {"ram": tokens // 2}))
        wait_until(lambda: bool(client.why(running.socket).requests))
        output = kvtier("why", "--config", running.config).output
        assert f"ram {tokens // 2}" in output
        assert "cmpl-[red]1" in output, "markup of a client is shown as it is"
        assert f"{tokens // 2} never_stored" in output
        assert ADVICE[MissReason.NEVER_STORED] in output
        [report] = json.loads(kvtier("why", "[red]", "--socket", running.socket, "--json").output)["requests"]
        assert (report["tokens"], report["hits"]) == (tokens, {"ram": tokens // 2})
        other = kvtier("why", "chat-9", "--socket", running.socket)
        assert other.status == 1
        assert "no request whose id contains 'chat-9'" in other.output
        scheduler.close()
        worker.close()


def test_where_prompts_part() -> None:
    breaker = Breaker(731, 74, 100, 37, 2_000_000.0, 1860.0)
    assert sentence_of(breaker) == (
        "74% of 100 prompts that begin alike part at token 731; 50% of these go on with the same text: "
        "2,000,000 tokens a day, 31 minutes of prefill."
    )


def test_what_cannot_be_seen_is_not_said() -> None:
    """Blocks may be too long to see the same text again within a chunk."""
    text = sentence_of(Breaker(384, 3, 3, 0, 70_000.0, 0.0))
    assert text == "100% of 3 prompts that begin alike part at token 384: 70,000 tokens a day."


def test_text_of_a_miss_names_what_is_known() -> None:
    evicted = Miss(MissReason.EVICTED, 50, "ram", seconds=40.0, ago=12.0)
    assert text_of(evicted) == "50 evicted (from ram, after 40 s, 12 s ago)"
    assert text_of(Miss(MissReason.TOO_LATE, 512, "ssd", seconds=2.0)) == "512 too_late (ssd, 2.00 s)"
    assert text_of(Miss(MissReason.DIVERGES, 9, position=16)) == "9 diverges (from token 16 on)"
    assert text_of(Miss(MissReason.NEVER_STORED, 7)) == "7 never_stored"
