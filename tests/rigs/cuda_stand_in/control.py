"""The stand-in for CUDA, as tests control it. See csrc/tests/cuda_stand_in/stand_in.hpp."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from tests.rigs.cuda_stand_in.building import SANITIZER

PACES = ("early", "late", "random", "stuck")
"""When operations run: at once, only when the host needs them, or at random one or the other.

If the device is stuck, only if the host waits for them, and not if it just keeps asking.
"""
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700
_ROOM = 1 << 20


class Operation(NamedTuple):
    """A kernel or a copy."""

    number: int
    stream: int
    what: str
    after: tuple[int, ...]
    """The numbers of those in other streams that it waits for, unless the host knew that they were done."""


KERNEL = "a kernel of the engine"
TRANSFER = "a copy by the copy engines"
"""Between a bounce buffer and the arena: the end of a save."""


class StandIn:
    """A stand-in that is loaded into this process."""

    def __init__(self, folder: Path) -> None:
        # Has the name libcuda.so.1: from now on, it is what that name stands for in this process.
        self._library: Any = ctypes.CDLL(str(folder / "libcuda.so.1"))
        self.module = _load(next(folder.glob("_native_cuda.*.so")))

    def reset(self, pace: str, devices: int = 1) -> None:
        """Make a new machine, without streams, events and memory."""
        self._library.stand_in_reset(PACES.index(pace), 1, devices)

    def finish(self) -> list[str]:
        """Finish all operations, and return what was wrong since the reset."""
        return self._lines(self._library.stand_in_finish)

    def calls(self) -> list[str]:
        """Return the names of all calls of CUDA since the reset."""
        return self._lines(self._library.stand_in_calls)

    def trace(self, first: int = 0) -> list[Operation]:
        """Return the kernels and copies since the reset, from one on, in the order of their calls."""
        found = []
        for line in self._lines(self._library.stand_in_trace, ctypes.c_size_t(first)):
            what, _, after = line.rpartition(":")
            number, stream, name = what.split(" ", 2)
            found.append(Operation(int(number), int(stream), name, tuple(map(int, after.split()))))
        return found

    def held(self) -> dict[int, set[int]]:
        """Return for each kernel of the engine that waits for saves: its number, and their transfers."""
        trace = self.trace()
        copies = {operation.number for operation in trace if operation.what == TRANSFER}
        waits = {each.number: copies.intersection(each.after) for each in trace if each.what == KERNEL}
        return {number: waited for number, waited in waits.items() if waited}

    def fail(self, call: int, error: int = OUT_OF_MEMORY, *, lasting: bool = False) -> None:
        """Let the call with this number since the reset fail; 0: none. ``lasting``: and all later ones."""
        self._library.stand_in_fail(ctypes.c_size_t(call), error, lasting)

    def fail_operation(self, number: int) -> None:
        """Let the operation with this number since the reset fail when it runs."""
        self._library.stand_in_fail_operation(ctypes.c_size_t(number))

    def alive(self) -> dict[str, int]:
        """Return how many streams, events, pinned allocations and registrations exist, without zeros."""
        counts = (ctypes.c_size_t * 5)()
        self._library.stand_in_alive(counts)
        names = ("streams", "events", "allocated", "registered", "buffers")
        return {name: count for name, count in zip(names, counts, strict=True) if count}

    def has_context(self, device: int) -> bool:
        """Return whether this process has a context on a device."""
        return bool(self._library.stand_in_has_context(device) & 1)

    def synchronize(self) -> None:
        """Wait for all operations, as ``torch.cuda.synchronize`` does."""
        self._library.stand_in_synchronize()

    def add_device(self, tensor: torch.Tensor) -> DeviceMemory:
        """Declare the memory of a tensor to be device memory, until the result is closed."""
        storage = tensor.untyped_storage()
        return DeviceMemory(self._library, storage.data_ptr(), storage.nbytes())

    def on_host(self, view: torch.Tensor | memoryview, *, writes: bool) -> None:
        """Report it if an operation on these bytes may be running, as the host now reads or writes them."""
        tensor = view if isinstance(view, torch.Tensor) else torch.frombuffer(view, dtype=torch.uint8)
        address, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        self._library.stand_in_on_host(address, length, writes)

    def fill(self, tensor: torch.Tensor, value: int, stream: int = 0) -> None:
        """Have a kernel of the engine write a value to a tensor's whole storage."""
        storage = tensor.untyped_storage()
        address, length = ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())
        self._library.stand_in_fill(ctypes.c_void_p(stream), address, length, value)

    def write(self, tensor: torch.Tensor, value: int, stream: int = 0) -> int:
        """Have a kernel of the engine write a value to a contiguous tensor; return its number."""
        address, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        self._library.stand_in_fill(ctypes.c_void_p(stream), address, length, value)
        return self.trace()[-1].number

    def put(self, tensor: torch.Tensor, source: torch.Tensor, *, alone: bool = True) -> None:
        """Have a kernel of the engine copy ``source`` to a tensor of the same size, both contiguous.

        ``alone``: report it if another operation may be reading these bytes at the same time.
        """
        target, data = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(source.data_ptr())
        self._library.stand_in_write(None, target, data, ctypes.c_size_t(tensor.nbytes), alone)

    def wait_for_engine(self) -> None:
        """Wait for the kernels of the engine, as it does for sampled tokens."""
        self._library.stand_in_wait_for_stream(None)

    def _lines(self, function: Any, *arguments: Any) -> list[str]:
        text = ctypes.create_string_buffer(_ROOM)
        function(text, ctypes.c_size_t(_ROOM), *arguments)
        return text.value.decode().splitlines()


class DeviceMemory:
    """Memory that an engine has on the device."""

    def __init__(self, library: Any, address: int, length: int) -> None:
        self._library = library
        self._address = ctypes.c_void_p(address)
        library.stand_in_add_device(self._address, ctypes.c_size_t(length))

    def free(self) -> None:
        """Give it up without asking CUDA, as engines do: reports operations that may still use it."""
        self._library.stand_in_free_device(self._address)

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


def _load(path: Path) -> ModuleType:
    """Return the extension of this file, without making it the one that kvtier imports."""
    spec = importlib.util.spec_from_file_location("kvtier._native_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    flags = sys.getdlopenflags()
    if not SANITIZER:  # Sanitizers need the usual order.
        # It finds the stand-in before the CUDA runtime that torch has loaded for all, if built for CUDA.
        sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        module = importlib.util.module_from_spec(spec)
    finally:
        sys.setdlopenflags(flags)
    spec.loader.exec_module(module)
    return module
