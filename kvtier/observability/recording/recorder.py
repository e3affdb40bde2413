"""Records lookups and ends of answers while a cache process serves, without delaying it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import anyio
from anyio import CancelScope, to_thread

from kvtier.catalog.hints import ChunkHints
from kvtier.concurrency.tasks import open_tasks
from kvtier.concurrency.threads import WorkerThreads
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import KEY_BYTES
from kvtier.observability.recording.file import LookedUp, RecordingFile
from kvtier.observability.recording.format import EndRecord
from kvtier.settings.observability import RecordingSettings

logger = logging.getLogger("kvtier")

FLUSH_SECONDS = 0.5
"""How long a lookup waits to be written, so that many are written at once."""
CLOSE_SECONDS = 5.0
"""How long the last lookups may take to be written at exit."""
MAX_PENDING_BYTES = 16 << 20
"""Limit of what is not written yet. Further lookups and ends are dropped."""
LOOKUP_BYTES = 512
"""What a lookup or an end of an answer takes in memory besides its keys."""


class Recorder:
    """Passes lookups to a thread that writes them. A failing disk ends the recording, and nothing else."""

    def __init__(self, file: RecordingFile) -> None:
        self._file = file
        self._began = time.monotonic()
        self._pending: list[LookedUp | EndRecord] = []
        self._pending_bytes = 0
        """Including what is being written."""
        self._threads = WorkerThreads(1)
        self._closing = anyio.Event()
        self._ended = anyio.Event()
        self._scope = CancelScope(shield=True)
        self._warn = RateLimitedLog(logger)
        self._recorded = self._ends = self._dropped = 0
        self._stopped = ""
        """Why nothing is recorded any more."""
        if file.problem:
            self._stop(file.problem)

    def record(
        self, keys: bytes, tokens: int, chunk_tokens: int, chunk_bytes: int, hints: ChunkHints | None
    ) -> None:
        """Record a lookup of the joined ``keys`` of a prompt. Takes a microsecond, and never raises."""
        since, whole = time.monotonic() - self._began, len(keys) // KEY_BYTES * chunk_tokens
        readable = whole - chunk_tokens < tokens <= whole
        self._add(LookedUp(since, keys, tokens, chunk_tokens, chunk_bytes, hints), keys, readable=readable)

    def answer_ended(self, keys: bytes, signature: Sequence[int], seconds: float) -> None:
        """Record that an answer has ended, ``seconds`` ago. ``keys``: of the last chunks of its prompt."""
        since = time.monotonic() - self._began
        self._add(self._file.end(max(0.0, since - seconds), keys[-KEY_BYTES:], signature), keys)

    def _add(self, seen: LookedUp | EndRecord, keys: bytes, *, readable: bool = True) -> None:
        """Note what is to be written, unless it has no keys. ``readable``: whether it could be read back."""
        if not keys:
            return
        size = len(keys) + LOOKUP_BYTES
        if self._stopped or not readable:
            self._dropped += 1
        elif self._pending_bytes + size > MAX_PENDING_BYTES:
            self._dropped += 1
            self._warn(
                "recording: the disk of %s is too slow: %d lookups and ends so far are not recorded",
                self._file.path,
                self._dropped,
            )
        else:
            self._pending_bytes += size
            self._pending.append(seen)

    async def run(self) -> None:
        """Write what is pending, until the disk fails or :meth:`close` is called, even if it is cancelled."""
        try:
            with self._scope:
                while not self._stopped and not self._closing.is_set():
                    with anyio.move_on_after(FLUSH_SECONDS):
                        await self._closing.wait()
                    await self._flush()
                await self._flush()
                # RuntimeError: no thread can be started.
                with suppress(OSError, RuntimeError):
                    await self._threads(self._file.close)
        finally:
            self._threads.close()
            self._ended.set()

    async def close(self) -> None:
        """Wait up to :data:`CLOSE_SECONDS` until :meth:`run` has written what is pending, and end it."""
        self._closing.set()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await self._ended.wait()
        self._scope.cancel()

    async def _flush(self) -> None:
        batch, size = self._pending, self._pending_bytes
        if not batch:
            return
        self._pending = []
        before = self._file.too_long
        try:
            await self._threads(partial(self._file.write, batch))
        except Exception as error:
            self._dropped += len(batch) + len(self._pending)
            self._pending.clear()
            self._stop((error.strerror if isinstance(error, OSError) else None) or str(error))
        else:
            ends = sum(isinstance(seen, EndRecord) for seen in batch)
            self._ends += ends
            self._recorded += len(batch) - ends - (self._file.too_long - before)
        self._pending_bytes -= size

    def _stop(self, reason: str) -> None:
        self._stopped = reason
        logger.warning("recording to %s has stopped, serving goes on: %s", self._file.path, reason)

    def status(self) -> dict[str, object]:
        """Return what has been recorded, for display and tests."""
        return {
            "path": str(self._file.path),
            "recorded": self._recorded,
            "ends": self._ends,
            "dropped": self._dropped + self._file.too_long,
            "stopped": self._stopped,
        }


@asynccontextmanager
async def recording(
    settings: RecordingSettings, tenants: Mapping[str, str] | None = None
) -> AsyncIterator[Recorder]:
    """Record while the context is open. Raises the errors of :meth:`RecordingFile.open`.

    ``tenants``: the name of the configured tenant by each name that requests use for it.
    """
    file = await to_thread.run_sync(RecordingFile.open, settings, tenants or {})
    if not file.problem:
        logger.info("recording to %s", settings.path)
    recorder = Recorder(file)
    async with open_tasks() as tasks:
        tasks.start_soon(recorder.run)
        try:
            yield recorder
        finally:
            await recorder.close()
