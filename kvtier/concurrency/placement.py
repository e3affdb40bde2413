"""CPUs, NUMA memory policy and time slices of a thread. Child processes inherit the first two from it.

vLLM binds threads and memory of its workers: OpenMP pins the main thread to one core, ``numactl`` or the CPU
worker binds the memory to one node. A cache process serves all workers, and must inherit neither. Therefore
:func:`remember` records the placement of the server's first process before vLLM binds anything, that is, as
the operator set it (taskset, numactl, cpuset), in an environment variable for the processes below it.

sched_setaffinity(2), set_mempolicy(2), get_mempolicy(2), sched_setattr(2).
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import platform
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

VARIABLE = "_KVTIER_PLACEMENT"

DEFAULT, INTERLEAVE = 0, 3
_POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred many", "weighted interleave")
_MODE_FLAGS = 0xE000
"""MPOL_F_STATIC_NODES and the like, which the kernel keeps in the mode."""
_MEMS_ALLOWED = 4
_POLICY_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""The numbers of set_mempolicy(2) and get_mempolicy(2). Python has no function for them."""
_WORDS, _WORD_BITS = 16, 64
_Mask = ctypes.c_uint64 * _WORDS
_libc = ctypes.CDLL(None, use_errno=True)

SLICE_NANOSECONDS = 100_000
"""The shortest that the kernel grants. Longer than most turns of an event loop."""
_SCHED_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of sched_setattr(2) and sched_getattr(2). Python has no function for them."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""``struct sched_attr``: size, policy, flags, nice, priority, runtime, deadline, period, and two clamps."""
_RESET_ON_FORK = 1


class Placement(NamedTuple):
    """Where a thread runs, and where the memory that it touches first is allocated."""

    cpus: list[int]
    policy: int | None
    """Mode of set_mempolicy(2); ``None`` if the system does not allow asking, as in some containers."""
    nodes: list[int]
    """NUMA nodes of the policy. Empty for the default policy."""

    @classmethod
    def current(cls) -> Placement:
        """Return the placement of the calling thread."""
        policy, nodes = _get_policy(0)
        return cls(sorted(os.sched_getaffinity(0)), policy, nodes)

    def apply(self) -> None:
        """Place the calling thread, as far as the system allows it. Its later children inherit it."""
        try:
            os.sched_setaffinity(0, self.cpus)
        except OSError:  # The cpuset has changed, and has none of these CPUs now.
            with suppress(OSError):
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
        if self.policy is not None:
            _set_policy(self.policy, self.nodes)

    def describe(self) -> dict[str, str]:
        """Return CPUs, memory policy and its nodes in the kernel's list format, as ``0-3,8``."""
        known = dict(enumerate(_POLICIES))
        policy = "unknown" if self.policy is None else known.get(self.policy & ~_MODE_FLAGS, str(self.policy))
        return {
            "cpus": list_format(self.cpus),
            "memory_policy": policy,
            "memory_nodes": list_format(self.nodes or allowed_nodes()),
        }


def remember() -> None:
    """Record the placement of this process, unless the process that started it with multiprocessing did.

    A process that was started otherwise is a server of its own: its operator may have placed it elsewhere.
    """
    if VARIABLE not in os.environ or multiprocessing.parent_process() is None:
        os.environ[VARIABLE] = json.dumps(Placement.current())


def of_server() -> Placement:
    """Return the placement that the server of this process had at the start; by default, the thread's."""
    recorded = os.environ.get(VARIABLE)
    return Placement.current() if recorded is None else Placement(*json.loads(recorded))


def spread_memory() -> Placement:
    """Interleave the memory of this thread and its children over all allowed NUMA nodes.

    By default Linux fills one node first, which an engine that is bound to that node may need. A policy that
    the operator has set is kept, and a host with one node needs none. Return the placement.
    """
    os.environ.pop(VARIABLE, None)  # Children of a cache process have its placement, not that of a server.
    memory_placement().apply()
    return Placement.current()


def memory_placement() -> Placement:
    """Return what :func:`spread_memory` would change the placement of this thread to."""
    placement, nodes = Placement.current(), allowed_nodes()
    if placement.policy == DEFAULT and len(nodes) > 1:
        return placement._replace(policy=INTERLEAVE, nodes=nodes)
    return placement


def allowed_nodes() -> list[int]:
    """Return the NUMA nodes whose memory this process may use (the cpuset's). Empty if that is unknown."""
    policy, nodes = _get_policy(_MEMS_ALLOWED)
    return nodes if policy is not None else []


def list_format(numbers: Iterable[int]) -> str:
    """Return ascending numbers in the kernel's list format, as ``0-3,8``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def _set_policy(policy: int, nodes: list[int]) -> None:
    numbers = _POLICY_CALLS.get(platform.machine())
    if numbers is None:
        return
    mask = _Mask()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # Here and below, the kernel uses one bit less than maxnode.
    bits = ctypes.c_ulong(_WORDS * _WORD_BITS + 1 if nodes else 0)
    _libc.syscall(numbers[0], policy, mask if nodes else None, bits)


def _get_policy(flags: int) -> tuple[int | None, list[int]]:
    numbers = _POLICY_CALLS.get(platform.machine())
    mode, mask = ctypes.c_int(), _Mask()
    bits = ctypes.c_ulong(_WORDS * _WORD_BITS + 1)
    if numbers is None or _libc.syscall(
        numbers[1], ctypes.byref(mode), mask, bits, None, ctypes.c_ulong(flags)
    ):
        return None, []
    nodes = [bit for bit in range(_WORDS * _WORD_BITS) if mask[bit // _WORD_BITS] >> bit % _WORD_BITS & 1]
    return mode.value, nodes


def shorten_slices() -> bool:
    """Give the calling thread short time slices, but not the threads and processes that it starts.

    So the kernel runs it soon after it is woken, on a busy machine as well. A thread that becomes runnable
    while others compute waits until the slice of one of them has ended, 1 to 4 ms. From Linux 6.12 on, a
    thread may have shorter slices than others, and then it preempts them, as long as it has had less than its
    fair share of the CPU (kernel documentation, ``scheduler/sched-eevdf``). Its share, and theirs, are the
    same as before.

    Return whether the kernel did. A thread whose priority or policy is not the default keeps its slices: the
    user has decided how it competes.
    """
    numbers = _SCHED_CALLS.get(platform.machine())
    if numbers is None or os.getpriority(os.PRIO_PROCESS, 0) or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    size = _ATTRIBUTES.size
    wanted = _ATTRIBUTES.pack(size, os.SCHED_OTHER, _RESET_ON_FORK, 0, 0, SLICE_NANOSECONDS, 0, 0, 0, 0)
    if _libc.syscall(numbers[0], 0, wanted, 0):
        return False
    found = ctypes.create_string_buffer(size)
    if _libc.syscall(numbers[1], 0, found, size, 0):
        return False
    # Older kernels ignore the slice, and do not report it.
    return bool(_ATTRIBUTES.unpack(found.raw)[5] == SLICE_NANOSECONDS)
