from __future__ import annotations

from collections import Counter

import pytest

from soak import schedule
from soak.schedule import CALM_SHARE, GAP_SECONDS, HOSTS, KINDS, Fault

TEN_MINUTES = 600.0
SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_determines_the_timeline(seed: int) -> None:
    created = schedule.make(seed, TEN_MINUTES, ["tcp", "nixl"])
    assert created == schedule.make(seed, TEN_MINUTES, ["tcp", "nixl"])
    other = schedule.make(seed + 1, TEN_MINUTES, ["tcp", "nixl"])
    assert created.phases[0].faults != other.phases[0].faults
    assert created.phases[0].turns != other.phases[0].turns
    assert created.conversations != other.conversations


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_of_fault_occurs_in_ten_minutes(seed: int) -> None:
    phases = schedule.make(seed, TEN_MINUTES, ["tcp", "nixl"]).phases
    counts = [Counter(fault.kind for fault in phase.faults) for phase in phases]
    for kind, about in KINDS.items():
        assert sum(count[kind] for count in counts) > 0
        if about.transport is not None:
            assert not [
                phase for phase in phases if phase.transport != about.transport and kind in str(phase)
            ]


def test_faults_of_a_target_do_not_overlap_and_end_early() -> None:
    for seed in SEEDS:
        for phase in schedule.make(seed, TEN_MINUTES, ["tcp", "nixl"]).phases:
            last: dict[str, Fault] = {}
            for fault in phase.faults:
                before = last.get(fault.target)
                assert before is None or fault.at >= round(before.at + before.seconds + GAP_SECONDS, 3) - 0.01
                assert fault.at + fault.seconds <= schedule.last_fault_seconds(phase.seconds) + 0.01
                last[fault.target] = fault
            assert last.keys() >= {f"cache-{host}" for host in range(HOSTS)}


def test_short_run_has_a_calm_end() -> None:
    assert schedule.last_fault_seconds(30.0) == 30.0 * (1 - CALM_SHARE)


def test_requests_belong_to_conversations_and_are_ordered() -> None:
    created = schedule.make(1, 60.0, ["tcp"])
    (phase,) = created.phases
    probes = {*phase.probes[0], *phase.probes[1]}
    assert len(probes) == 2 * schedule.PROBES * HOSTS
    assert [turn.at for turn in phase.turns] == sorted(turn.at for turn in phase.turns)
    assert any(turn.abort_after is not None for turn in phase.turns)
    for turn in phase.turns:
        assert turn.conversation not in probes
        assert 0 <= turn.exchange < len(created.conversations[turn.conversation].exchanges)
        assert turn.at < phase.seconds


def test_long_fault_of_one_target_does_not_delay_those_of_others() -> None:
    for seed in SEEDS:
        for phase in schedule.make(seed, TEN_MINUTES, ["tcp", "nixl"]).phases:
            assert [fault.at for fault in phase.faults] == sorted(fault.at for fault in phase.faults)
            ends = [fault.at + fault.seconds for fault in phase.faults]
            assert max(ends) > schedule.last_fault_seconds(phase.seconds) - 15.0, "none ends the timeline"


def test_some_requests_name_an_unlisted_address() -> None:
    turns = [turn for phase in schedule.make(1, TEN_MINUTES, ["tcp"]).phases for turn in phase.turns]
    assert 0.5 < sum(turn.hinted for turn in turns) / len(turns) / schedule.HINTED_SHARE < 2.0


def test_long_stops_are_rarer_than_others() -> None:
    faults = schedule.make(1, 6 * TEN_MINUTES, ["tcp"]).phases[0].faults
    kinds = Counter(fault.kind for fault in faults)
    assert 0 < kinds["stop-engine-long"] <= kinds["stop-engine"] / 3
    assert all(fault.seconds > 60.0 for fault in faults if fault.kind == "stop-engine-long")
