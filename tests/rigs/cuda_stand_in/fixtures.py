"""Fixtures of all tests in Python that use the stand-in for CUDA."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from kvtier import native
from tests.rigs.cuda_stand_in.building import build
from tests.rigs.cuda_stand_in.control import PACES, StandIn


@cache
def loaded() -> StandIn:
    """Build and load the stand-in, once in each process: it cannot be unloaded."""
    return StandIn(build("cuda_stand_in", "native_cuda_on_stand_in"))


class Stream:
    """The engine's stream, as torch has it: the default stream of the device."""

    cuda_stream = 0

    def synchronize(self) -> None:
        """Wait for its operations."""
        loaded().synchronize()


def use(machine: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kvtier and torch use the stand-in as CUDA."""
    monkeypatch.setattr(native, "cuda", machine.module, raising=False)
    patched = SimpleNamespace(
        current_stream=lambda *_: Stream(),
        synchronize=lambda *_: machine.synchronize(),
        device=lambda _: nullcontext(),
    )
    for name, function in vars(patched).items():
        monkeypatch.setattr(torch.cuda, name, function)


@pytest.fixture(params=[pace for pace in PACES if pace != "stuck"])
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Return the stand-in, at each pace. In the end nothing may be wrong, and nothing may be left."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    machine = loaded()
    machine.reset(request.param)
    use(machine, monkeypatch)
    yield machine
    gc.collect()
    if wrong := machine.finish():
        pytest.fail("\n".join(wrong))
    if left := machine.alive():
        pytest.fail(f"left behind: {left}")
