"""What benchmarks/replay_vllm.py sends."""

from __future__ import annotations

from pathlib import Path

from benchmarks.replay_vllm import CHUNK_TOKENS, parsed, read_plan
from tests.lab.simulation.making import mooncake_line


def test_replay_of_a_part_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    sessions = {"a": [1, 2, 3, 4], "b": [1, 2, 9, 8], "c": [7, 7]}
    lines = [
        mooncake_line(1000 * at, ids[: 2 + at], session=name)
        for at in range(5)
        for name, ids in sessions.items()
    ]
    trace.write_text("".join(lines))
    options = ["--sessions", "2", "--start", "1", "--span", "3", "--speed", "2", "--blocks", "2"]
    plan = read_plan(parsed([str(trace), *options]))
    assert [planned.time for planned in plan] == [0, 0, 0.5, 0.5, 1, 1]
    assert len({planned.session for planned in plan}) == 2
    assert [list(planned.chunks) for planned in plan[:3]] == [[2, 3], [2, 9], [2, 4]]
    first, second, third = (planned.prompt(number) for number, planned in enumerate(plan[:3]))
    shared = [one == other for one, other in zip(first, second, strict=True)]
    assert all(shared[:CHUNK_TOKENS])
    assert not all(shared[CHUNK_TOKENS : 2 * CHUNK_TOKENS])
    assert first[:CHUNK_TOKENS] == third[:CHUNK_TOKENS]
    assert first[2 * CHUNK_TOKENS :] != third[2 * CHUNK_TOKENS :]


def test_sessions_without_a_name_are_those_of_the_first_block(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(mooncake_line(at, [at % 3, 10 + at]) for at in range(9)))
    plan = read_plan(parsed([str(trace), "--sessions", "2", "--start", "0", "--blocks", "1"]))
    assert {planned.chunks[0] for planned in plan} == {0, 1}
