"""What the controller remembers over its own end: one sqlite file, of which only one process has the use.

Every write is on the operating system's side when the call returns, so a kill of the process loses nothing;
that a power cut may take the last seconds is the price of not waiting for the disk in the event loop.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ControllerError

logger = logging.getLogger("kvtier.controller")

VERSION = 1
"""Of the tables. A file of another version is not touched."""

_TABLES = """
CREATE TABLE events (id TEXT PRIMARY KEY, created_at REAL NOT NULL, event BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE pins (
    instance TEXT NOT NULL, last BLOB NOT NULL, keys BLOB NOT NULL, until REAL, given_at REAL NOT NULL,
    PRIMARY KEY (instance, last)
) WITHOUT ROWID;
"""

Value = str | bytes | float | int | None


class State:
    """The open file. Made with :meth:`open`; synchronous, some tens of microseconds a call."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        self._failing = False

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[State]:
        """Open the file, making it and its folder where they are missing, until the block is left.

        Raises :class:`ControllerError` where it cannot be used: another controller has it open, it is no
        such file, or it may not be written.
        """
        connection = _connect(path)
        try:
            yield cls(connection, path)
        finally:
            connection.close()

    def read(self, question: str) -> list[tuple[Value, ...]]:
        """All rows that answer a question."""
        return self._connection.execute(question).fetchall()

    def write(self, statement: str, rows: Iterable[Sequence[Value]]) -> None:
        """Carry a statement out for each row, all or none.

        Where the file cannot be written, that is logged, and the controller goes on with what it has in
        memory: a full disk must end no operation.
        """
        try:
            with self._connection:
                self._connection.executemany(statement, rows)
        except sqlite3.Error as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s): what happens now is not remembered", self.path, error
                )
            self._failing = True
        else:
            self._failing = False


def _connect(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Nobody else's business: instances and what is pinned there.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, timeout=0)
    except (OSError, sqlite3.Error) as error:
        raise ControllerError(f"{_cannot(path)} ({error}): name another file with --state") from error
    try:
        _prepare(connection, path)
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise ControllerError(
                f"another controller uses {path}: stop it, or name another file with --state"
            ) from error
        raise ControllerError(f"{_cannot(path)} ({error}): name another file with --state") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise ControllerError(
            f"{_cannot(path)} ({error}): remove it, or name another file with --state"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _cannot(path: Path) -> str:
    return f"what the controller remembers cannot be kept in {path}"


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    # Exclusive before the first access: then the log needs no memory shared with other processes.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    # And this before the second, which would wait for the disk.
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
            f"{path} was written by another version of kvtier: remove it, or name another file with --state"
        )
    connection.commit()
