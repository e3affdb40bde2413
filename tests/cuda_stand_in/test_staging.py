"""Staging buffers: memory on a device that one process allocates and another one opens."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtier.integrations.vllm.staging import _OnGPU
from kvtier.transports.nixl.worker import allocate_on_gpu
from tests.rigs.cuda_stand_in.building import build
from tests.rigs.cuda_stand_in.control import StandIn

LENGTH = 1 << 16
DEVICE = torch.device("cuda")
OWNER = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from kvtier.transports.nixl.worker import allocate_on_gpu
address, handle = allocate_on_gpu(int(sys.argv[2]))
print(handle.hex(), flush=True)
sys.stdin.readline()
print(ctypes.string_at(address, 4).hex(), flush=True)
"""


def map_tensor(memory: Any, device: torch.device) -> torch.Tensor:
    """Stand in for ``torch.as_tensor``, which needs a torch with CUDA for memory on a device."""
    assert device.type == "cuda"
    description = memory.__cuda_array_interface__
    (length,), (address, _) = description["shape"], description["data"]
    return torch.frombuffer((ctypes.c_ubyte * length).from_address(address), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "as_tensor", map_tensor)


def in_thread(function: Callable[[], object]) -> None:
    """Run a function in a new thread, which has no context of CUDA."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("stand_in", ["late"], indirect=True)
def test_memory_is_shared_with_another_process(stand_in: StandIn) -> None:
    library = build("cuda_stand_in") / "libcuda.so.1"
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(library), str(LENGTH)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        handle = bytes.fromhex(owner.stdout.readline())
        memory = _OnGPU(handle, LENGTH, DEVICE)
        stand_in.fill(memory.tensor(), 7)
        stand_in.synchronize()
        written, _ = owner.communicate("\n")
        assert written.strip() == "07070707"
        memory.close()
    assert stand_in.calls().count("cuIpcCloseMemHandle") == 1


def test_close_waits_for_the_device(stand_in: StandIn) -> None:
    _, handle = allocate_on_gpu(LENGTH)
    memory = _OnGPU(handle, LENGTH, DEVICE)
    stand_in.fill(memory.tensor(), 7)
    memory.close()


def test_opening_in_a_thread_without_a_context(stand_in: StandIn) -> None:
    _, handle = allocate_on_gpu(LENGTH)
    in_thread(lambda: _OnGPU(handle, LENGTH, DEVICE).close())
    assert stand_in.calls()[-1] == "cuIpcCloseMemHandle"


@pytest.mark.parametrize("stand_in", ["late"], indirect=True)
def test_each_call_of_an_allocation_fails(stand_in: StandIn) -> None:
    allocate_on_gpu(LENGTH)
    for at, name in enumerate(stand_in.calls(), len(stand_in.calls()) + 1):
        stand_in.fail(at)
        with pytest.raises(RuntimeError, match=f"{name} failed with CUDA error 2"):
            allocate_on_gpu(LENGTH)
        stand_in.reset("late")
        allocate_on_gpu(LENGTH)


def test_memory_is_closed_again_if_torch_cannot_map_it(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = allocate_on_gpu(LENGTH)
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(LENGTH, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="copied"):
        _OnGPU(handle, LENGTH, DEVICE)
    assert stand_in.calls()[-1] == "cuIpcCloseMemHandle"


def test_failed_open_names_the_call_and_its_error(stand_in: StandIn) -> None:
    _, handle = allocate_on_gpu(LENGTH)
    stand_in.fail(len(stand_in.calls()) + 1)
    with pytest.raises(RuntimeError, match="cuIpcOpenMemHandle failed with CUDA error 2"):
        _OnGPU(handle, LENGTH, DEVICE)
    with pytest.raises(RuntimeError, match="cuIpcOpenMemHandle failed with CUDA error 400"):
        _OnGPU(bytes(64), LENGTH, DEVICE)
