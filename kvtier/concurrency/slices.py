"""Short time slices, so that the kernel runs a thread soon after it is woken, on a busy machine as well.

A thread that becomes runnable while others compute waits until the slice of one of them has ended, 1 to 4 ms.
From Linux 6.12 on, a thread may have shorter slices than others, and then it preempts them, as long as it has
had less than its fair share of the CPU (kernel documentation, ``scheduler/sched-eevdf``). Its share, and
theirs, are the same as before.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_NANOSECONDS = 100_000
"""The shortest that the kernel grants. Longer than most turns of an event loop."""

_SET_AND_GET = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of sched_setattr(2) and sched_getattr(2). Python has no function for them."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""``struct sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period, and two clamps."""
_RESET_ON_FORK = 1


def shorten_slices() -> bool:
    """Give the calling thread short slices, but not the threads and processes that it starts.

    Return whether the kernel did. A thread whose priority or policy is not the default keeps its slices: the
    user has decided how it competes.
    """
    numbers = _SET_AND_GET.get(platform.machine())
    if numbers is None or os.getpriority(os.PRIO_PROCESS, 0) or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    system_call = ctypes.CDLL(None).syscall
    size = _ATTRIBUTES.size
    wanted = _ATTRIBUTES.pack(size, os.SCHED_OTHER, _RESET_ON_FORK, 0, 0, SLICE_NANOSECONDS, 0, 0, 0, 0)
    if system_call(numbers[0], 0, wanted, 0):
        return False
    found = ctypes.create_string_buffer(size)
    if system_call(numbers[1], 0, found, size, 0):
        return False
    # Older kernels ignore the slice, and do not report it.
    return bool(_ATTRIBUTES.unpack(found.raw)[5] == SLICE_NANOSECONDS)
