"""``kvtier why`` of a real cache process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anyio import to_thread

from kvtier.bridge import client
from kvtier.bridge.protocol import Outcome, RequestInfo
from kvtier.catalog.misses import ADVICE, Miss, MissReason, text_of
from kvtier.cli.why import sentence_of
from kvtier.memory.keys import join_keys
from kvtier.observability.breakers import Breaker
from kvtier.observability.requests import RequestReport
from kvtier.pipeline.query import Query
from tests.observability.recording.recordings import CHUNK_TOKENS as RECORDED_TOKENS
from tests.observability.recording.recordings import of_keys, write
from tests.rigs.bridges import CHUNK_TOKENS, KEYS, store
from tests.rigs.fleet import CHUNK_TOKENS as FLEET_TOKENS
from tests.rigs.fleet import MODEL, fleet
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
        scheduler.send_outcomes()
        wait_until(lambda: bool(client.why(running.socket).requests))
        output = kvtier("why", "--config", running.config).output
        assert f"ram {tokens // 2}" in output
        assert "cmpl-[red]1" in output, "markup of a client is shown as it is"
        assert f"{tokens // 2} never_stored" in output
        assert ADVICE[MissReason.NEVER_STORED] in output
        [report] = json.loads(kvtier("why", "[red]", "--socket", running.socket, "--json").output)["requests"]
        assert (report["tokens"], report["hits"]) == (tokens, {"ram": tokens // 2})
        scheduler.end(Outcome(0, "cmpl-2", tokens, tokens))
        scheduler.send_outcomes()
        wait_until(lambda: len(client.why(running.socket).requests) == 2)
        output = kvtier("why", "cmpl-2", "--socket", running.socket).output
        assert output.endswith(f"\nOf {tokens} tokens of 1 requests, none was computed.\n")
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


@pytest.mark.anyio
async def test_all_instances_through_the_controller(kvtier: Kvtier, tmp_path: Path) -> None:
    prompt = list(range(3 * FLEET_TOKENS))
    async with fleet(tmp_path, kvtier, "instance-1", "instance-2", heartbeat=0.1) as running:
        await running.wait_for_heartbeats()
        empty = await running.run("why", "x")
        assert (empty.status, empty.output) == (
            1,
            "The instances have seen no request whose id contains 'x' since they started.\n",
        )
        await running.store("instance-1", prompt[:FLEET_TOKENS])
        miss = Miss(MissReason.DIVERGES, 40, position=2)
        for at, (name, instance) in enumerate(running.instances.items()):
            report = RequestReport(float(at), f"cmpl-{name}", "vllm", 42, 0, {"ram": 2}, [miss], 0.1)
            instance.requests.add(report)
            for _ in range(3):
                instance.requests.breakers.parted(KEYS[0], 2, 40, 0.0)
        shown = await running.run("why")
        assert shown.output.splitlines()[0].split()[:3] == ["time", "instance", "request"]
        rows = [line.split()[1:3] for line in shown.output.splitlines()[1:3]]
        assert rows == [["instance-2", "cmpl-instance-2"], ["instance-1", "cmpl-instance-1"]]
        assert "100% of 6 prompts that begin alike part at token 2: 5,760 tokens a day." in shown.output
        config = tmp_path / "client.yaml"
        config.write_text(json.dumps({"controller": {"url": running.url}}))
        options = ("why", "instance-2", "--all", "--json", "--config", config)
        found = json.loads((await to_thread.run_sync(lambda: kvtier(*options))).output)
        assert [each["instance"] for each in found["requests"]] == ["instance-2"]
        assert found["unanswered"] == {}
        held = await running.run("why", "--token-ids", ",".join(map(str, prompt)), "--model", MODEL)
        lines = held.output.splitlines()
        assert lines[:3] == [
            f"instance-1: {MODEL}: 16 of 48 tokens are held",
            "  16 in ram",
            f"  32 never_stored: {ADVICE[MissReason.NEVER_STORED]}",
        ]
        # Whether its peer has answered in time is not known.
        assert lines[3].startswith(f"instance-2: {MODEL}: ")
        messages = tmp_path / "chat.json"
        messages.write_text('[{"role": "user", "content": "x"}]')
        refused = await running.run("why", "--messages", messages)
        assert refused.status == 1
        assert "no connected instance has its tokenizer" in refused.message


def test_where_the_prompts_of_a_recording_part(kvtier: Kvtier, tmp_path: Path) -> None:
    file = tmp_path / "traffic.rec"
    prompts = [join_keys([*KEYS[:3], *KEYS[start : start + 2]]) for start in range(3, 23, 2)]
    write(file, *(of_keys(keys, time=360.0 * at) for at, keys in enumerate(prompts)))
    shown = kvtier("why", "--recording", file, "--prefill-tokens-per-second", 100)
    assert (shown.status, shown.output) == (
        0,
        f"100% of 9 prompts that begin alike part at token {3 * RECORDED_TOKENS}: 6,912 tokens a day, "
        "1 minutes of prefill.\n",
    )
    found = json.loads(kvtier("why", "--recording", file, "--json").output)
    assert [(each["parted"], each["passed"]) for each in found["breakers"]] == [(9, 9)]
    assert found["requests"] == []
    write(tmp_path / "short", of_keys(prompts[0]))
    assert "No prompts" in kvtier("why", "--recording", tmp_path / "short").output
    missing = kvtier("why", "--recording", tmp_path / "missing")
    assert missing.status == 1
    assert "missing: cannot be read" in missing.message


def test_only_one_prompt_is_asked_for(kvtier: Kvtier, tmp_path: Path) -> None:
    refused = kvtier("why", "--token-ids", "1", "--prompt-file", tmp_path / "x")
    assert refused.status == 2
    assert "--prompt-file and --tokens exclude each other" in refused.message
