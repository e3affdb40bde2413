"""Fork processes of tests from a parent that has imported what they need.

They start at once, where an interpreter needs a second of CPU to import kvtier, and many more for vLLM. Each
does what ``python -m`` does after the imports. That commands start as users start them is tested in
``tests/bridge``, ``tests/cli/test_cli_serve.py``, ``tests/fleet/controller/test_serve.py`` and
``tests/fleet/proxy``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
IMPORTS = "tests.rigs.imported_once"
PYTHONPATH = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
"""For the parent, which silently skips modules that it cannot import. Another vLLM may be in front."""

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    # Spinning threads gain nothing with a small model, and cost much on a machine with few cores.
    "OMP_NUM_THREADS": "1",
    # Otherwise each worker of an engine would claim a NUMA node.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONPATH": PYTHONPATH,
}
"""Of every process that runs an engine."""

_imported: list[str] = []
"""What the running parent has imported."""


def forks(imports: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> ForkServerContext:
    """Return the context that forks the processes. The first call starts the parent, which takes a while.

    The parent imports these modules, too, with these environment variables. If it runs without them, another
    takes its place, and the exit codes of the processes of the first are lost. So tests that need more come
    first on their worker: conftest.py.
    """
    context = multiprocessing.get_context("forkserver")
    if not _imported or not set(imports).issubset(_imported):
        if _imported:
            _end_parent()
        _imported[:] = dict.fromkeys([*imports, *_imported, IMPORTS])
        context.set_forkserver_preload(list(_imported))
        with _environment({**(variables or {}), "PYTHONPATH": PYTHONPATH}):
            forkserver.ensure_running()
    return context


def forks_with_vllm() -> ForkServerContext:
    """Return the context of a parent that has imported vLLM: engines start fast enough for one per test."""
    return forks(["torch", "tests.rigs.vllm.imported_once"], VLLM_ENVIRONMENT)


class Forked:
    """A forked process, with the interface of a ``subprocess.Popen`` in text mode."""

    def __init__(
        self,
        target: Callable[..., object],
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> None:
        """Call a function of a module in a new process.

        ``environment`` replaces that of this process. The streams are as in ``subprocess.Popen``: a file,
        ``PIPE``, ``DEVNULL``, or by default those of this process, except that stdin is empty.
        """
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        with contextlib.ExitStack() as theirs:
            streams: list[Connection | None] = [None]
            if stdin == subprocess.PIPE:
                reading, writing = os.pipe()
                streams[0] = theirs.enter_context(Connection(reading))
                self.stdin = os.fdopen(writing, "w")
            for name, file, inherited in (("stdout", stdout, 1), ("stderr", stderr, 2)):
                if file == subprocess.PIPE:
                    reading, descriptor = os.pipe()
                    setattr(self, name, os.fdopen(reading))
                else:
                    descriptor = _duplicate(inherited if file is None else file)
                streams.append(theirs.enter_context(Connection(descriptor)))
            variables = dict(os.environ if environment is None else environment)
            self._process: ForkServerProcess = forks().Process(
                target=_call, args=(target, tuple(arguments), variables, streams)
            )
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the exit; return what is left of stdout and of stderr, ``""`` for one that is no pipe."""
        if self.stdin is not None:
            self.stdin.close()
        output: dict[IO[str] | None, str] = {}

        def read(stream: IO[str]) -> None:
            with stream:
                output[stream] = stream.read()

        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None and not pipe.closed]
        readers = [threading.Thread(target=read, args=(pipe,), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return output.get(self.stdout, ""), output.get(self.stderr, "")


def python(module: str, *arguments: str, **options: Any) -> Forked:
    """Run ``python -m MODULE ARGUMENTS`` in a forked process. ``options`` are those of :class:`Forked`."""
    return Forked(run_module, (module, *arguments), **options)


def run_module(module: str, *arguments: str) -> None:
    """Run a module as ``python -m`` does."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _call(
    target: Callable[..., object],
    arguments: tuple[object, ...],
    environment: Mapping[str, str],
    streams: Sequence[Connection | None],
) -> None:
    """Main function of the process."""
    for number, stream in enumerate(streams):
        if stream is not None:
            os.dup2(stream.fileno(), number)
            stream.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    # As an interpreter does at its start.
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    target(*arguments)


def _end_parent() -> None:
    parent: Any = vars(forkserver)["_forkserver"]
    # It would wait for its processes.
    os.kill(parent._forkserver_pid, signal.SIGKILL)
    parent._stop()


def _duplicate(file: int | IO[Any]) -> int:
    if file == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)
    return os.dup(file if isinstance(file, int) else file.fileno())


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
