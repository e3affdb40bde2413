"""The controller's persistent state: one SQLite file, locked by one process.

A write has reached the page cache when the call returns, so killing the process loses nothing. A power
failure may lose the last seconds: the price of not waiting for the disk in the event loop. The file is opened
and closed in a worker thread, because SQLite then reads or writes its whole log.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiofiles
import aiofiles.os
import msgspec
from anyio import CancelScope, to_thread

from kvtier.concurrency.files import open_private
from kvtier.errors import ControllerError, KVTierError

logger = logging.getLogger("kvtier.controller")

VERSION = 1
"""Schema version. Files of other versions are refused."""

_TABLES = """
CREATE TABLE events (id TEXT PRIMARY KEY, created_at REAL NOT NULL, event BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE pins (
    instance TEXT NOT NULL, last BLOB NOT NULL, keys BLOB NOT NULL, until REAL, given_at REAL NOT NULL,
    PRIMARY KEY (instance, last)
) WITHOUT ROWID;
"""
# Added to the same version, which controllers without a history open as well.
_HISTORY = """
CREATE TABLE IF NOT EXISTS history (
    level INTEGER NOT NULL, time INTEGER NOT NULL, series TEXT NOT NULL, sample BLOB NOT NULL,
    PRIMARY KEY (level, time, series)
) WITHOUT ROWID
"""

Value = str | bytes | float | int | None
RowT = TypeVar("RowT")


class State:
    """The open state file. Created with :meth:`open`. Synchronous; a call takes tens of microseconds."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        self._failing = False

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[State]:
        """Open the state file within the block. Creates the file and its directory if missing.

        Raises: ControllerError: another controller has it open, it is invalid, or it is not writable.
        """
        # Shielded, because a cancelled call would leave the file open, and thus locked.
        with CancelScope(shield=True):
            connection = await _connect(path)
        try:
            yield cls(connection, path)
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(connection.close)

    def read(self, query: str, decode: Callable[[Any], RowT], parameters: Sequence[Value] = ()) -> list[RowT]:
        """Return all rows of a query, decoded. Rows that cannot be decoded are skipped with a warning.

        The first column is named in the warning. Raises: ControllerError: the file is damaged.
        """
        with _explained(self.path, damaged=True):
            rows = self._connection.execute(query, parameters).fetchall()
        decoded = []
        for row in rows:
            try:
                decoded.append(decode(row))
            except (ValueError, TypeError, msgspec.MsgspecError, KVTierError) as error:
                logger.warning("%s: a damaged row is skipped, of %.100r: %s", self.path, row[0], error)
        return decoded

    def write(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        """Execute a statement for each row, in one transaction.

        A write error is logged once, and the controller continues with its state in memory: a full disk must
        not fail operations.
        """
        try:
            with self._connection:
                self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            if not self._failing:
                logger.warning("%s cannot be written (%s): changes are not persisted", self.path, error)
            self._failing = True
        else:
            self._failing = False


async def _connect(path: Path) -> sqlite3.Connection:
    with _explained(path):
        await aiofiles.os.makedirs(path.parent, mode=0o700, exist_ok=True)
        async with aiofiles.open(path, "r+b", buffering=0, opener=open_private):
            pass
        return await to_thread.run_sync(_connect_existing, path)


def _connect_existing(path: Path) -> sqlite3.Connection:
    """Open and lock the file. Blocks."""
    # Opened in a worker thread and used in the event loop. A lock is refused at once: its holder keeps it.
    connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _explained(path: Path, *, damaged: bool = False) -> Iterator[None]:
    """Raise errors of the file, which may be known to be ``damaged``, as ControllerError with a remedy."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise ControllerError(
                f"another controller uses {path}: stop it, or set another file with --state"
            ) from error
        # Operational errors, such as a full disk, are not those of the file's content.
        damaged |= isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.OperationalError)
        remedy = "remove it, or set" if damaged else "set"
        raise ControllerError(
            f"the controller's state cannot be stored in {path} ({error}): {remedy} another file with --state"
        ) from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    # Damaged text must not hide the other rows.
    connection.text_factory = lambda text: text.decode(errors="replace")
    # Set before the first access: with an exclusive lock, the WAL needs no shared memory.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    # Set before the next statement, which would otherwise wait for the disk.
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN EXCLUSIVE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for table in _TABLES.split(";")[:-1]:
            connection.execute(table)
        connection.execute(f"PRAGMA user_version = {VERSION}")
    elif version != VERSION:
        raise ControllerError(
            f"{path} was written by another version of kvtier: remove it, or set another file with --state"
        )
    connection.execute(_HISTORY)
    connection.commit()
