"""A minimal complete backend: chunks as files in a folder that several hosts mount."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyio import to_thread
from pydantic import Field

from kvtier import TierError, hookimpl
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.concurrency.threads import WorkerThreads, spread
from kvtier.memory.keys import ChunkKey
from kvtier.settings import LocalPath, TierSettings


class TemplateSettings(TierSettings):
    """Settings of a tier of type ``template``."""

    path: LocalPath = Field(description="The folder that all hosts mount.", examples=["/mnt/kvtier"])


class TemplateBackend(Backend):
    """One file per chunk."""

    settings_type = TemplateSettings

    def __init__(self, settings: TemplateSettings) -> None:
        self._name, self._path, self._threads = settings.name, settings.path, settings.concurrency
        self._executor = WorkerThreads(self._threads)

    async def open(self) -> None:
        """Create the folder. Raises :class:`TierError` if that fails."""
        try:
            await to_thread.run_sync(lambda: self._path.mkdir(parents=True, exist_ok=True))
        except OSError as error:
            raise TierError(f"tier {self._name!r}: path: {error}: set it to a folder") from error

    async def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return whether each key has a file."""
        return await self._each(lambda key: self._file(key).is_file(), keys)

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Write each view to a file."""
        return await self._each(self._write, items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Read each file into its view."""
        return await self._each(self._read, items)

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete each file."""
        await self._each(lambda key: self._file(key).unlink(missing_ok=True), keys)

    async def _each(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return await spread(work, items, parts=self._threads, executor=self._executor)

    def _file(self, key: ChunkKey) -> Path:
        return self._path / key.hex()

    def _write(self, item: PutItem) -> Outcome:
        key, view = item
        temporary = self._file(key).with_suffix(f".{secrets.token_hex(8)}")
        try:
            temporary.write_bytes(view)
            temporary.replace(self._file(key))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            return Outcome.FULL if error.errno == errno.ENOSPC else Outcome.FAILED
        return Outcome.OK

    def _read(self, item: GetItem) -> Outcome:
        key, view = item
        try:
            with self._file(key).open("rb") as file:
                is_complete = file.readinto(view) == len(view) and not file.read(1)
        except FileNotFoundError:
            return Outcome.MISS
        except OSError:
            return Outcome.FAILED
        return Outcome.OK if is_complete else Outcome.MISS


@hookimpl
def kvtier_backends() -> dict[str, type[Backend]]:
    """Return the backends by tier type."""
    return {"template": TemplateBackend}
