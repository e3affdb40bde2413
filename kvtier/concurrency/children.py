"""Start child processes with surroundings that are set on purpose, not inherited from the starting thread.

A child inherits CPU affinity, memory policy, scheduling policy and signal mask from the thread that starts
it, and these belong to that thread alone. A thread that is started for the purpose sets them and starts the
child, so that no code runs between fork and exec, which would not be safe with threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtier.concurrency import placement
from kvtier.concurrency.descriptors import raise_file_limit

PRIVATE_UMASK = 0o077
ENGINE_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", placement.VARIABLE)
"""Prefixes of variables that concern the engine only: they bind or size its thread pools."""
_REAL_TIME = (os.SCHED_FIFO, os.SCHED_RR)


def start(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    **options: Any,  # noqa: ANN401 - as Popen takes them
) -> subprocess.Popen[bytes]:
    """Start a child process; ``options`` are those of ``Popen``. Blocks for some milliseconds.

    The child has:

    - the CPUs and the memory policy of the server before vLLM bound its threads and memory;
    - no blocked signals and no real-time policy; nice value and OOM score are those of this process;
    - umask 077;
    - this process's working directory, so that relative paths in settings mean the same;
    - of this process's descriptors only those in ``pass_fds``, and none of the engine's variables for OpenMP
      and MKL. Other variables are kept, ``LD_PRELOAD`` included.

    Raises ``OSError``.
    """
    environment = {
        name: value
        for name, value in (os.environ if env is None else env).items()
        if not name.startswith(ENGINE_VARIABLES)
    }

    def spawn() -> subprocess.Popen[bytes]:
        placement.of_server().apply()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.sched_getscheduler(0) in _REAL_TIME:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return subprocess.Popen(command, env=environment, umask=PRIVATE_UMASK, **options)

    with ThreadPoolExecutor(1, thread_name_prefix="kvtier-start") as thread:
        return thread.submit(spawn).result()


def python(*arguments: str) -> list[str]:
    """Return the command that runs Python without modules of the working directory."""
    return [sys.executable, "-P", *arguments]


def settle() -> None:
    """Set what only the child itself can set. Call first, from the main thread.

    Undo ignored signals, which exec keeps, for example those of ``nohup``, and raise the limit of open files.
    """
    raise_file_limit()
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python itself ignores these.
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
