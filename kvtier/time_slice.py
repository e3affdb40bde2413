"""Ask for short time slices on a CPU, which come soon, for a thread that others wait for.

Linux schedules by virtual deadlines (EEVDF): of the threads that have had no more than their share, the one
with the shortest time slice runs first, and interrupts one that computes. A thread's share stays the same.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct

logger = logging.getLogger("kvtier")

SLICE_SECONDS = 0.0001
"""The shortest that there is; by default a slice is 1 to 3 ms."""
_RESET_ON_FORK = 0x01
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""``struct sched_attr`` of sched_setattr(2): size, policy, flags, nice, priority, and three times."""


def ask_for_short_time_slices() -> bool:
    """Have the calling thread run soon after it wakes, but not the threads and processes that it starts.

    Returns whether the system has accepted that; before Linux 6.12 it has no effect. No privilege is needed.
    A thread with a negative nice value or another policy than the normal one has been given a priority: it is
    left alone.
    """
    number, nice = _SCHED_SETATTR.get(os.uname().machine), os.getpriority(os.PRIO_PROCESS, 0)
    if number is None or nice < 0 or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nanoseconds = round(SLICE_SECONDS * 1e9)
    wanted = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, nanoseconds, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.create_string_buffer(wanted), 0) == 0:
        return True
    logger.info("no short time slices: sched_setattr: %s", os.strerror(ctypes.get_errno()))
    return False
