"""Every call of CUDA fails once: copies fail with one error, and nothing stays behind."""

from __future__ import annotations

import logging

import pytest

from kvtier.integrations.vllm.copies import CudaCopies
from kvtier.memory.arena import ArenaMap
from tests.cuda_stand_in.test_copies import SIMPLE, Engine, saved
from tests.native.test_copy import chunks
from tests.rigs.cuda_stand_in.control import ILLEGAL_ADDRESS, OUT_OF_MEMORY, StandIn
from tests.rigs.pinning import pin

RELEASES = ("cudaHostUnregister", "cudaFreeHost", "cudaFree", "cudaStreamDestroy", "cudaEventDestroy")
"""Their errors cannot be handled, and are ignored."""


def use_everything(machine: StandIn, arena: ArenaMap) -> list[str]:
    """Save, load and shut down as an engine does; return the errors."""
    engine = Engine(machine, SIMPLE)
    errors: list[str] = []
    try:
        copying = CudaCopies(SIMPLE, 0, engine.pages)
        errors += [] if pin(copying, arena) else ["not pinned"]
        errors += _copy(copying, machine, arena)
        _close(copying, arena, errors)
    except RuntimeError as error:
        errors.append(str(error))
    finally:
        machine.fail(0)
        for part in engine.memory:
            part.free()
    return errors


def _copy(copying: CudaCopies, machine: StandIn, arena: ArenaMap) -> list[str]:
    errors = []
    selected = chunks(SIMPLE, 2)
    for copy, part in ((copying.save, selected[:1]), (copying.load, selected[2:3])):
        try:
            ticket = copy(arena, part)
            while not copying.done(ticket):
                pass
        except RuntimeError as error:
            errors.append(str(error))
        machine.on_host(arena.tensor(), writes=True)
    return errors


def _close(copying: CudaCopies, arena: ArenaMap, errors: list[str]) -> None:
    """Close during a copy. Its error is reported afterwards, as the connector polls once more."""
    try:
        ticket = copying.save(arena, chunks(SIMPLE, 2)[:1])
    except RuntimeError as error:
        errors.append(str(error))
        ticket = 0
    copying.close()
    try:
        assert copying.done(ticket)
    except RuntimeError as error:
        errors.append(str(error))


def test_nothing_fails_without_a_fault(stand_in: StandIn, arena: ArenaMap) -> None:
    assert use_everything(stand_in, arena) == []
    assert saved(SIMPLE, arena, chunks(SIMPLE, 2)[:1])


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "device lost"])
@pytest.mark.parametrize("stand_in", ["late"], indirect=True)
def test_each_call_fails(
    stand_in: StandIn,
    arena: ArenaMap,
    lasting: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(ArenaMap, "take_large_pages", lambda _: 0)  # Takes most of the time.
    at = 0
    while True:
        at += 1
        stand_in.reset("late")
        stand_in.fail(at, ILLEGAL_ADDRESS if lasting else OUT_OF_MEMORY, lasting=lasting)
        errors = use_everything(stand_in, arena)
        made = stand_in.calls()
        if len(made) < at:
            break
        assert not stand_in.finish(), (at, made[at - 1])
        assert not stand_in.alive(), (at, made[at - 1])
        if not lasting and made[at - 1] not in (*RELEASES, "cudaMalloc"):  # Then copies are direct.
            assert len(errors) == 1, (at, made[at - 1], errors)
    stand_in.reset("late")


def test_each_operation_fails(stand_in: StandIn, arena: ArenaMap, request: pytest.FixtureRequest) -> None:
    assert use_everything(stand_in, arena) == []
    for operation in range(1, len(stand_in.trace()) + 1):
        stand_in.reset(request.node.callspec.params["stand_in"])
        stand_in.fail_operation(operation)
        assert use_everything(stand_in, arena)
        assert not stand_in.finish()
        assert not stand_in.alive()


@pytest.mark.parametrize("stand_in", ["late"], indirect=True)
def test_without_memory_for_bounce_buffers(
    stand_in: StandIn, arena: ArenaMap, caplog: pytest.LogCaptureFixture
) -> None:
    assert use_everything(stand_in, arena) == []
    calls = stand_in.calls()
    for at in (number for number, call in enumerate(calls, 1) if call == "cudaMalloc"):
        stand_in.reset("late")
        stand_in.fail(at)
        caplog.clear()
        assert use_everything(stand_in, arena) == []
        assert "lower --gpu-memory-utilization" in caplog.text
        assert saved(SIMPLE, arena, chunks(SIMPLE, 2)[:1])
