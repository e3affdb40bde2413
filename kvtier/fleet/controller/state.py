"""What outlives a controller: events, unfinished operations, pins and the history, as rows of tables.

Either one SQLite file, locked by one process, or Redis (:mod:`kvtier.fleet.controller.shared_state`), which
several controllers share.
"""

from __future__ import annotations

import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiofiles
import aiofiles.os
import msgspec
from anyio import CancelScope, to_thread

from kvtier.concurrency.files import open_private
from kvtier.errors import ControllerError, KVTierError
from kvtier.logs import RateLimitedLog

logger = logging.getLogger("kvtier.controller")

VERSION = 1
"""Schema version. Files of other versions are refused."""


class Table(NamedTuple):
    """A table: the names of its first columns, which identify a row."""

    name: str
    key: Sequence[str]


EVENTS = Table("events", ["id"])
OPERATIONS = Table("operations", ["id"])
"""Of events that have not ended."""
PINS = Table("pins", ["instance", "last"])
_TABLES = """
CREATE TABLE events (id TEXT PRIMARY KEY, created_at REAL NOT NULL, event BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE pins (
    instance TEXT NOT NULL, last BLOB NOT NULL, keys BLOB NOT NULL, until REAL, given_at REAL NOT NULL,
    PRIMARY KEY (instance, last)
) WITHOUT ROWID;
"""
# Added to the same version, which controllers without them open as well.
_LATER_TABLES = """
CREATE TABLE IF NOT EXISTS history (
    level INTEGER NOT NULL, time INTEGER NOT NULL, series TEXT NOT NULL, sample BLOB NOT NULL,
    PRIMARY KEY (level, time, series)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS operations (id TEXT PRIMARY KEY, operation BLOB NOT NULL) WITHOUT ROWID;
"""

Value = str | bytes | float | int | None
Row = Sequence[Any]
RowT = TypeVar("RowT")


class State(ABC):
    """The rows, while this controller may write them. Synchronous but for :meth:`saved` and samples."""

    name: str
    """The file or server, for messages."""

    @abstractmethod
    def rows(self, table: Table) -> Iterable[Row]:
        """Return all rows of a table, in any order. Raises: ControllerError: the state is damaged."""

    @abstractmethod
    def put(self, table: Table, row: Sequence[Value]) -> None:
        """Write a row in place of the one with its key."""

    @abstractmethod
    def delete(self, table: Table, keys: Iterable[Sequence[Value]]) -> None:
        """Delete the rows with these keys."""

    @abstractmethod
    async def saved(self) -> None:
        """Wait until a kill of this process loses nothing of what was written. Raises: ControllerError."""

    @abstractmethod
    def add_samples(self, level: int, at: int, oldest: int, samples: Iterable[tuple[str, bytes]]) -> None:
        """Write the samples of a level that begin ``at`` a time, by series; drop those up to ``oldest``."""

    @abstractmethod
    async def samples(
        self, level: int, times: Sequence[int], kind: str = "", name: str | None = None
    ) -> list[Row]:
        """Return series, time and sample of those at these times, ordered by time.

        ``kind`` and ``name`` select series. Raises: ControllerError: they cannot be read.
        """

    def decoded(self, rows: Iterable[Row], decode: Callable[[Any], RowT]) -> list[RowT]:
        """Return rows, decoded. Damaged ones are skipped with a warning that names the first column."""
        decoded = []
        for row in rows:
            try:
                decoded.append(decode(row))
            except (ValueError, TypeError, msgspec.MsgspecError, KVTierError) as error:
                logger.warning("%s: a damaged row is skipped, of %.100r: %s", self.name, row[0], error)
        return decoded


class FileState(State):
    """The open SQLite file. Created with :meth:`open`. A call takes tens of microseconds.

    A write has reached the page cache when the call returns, so killing the process loses nothing. A power
    failure may lose the last seconds: the price of not waiting for the disk in the event loop. The file is
    opened and closed in a worker thread, because SQLite then reads or writes its whole log.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.name = str(path)
        self._warn = RateLimitedLog(logger)

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[FileState]:
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

    def rows(self, table: Table) -> list[Row]:
        """Return all rows of a table."""
        return self._read(f"SELECT * FROM {table.name}")  # noqa: S608 - a constant

    def put(self, table: Table, row: Sequence[Value]) -> None:
        """Write a row. See :meth:`_write` for errors."""
        self._write([(f"REPLACE INTO {table.name} VALUES ({_marks(row)})", [row])])  # noqa: S608 - constants

    def delete(self, table: Table, keys: Iterable[Sequence[Value]]) -> None:
        """Delete rows. See :meth:`_write` for errors."""
        where = " AND ".join(f"{column} = ?" for column in table.key)
        self._write([(f"DELETE FROM {table.name} WHERE {where}", keys)])  # noqa: S608 - constants

    async def saved(self) -> None:
        """Return at once: what was written is in the page cache."""

    def add_samples(self, level: int, at: int, oldest: int, samples: Iterable[tuple[str, bytes]]) -> None:
        """Write samples, and delete old ones, in one transaction."""
        rows = [(level, at, series, sample) for series, sample in samples]
        self._write(
            [
                ("REPLACE INTO history VALUES (?, ?, ?, ?)", rows),
                ("DELETE FROM history WHERE level = ? AND time <= ?", [(level, oldest)]),
            ]
        )

    async def samples(
        self, level: int, times: Sequence[int], kind: str = "", name: str | None = None
    ) -> list[Row]:
        """Return samples, with one seek in the file for each time."""
        # To before the next string: after all that begin with the kind, or after the series.
        first, last = f"{kind}:", f"{kind};"
        if not kind:
            first, last = "", "~"
        elif name is not None:
            first, last = f"{kind}:{name}", f"{kind}:{name}\0"
        query = (
            f"SELECT series, time, sample FROM history WHERE level = ? AND time IN ({_marks(times)}) "  # noqa: S608
            "AND series >= ? AND series < ? ORDER BY time"
        )
        return self._read(query, (level, *times, first, last))

    def _read(self, query: str, parameters: Sequence[Value] = ()) -> list[Row]:
        with _explained(self.path, damaged=True):
            return self.connection.execute(query, parameters).fetchall()

    def _write(self, statements: Iterable[tuple[str, Iterable[Sequence[Value]]]]) -> None:
        """Execute each statement for each of its rows, all in one transaction.

        A write error is logged, and the controller continues with its state in memory: a full disk must
        not fail operations.
        """
        try:
            with self.connection:
                for statement, rows in statements:
                    self.connection.executemany(statement, rows)
        except sqlite3.Error as error:
            self._warn("%s cannot be written (%s): changes are not persisted", self.name, error)


def _marks(values: Sequence[Value]) -> str:
    return ", ".join("?" * len(values))


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
    for table in _LATER_TABLES.split(";")[:-1]:
        connection.execute(table)
    connection.commit()
