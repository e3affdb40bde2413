"""Worker's end of its staging buffer: memory on the device of its KV cache, allocated by another process.

Depends on torch but not on vLLM.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import NamedTuple

import torch

from kvtier.bridge.client import WorkerBridge
from kvtier.bridge.protocol import OfferStaging, OpenedStaging
from kvtier.errors import ArenaError
from kvtier.integrations.vllm.copies import Memory
from kvtier.memory.arena import ArenaMap

logger = logging.getLogger("vllm.kvtier")

OFFER_SECONDS = 60.0
"""How long a starting worker waits for its buffer. It takes about 2 s, or as long as NIXL takes to fail."""
ON_DEVICES = {"cuda"}
"""Device types that benefit from a buffer. Tests add ``cpu``, which only differs in the type of memory."""

_OPEN_ON_FIRST_USE = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``, the only flag, and required."""


class _OnGPU:
    """GPU memory of another process, opened in this one."""

    def __init__(self, handle: bytes, length: int, device: torch.device) -> None:
        self._device = device
        self._address = _open_on_gpu(handle, device)
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }
        try:
            self._tensor = self._map()
        except RuntimeError:
            self.close()
            raise

    def _map(self) -> torch.Tensor:
        tensor = torch.as_tensor(self, device=self._device)
        if tensor.data_ptr() != self._address:
            raise RuntimeError("torch has copied the memory instead of mapping it")
        return tensor

    def tensor(self) -> torch.Tensor:
        """Return the whole memory as a byte tensor. Do not use it after :meth:`close`."""
        return self._tensor

    def close(self) -> None:
        """Close the memory."""
        with torch.cuda.device(self._device):
            # No copy may use the address any more.
            torch.cuda.synchronize()
            ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle(ctypes.c_uint64(self._address))


class _Opened(NamedTuple):
    number: int
    memory: ArenaMap | _OnGPU


class StagingBuffer:
    """Requests a buffer, opens it, and reopens it after a loss. Not thread-safe."""

    def __init__(self, bridge: WorkerBridge) -> None:
        self._bridge = bridge
        self._device = torch.device("cpu")
        self._seen: OfferStaging | None = None
        self._opened: _Opened | None = None

    def request(self, device: torch.device, seconds: float = OFFER_SECONDS) -> None:
        """Request a buffer on the device of the engine's KV cache, and wait for the answer.

        :meth:`refresh` opens a buffer that is offered after ``seconds``.
        """
        if device.type not in ON_DEVICES:
            logger.warning(
                "kv_transfer.device is cuda, but this engine's KV cache is on device %s: "
                "KV transfers use the first tier",
                device.type,
            )
            return
        self._device = device
        self._bridge.request_staging(_name_of(device))
        offer = self._bridge.await_staging(seconds)
        if offer is None or not offer.number:
            reason = "no answer in time" if offer is None else offer.reason
            logger.warning("no staging buffer, KV transfers use the first tier: %s", reason)
        self.refresh()

    def refresh(self) -> None:
        """Open the last offered buffer, and close the previous one. Do not call during copies."""
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
            logger.warning("cannot open the staging buffer, KV transfers use the first tier: %s", error)
            return
        self._bridge.send(OpenedStaging(offer.number))

    def memory(self, number: int) -> Memory | None:
        """Return the open buffer if it has this number."""
        opened = self._opened
        return opened.memory if opened is not None and opened.number == number else None

    def close(self) -> None:
        """Close the buffer. Idempotent."""
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
    """Open another process's GPU memory; return its address in this process.

    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    cuda.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # Makes the device's context current in this thread.
        result = cuda.cuIpcOpenMemHandle_v2(
            ctypes.addressof(address), _Handle.from_buffer_copy(handle), _OPEN_ON_FIRST_USE
        )
    if result:
        raise RuntimeError(f"cuIpcOpenMemHandle failed with CUDA error {result}")
    return address.value


def _name_of(device: torch.device) -> str:
    """Return the device's name for ``CUDA_VISIBLE_DEVICES``; empty for the host."""
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
