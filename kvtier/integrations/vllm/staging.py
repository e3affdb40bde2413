"""A worker's end of its staging buffer: memory on the device of its KV that another process has made.

Needs torch, and nothing of vLLM.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import NamedTuple

import torch

from kvtier.arena import ArenaMap
from kvtier.bridge.client import WorkerBridge
from kvtier.bridge.protocol import OfferStaging
from kvtier.errors import ArenaError
from kvtier.integrations.vllm.copies import Memory

logger = logging.getLogger("vllm.kvtier")

OFFER_SECONDS = 60.0
"""How long a worker that starts waits for its buffer. It takes two, or as long as NIXL takes to fail."""
ON_DEVICES = {"cuda"}
"""Where a buffer is worth having. Tests add ``cpu``: all but the kind of the memory is the same there."""

_OPEN_ON_FIRST_USE = 1


class _OnGPU:
    """Memory of a GPU that another process has made, opened for this one."""

    def __init__(self, handle: bytes, length: int, device: torch.device) -> None:
        self._device = device
        self._address = _open_on_gpu(handle, device)
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }
        self._tensor = torch.as_tensor(self, device=device)
        if self._tensor.data_ptr() != self._address:
            raise RuntimeError("torch has made a copy of it")

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes. Not to be used past :meth:`close`."""
        return self._tensor

    def close(self) -> None:
        """Let go of it."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle(ctypes.c_uint64(self._address))


class _Opened(NamedTuple):
    number: int
    memory: ArenaMap | _OnGPU


class StagingBuffer:
    """Asks for a buffer, and opens what it is offered, anew where that was lost; one thread."""

    def __init__(self, bridge: WorkerBridge) -> None:
        self._bridge = bridge
        self._device = torch.device("cpu")
        self._seen: OfferStaging | None = None
        self._opened: _Opened | None = None

    @property
    def number(self) -> int:
        """Of what is open; 0 where nothing is."""
        return 0 if self._opened is None else self._opened.number

    def ask(self, device: torch.device, seconds: float = OFFER_SECONDS) -> None:
        """Want a buffer on the device of the engine's KV, and wait until it is there or said to be none.

        What comes later than in ``seconds`` is opened by :meth:`refresh`.
        """
        if device.type not in ON_DEVICES:
            logger.warning(
                "hand_over.device is cuda, and this engine's KV is in memory of the %s: "
                "chunks are handed over through the first tier",
                device.type,
            )
            return
        self._device = device
        self._bridge.ask_for_staging(_name_of(device))
        offer = self._bridge.await_staging(seconds)
        if offer is None or not offer.number:
            why = "no answer in time" if offer is None else offer.reason
            logger.warning("no staging buffer, chunks are handed over through the first tier: %s", why)
        self.refresh()

    def refresh(self) -> None:
        """Open what has been offered since, in the place of what was open. Not amid copies."""
        offer = self._bridge.staging
        if offer is self._seen:
            return
        self._seen = offer
        self.close()
        if offer is None or not offer.number:
            return
        try:
            self._opened = self._open(offer)
        except (OSError, ValueError, RuntimeError, ArenaError) as error:
            logger.warning("the staging buffer cannot be opened, chunks go through the first tier: %s", error)
            return
        self._bridge.open_staging(offer.number)

    def memory(self, number: int) -> Memory | None:
        """The buffer, if it is the one of this number."""
        opened = self._opened
        return opened.memory if opened is not None and opened.number == number else None

    def close(self) -> None:
        """Let go of it. Harmless when repeated."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.memory.close()

    def _open(self, offer: OfferStaging) -> _Opened:
        if self._device.type == "cuda":
            return _Opened(offer.number, _OnGPU(offer.handle, offer.length, self._device))
        return _Opened(offer.number, ArenaMap(os.open(offer.handle, os.O_RDWR), offer.length))


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


def _open_on_gpu(handle: bytes, device: torch.device) -> int:
    """Where memory of another process lies for this one.

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    cuda.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # Makes the device's context this thread's.
        result = cuda.cuIpcOpenMemHandle_v2(
            ctypes.addressof(address), _Handle.from_buffer_copy(handle), _OPEN_ON_FIRST_USE
        )
    if result:
        raise RuntimeError(f"cuIpcOpenMemHandle gives CUDA error {result}")
    return address.value


def _name_of(device: torch.device) -> str:
    """As ``CUDA_VISIBLE_DEVICES`` takes it; empty for the host."""
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
