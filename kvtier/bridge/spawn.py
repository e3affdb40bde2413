"""Default socket path of a cache process, and how an engine starts one.

The path is derived from the settings alone: a restarted engine finds the lingering process of its
predecessor, with a warm cache, and engines of one host with equal settings share one process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvtier.concurrency import processes
from kvtier.concurrency.threads import run_in_background
from kvtier.errors import ChannelError
from kvtier.settings import SOCKET_PATH_BYTES, Settings
from kvtier.settings.values import REVEALED

logger = logging.getLogger("kvtier")

START_SECONDS = 120.0
POLL_SECONDS = 0.02
MESSAGE_BYTES = 4096

VARIABLES = ("XDG_RUNTIME_DIR", "TMPDIR", "TEMP", "TMP")
FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - the directory below belongs to this user
"""Where the socket's directory is created if no variable names a usable place."""


def default_address(settings: Settings) -> Path:
    """Return the socket path for these settings, in a directory that only this user can access.

    It is below ``XDG_RUNTIME_DIR`` or the temporary directory, or else in the first of :data:`FALLBACKS`:
    a long path, and a directory that does not exist or belongs to another user, are skipped. Processes with
    the same environment find the same one.

    Raises :class:`ChannelError` if no directory is usable.
    """
    canonical = json.dumps(settings.model_dump(mode="json", context=REVEALED), sort_keys=True).encode()
    name = blake3(canonical, derive_key_context="kvtier socket v1").hexdigest(length=8)
    reasons = []
    for base in dict.fromkeys((*filter(None, map(os.environ.get, VARIABLES)), *FALLBACKS)):
        path = Path(base) / f"kvtier-{os.getuid()}" / f"{name}.sock"
        if (reason := _unusable(path)) is None:
            return path
        reasons.append(reason)
    raise ChannelError(f"no directory for the socket: set `socket` in the settings ({'; '.join(reasons)})")


def _unusable(path: Path) -> str | None:
    """Create the directory of a socket. Return why it is not usable; ``None`` if it is."""
    folder = path.parent
    if not folder.is_absolute():
        return f"{folder} is not absolute"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        return f"{folder} is too long: a socket's path has at most {SOCKET_PATH_BYTES} bytes"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat()
    except OSError as error:
        return f"cannot create {folder}: {error.strerror}"
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        return f"{folder} is accessible to other users: remove it"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write to {folder}"


class CacheProcess:
    """A cache process that this engine starts if none is running, and that survives the engine."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self._settings = settings
        self._path = path
        self._child: subprocess.Popen[bytes] | None = None
        """Starts the cache process, and exits once that serves: see ``child.py``."""
        self._starting = False

    @property
    def log(self) -> Path:
        """The cache process's log file."""
        return self._path.with_suffix(".log")

    def start(self) -> None:
        """Start a child unless this or another rank is already starting one; do not wait for it.

        The settings are passed on standard input, never on the command line. The child gets its own
        session, so that signals to the engine's process group do not reach it. See :mod:`children
        <kvtier.concurrency.processes>` for what it inherits.
        """
        if self._child is not None and self._child.poll() is None:
            return
        with self._path.with_suffix(".start").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            with self.log.open("ab") as log:
                self._child = processes.start(
                    processes.python("-m", "kvtier.bridge.serve", str(self._path)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # The child inherits the lock: no rank starts a second one while this one runs.
                    pass_fds=[lock.fileno()],
                )
            assert self._child.stdin is not None
            with self._child.stdin as settings:
                settings.write(self._settings.model_dump_json(context=REVEALED).encode())
        run_in_background(self._child.wait)  # Leave no zombie.
        logger.info("starting a cache process, log: %s", self.log)

    def start_in_background(self) -> None:
        """Call :meth:`start` in a thread, as creating a process takes milliseconds; for a running engine."""
        if not self._starting:
            self._starting = True
            try:
                run_in_background(self._try_to_start)
            except RuntimeError as error:  # Cannot create a thread.
                self._starting = False
                logger.warning("cannot start a cache process: %s", error)

    def _try_to_start(self) -> None:
        try:
            self.start()
        except (OSError, RuntimeError) as error:
            logger.warning("cannot start a cache process: %s", error)
        finally:
            self._starting = False

    def start_and_wait(self, connect: Callable[[], None]) -> None:
        """Call ``connect`` until it succeeds, starting a child if no cache process answers.

        Raises :class:`ChannelError` with the child's last log line if it exits with an error, or after
        :data:`START_SECONDS`.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                connect()
                return
            except ChannelError as error:
                if self._child is not None and self._child.poll() not in (None, 0):
                    # Not from the error of the connection, which vLLM would log first.
                    raise ChannelError(
                        f"the cache process failed to start: {self._last_log_line()} (log: {self.log}; "
                        "`kvtier config check` and `kvtier doctor` find all problems of settings)"
                    ) from None
                self.start()
                if time.monotonic() > deadline:
                    raise ChannelError(
                        f"the cache process did not start within {START_SECONDS:g} s, see {self.log}: {error}"
                    ) from error
            time.sleep(POLL_SECONDS)

    def _last_log_line(self) -> str:
        lines = self.log.read_bytes()[-MESSAGE_BYTES:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "the log is empty"
