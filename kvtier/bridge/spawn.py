"""Where a cache process is found that no setting names, and how an engine starts one.

The address follows from the settings alone: an engine that is restarted meets the process that its
predecessor started and that still lingers, with its memory warm, and engines of one host with equal
settings share one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvtier.errors import ChannelError
from kvtier.settings import Settings
from kvtier.settings_secret import REVEALED
from kvtier.threads import run_in_background

logger = logging.getLogger("kvtier")

START_SECONDS = 120.0
POLL_SECONDS = 0.02
MESSAGE_BYTES = 4096

_started: list[subprocess.Popen[bytes]] = []
"""Children outlive what started them, and are meant to: kept, so that none is reported as forgotten."""


def default_address(settings: Settings) -> Path:
    """The socket of the cache process that these settings make, in a folder that only this user can enter.

    Raises :class:`ChannelError` where that folder is somebody else's.
    """
    canonical = json.dumps(settings.model_dump(mode="json", context=REVEALED), sort_keys=True).encode()
    name = blake3(canonical, derive_key_context="kvtier socket v1").hexdigest(length=8)
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = base / f"kvtier-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
    except OSError as error:
        raise ChannelError(f"no folder for a socket: {error}: name a `socket` in the settings") from error
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise ChannelError(f"{folder} is open to others: remove it, or name a `socket` in the settings")
    return folder / f"{name}.sock"


class CacheProcess:
    """A cache process that this engine starts when none answers."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self._settings = settings
        self._path = path
        self._child: subprocess.Popen[bytes] | None = None
        self._starting = False

    @property
    def log(self) -> Path:
        """Where the child writes what it has to say."""
        return self._path.with_suffix(".log")

    def start(self) -> None:
        """Start a child unless one is starting already, here or in another rank; does not wait for it.

        The settings go through its standard input, never the command line. It is in a session of its
        own, so that what ends the engine does not end it.
        """
        if self._child is not None and self._child.poll() is None:
            return
        with self._path.with_suffix(".start").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            with self.log.open("ab") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "kvtier.bridge.child", str(self._path)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=[lock.fileno()],
                )
            _started.append(self._child)
            assert self._child.stdin is not None
            with self._child.stdin as settings:
                settings.write(self._settings.model_dump_json(context=REVEALED).encode())
        logger.info("started a cache process: %d, log in %s", self._child.pid, self.log)

    def start_in_background(self) -> None:
        """:meth:`start` in a thread, as creating a process takes milliseconds; for an engine that runs."""
        if not self._starting:
            self._starting = True
            try:
                run_in_background(self._try_to_start)
            except RuntimeError as error:  # The system gives no thread.
                self._starting = False
                logger.warning("no cache process could be started: %s", error)

    def _try_to_start(self) -> None:
        try:
            self.start()
        except OSError as error:
            logger.warning("no cache process could be started: %s", error)
        finally:
            self._starting = False

    def start_and_wait(self, connect: Callable[[], None]) -> None:
        """Call ``connect`` until it stops raising, starting a child where none answers.

        Raises :class:`ChannelError` with what the child said where it ended, or after :data:`START_SECONDS`.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                connect()
                return
            except ChannelError as error:
                if self._child is not None and self._child.poll() not in (None, 0):
                    raise ChannelError(f"the cache process could not start: {self._last_words()}") from error
                self.start()
                if time.monotonic() > deadline:
                    raise ChannelError(
                        f"the cache process did not come up in {START_SECONDS:g} s, see {self.log}: {error}"
                    ) from error
            time.sleep(POLL_SECONDS)

    def _last_words(self) -> str:
        lines = self.log.read_bytes()[-MESSAGE_BYTES:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"see {self.log}"
