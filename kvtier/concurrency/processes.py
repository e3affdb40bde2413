"""Limits and signals of this process, and child processes.

A child inherits CPU affinity, memory policy, scheduling policy and signal mask from the thread that starts
it, and these belong to that thread alone. So a thread that is started for the purpose sets them and starts
the child: no code runs between fork and exec, which would not be safe with threads.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvtier.concurrency import placement

LACKING = {
    errno.EMFILE: "raise this process's limit (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "raise the limit of the host (sysctl fs.file-max)",
}
"""What a call fails with that finds no descriptor left, and what to do about it."""
PRIVATE_UMASK = 0o077
ENGINE_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", placement.VARIABLE)
"""Prefixes of variables that concern the engine only: they bind or size its thread pools."""
_REAL_TIME = (os.SCHED_FIFO, os.SCHED_RR)


def describe_lack(error: OSError) -> str:
    """Return an error that is one of :data:`LACKING`, with its remedy."""
    code = error.errno or 0
    return f"{os.strerror(code)}: {LACKING[code]}"


def raise_file_limit(needed: int = sys.maxsize) -> int:
    """Raise the soft limit (usually 1024) to ``needed``, or as far as permitted; return the limit then."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    allowed = min(needed, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] if allowed == hard else allowed, limits[1]))
    return max(soft, allowed)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that cleanup runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
