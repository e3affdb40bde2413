"""Checks of tiers by ``kvtier doctor``: contact every shared pool, and try the tiers given by ``--backend``.

A trial writes one chunk to a tier, reads, compares and deletes it, like a cache process, but without touching
the data of one: a memory tier is created with minimal capacity, and a disk tier in a temporary folder.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import anyio
import typer
from pydantic import BaseModel, SecretStr

from kvtier.backends.base import Backend, Outcome
from kvtier.backends.disk.backend import DiskSettings, lock_holder
from kvtier.cli.checks import Check, find_obstacle, remedy_of
from kvtier.concurrency.threads import WORKER_NAME
from kvtier.errors import KVTierError, TierError
from kvtier.lab.bench.run import GRACE_SECONDS, run, within
from kvtier.lab.bench.sides import BackendSide, Overdue, Stuck, make_chunks, random_keys, timed, unseal
from kvtier.lab.bench.tiers import DELETING_PAUSE_SECONDS, OPENING_SECONDS, deleting, opened
from kvtier.lab.bench.turns import closing
from kvtier.memory.arena import Arena
from kvtier.memory.header import OBJECT_ALIGNMENT
from kvtier.memory.host import nearest_folder
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins, is_memory
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.tiers.seal import Seal
from kvtier.tiers.sealer import Sealer
from kvtier.units import MIB, format_duration, format_size

_SPARE_BYTES = 2 * MIB
"""Additional capacity of a memory tier: one huge page, for rounding."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "**********"
_SHORT_CHARACTERS = 8

AnswerT = TypeVar("AnswerT")
REMEDY_FAILED = "check that it runs and is reachable, and its settings with `kvtier config show`"
_REMEDY_SLOW = "check whether it hangs; if it is only slow, raise the tier's `deadline`"
_REMEDY_INCORRECT = "do not use it until this is fixed: every chunk would be a miss"


def check_backend(plugins: Plugins, tier: TierSettings, size: int, *, checksum: bool) -> Check:
    """Write, read, compare and delete one chunk of ``size`` bytes, whole pages, on a tier. Blocking.

    Returns soon after the tier's deadline even if a call of the backend hangs. The threads of that call then
    continue to run: see :func:`join_threads`.
    """
    if isinstance(tier, LocalTierSettings):
        size = min(size, tier.capacity // OBJECT_ALIGNMENT * OBJECT_ALIGNMENT)
    backend_type = plugins.backend(tier.type)

    async def try_tier() -> list[str]:
        with isolated_settings(backend_type, tier, size) as (settings, remark), ExitStack() as stack:
            backend, arena = backend_type(settings), Arena.create(size)
            stack.push(closing(arena))
            trial = _Trial(backend, settings, checksum=checksum)
            async with opened(backend, arena):
                return [await trial.description(), await trial.round_trip(arena, size), remark]

    return run(lambda: _run_check(f"backend {tier.name} ({tier.type})", tier, try_tier))


def check_pools(plugins: Plugins, tiers: Sequence[TierSettings]) -> Iterator[Check]:
    """Contact each shared pool, without storing a chunk. Lazy; blocks like a trial."""
    for tier in tiers:
        if not isinstance(tier, LocalTierSettings):
            yield _check_pool(plugins.backend(tier.type), tier)


def _check_pool(backend_type: type[Backend], tier: TierSettings) -> Check:
    async def contact() -> list[str]:
        backend = backend_type(tier)
        trial = _Trial(backend, tier)
        async with opened(backend):
            return [await trial.description(), await trial.miss()]

    return run(lambda: _run_check(f"tier {tier.name} ({tier.type})", tier, contact))


def join_threads(before: Sequence[threading.Thread]) -> bool:
    """Wait up to ``GRACE_SECONDS`` for threads that block the exit of Python, except those in ``before``.

    Return whether they have ended. If not, a normal exit would hang.
    """
    until = time.monotonic() + GRACE_SECONDS
    threads = [
        thread for thread in threading.enumerate() if thread not in before and thread.name != WORKER_NAME
    ]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def exit_command(before: Sequence[threading.Thread], *, failed: bool) -> None:
    """End a command, even if calls of backends hang in threads that are not in ``before``."""
    if not join_threads(before):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
    if failed:
        raise typer.Exit(1)


async def _run_check(name: str, tier: TierSettings, run: Callable[[], Awaitable[list[str]]]) -> Check:
    with _warnings() as warnings:
        try:
            parts = await run()
            check = Check(name, "warn" if warnings else "ok", _join_parts([*parts, *warnings[:1]]))
        except Overdue as late:
            whose = "" if late.seconds == OPENING_SECONDS else ", the tier's `deadline`"
            still = ", and does not end when it is cancelled" if isinstance(late, Stuck) else ""
            found = f"{late.doing} takes longer than {format_duration(late.seconds)}{whose}{still}"
            check = _failed(name, found, _REMEDY_SLOW, warnings)
        except TierError as error:
            # The messages of local tiers include a remedy.
            remedy = error.remedy or ("" if isinstance(tier, LocalTierSettings) else REMEDY_FAILED)
            check = _failed(name, error.found, remedy, warnings)
        except KVTierError as error:
            check = _failed(name, str(error), "", warnings)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            check = _failed(name, found, "report it to the authors of the backend", warnings)
    return check._replace(found=without_secrets(check.found, tier))


def _failed(name: str, found: str, remedy: str, warnings: Sequence[str]) -> Check:
    """Return a failed check, with the backend's own warning unless it says the same."""
    first = next(iter(warnings), "")
    if first.partition(": ")[2] in f"{found}: {remedy}":
        return Check(name, "fail", found, remedy)
    # It includes a remedy, which fits better than the general one.
    return Check(name, "fail", f"{found}; {first}", "" if remedy == REMEDY_FAILED else remedy)


@contextmanager
def isolated_settings(
    backend_type: type[Backend], tier: TierSettings, size: int
) -> Iterator[tuple[TierSettings, str]]:
    """Yield settings of an equivalent tier that does not affect this one, and a remark to print or "".

    Memory has room for ``size`` bytes. Temporary files are removed afterwards.

    A disk tier uses a temporary folder instead of the tier's folder and its lock: a cache process may hold
    the lock, or may start later as another user, who could not access files created here.
    """
    if is_memory(backend_type):
        yield tier.model_copy(update={"capacity": size + _SPARE_BYTES}), ""
    elif isinstance(tier, DiskSettings):
        with _scratch(tier.path) as folder:
            yield tier.model_copy(update={"path": folder}), _in_use(tier.path)
    else:
        yield tier, ""


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    if obstacle := find_obstacle(path):
        raise TierError(*obstacle)
    try:
        folder = TemporaryDirectory(dir=nearest_folder(path), prefix=".kvtier-doctor-")
    except OSError as error:
        raise TierError(f"{path} cannot be written: {error.strerror}", remedy_of(error, path)) from error
    with folder as name:
        yield Path(name)


def _in_use(path: Path) -> str:
    holder = None
    with suppress(OSError):
        holder = lock_holder(path)
    return f"{path} is in use by {holder}, which is not affected" if holder else ""


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect kvtier's warnings within the block instead of printing them."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logger = logging.getLogger("kvtier")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _join_parts(parts: Sequence[str]) -> str:
    """Join the parts, without empty ones and duplicates."""
    return "; ".join(dict.fromkeys(part for part in parts if part))


def without_secrets(text: str, tier: TierSettings) -> str:
    """Return ``text`` with all secrets of the tier's settings and all credentials in URLs masked."""
    for secret in _secrets(tier):
        # A short one may be a part of any word.
        edges = (r"(?<!\w)", r"(?!\w)") if len(secret) < _SHORT_CHARACTERS else ("", "")
        text = re.sub(re.escape(secret).join(edges), lambda _: _MASK, text)
    return _CREDENTIALS.sub(_MASK, text)


def _secrets(model: BaseModel | Mapping[Any, Any]) -> Iterator[str]:
    values = model.values() if isinstance(model, Mapping) else (value for _, value in model)
    for value in values:
        if isinstance(value, SecretStr) and value.get_secret_value():
            yield value.get_secret_value()
        elif isinstance(value, BaseModel | Mapping):
            yield from _secrets(value)


class _Trial:
    """An open backend under test, and the deadline of its calls."""

    def __init__(self, backend: Backend, tier: TierSettings, *, checksum: bool = True) -> None:
        self._backend = backend
        self._seal = Seal(backend, Sealer(checksum))
        self._deadline = tier.deadline

    async def description(self) -> str:
        """Return the backend's description of itself, or "" if it has none."""
        check = self._backend.capabilities().check
        if check is None:
            return ""
        description, _ = await self._timed("checking the backend", check.check)
        return description

    async def miss(self) -> str:
        """Look up a chunk that was never stored."""
        return f"looked up in {_format_seconds(await self._look_up(random_keys(1)[0], expected=False))}"

    async def round_trip(self, arena: Arena, size: int) -> str:
        """Write, look up, read, compare and delete a chunk."""
        ((key, view),) = chunks = make_chunks(arena, random_keys(1), size)
        unseal(chunks)
        await self._look_up(key, expected=False)
        async with deleting({"": BackendSide(self._backend)}, [key], self._deadline):
            if self._backend.capabilities().arena is not None:
                # Warm up: fault in its pages, which a cache process does once.
                await self._write(key, view)
                await self._delete(key)
            write_seconds = await self._write(key, view)
            lookup_seconds = await self._look_up(key, expected=True)
            read_seconds = await self._read(key, view)
        await self._delete(key)
        return (
            f"{format_size(size)} written in {_speed(size, write_seconds)}, "
            f"read in {_speed(size, read_seconds)}, looked up in {_format_seconds(lookup_seconds)}"
        )

    async def _look_up(self, key: ChunkKey, *, expected: bool) -> float:
        held, seconds = await self._contains(key)
        if held == expected:
            return seconds
        if held:
            raise TierError("it reports a chunk as held that was never stored", _REMEDY_INCORRECT)
        raise TierError("it does not hold a chunk whose write it confirmed", _REMEDY_INCORRECT)

    async def _contains(self, key: ChunkKey) -> tuple[bool, float]:
        try:
            return await self._call_single("looking a chunk up", lambda: self._backend.contains([key]))
        except OSError as error:
            found, remedy = getattr(error, "found", error), getattr(error, "remedy", "")
            raise TierError(f"the lookup of a chunk failed: {found}", remedy or REMEDY_FAILED) from error

    async def _write(self, key: ChunkKey, view: memoryview) -> float:
        outcome, seconds = await self._call_single("writing a chunk", lambda: self._seal.put([(key, view)]))
        if outcome is Outcome.FULL:
            raise TierError(
                f"it has no room for a chunk of {format_size(len(view))}",
                "give it more capacity, or enable eviction",
            )
        if outcome is not Outcome.OK:
            raise TierError("it did not store a chunk", REMEDY_FAILED)
        return seconds

    async def _read(self, key: ChunkKey, view: memoryview) -> float:
        # Cleared, so that a backend that fills nothing is noticed.
        written, view[:] = bytes(view), bytes(len(view))
        outcome, seconds = await self._call_single("reading a chunk", lambda: self._seal.get([(key, view)]))
        if self._seal.corrupt or (outcome is Outcome.OK and view != written):
            raise TierError("it returned other bytes than were written", _REMEDY_INCORRECT)
        if outcome is Outcome.MISS:
            raise TierError("it did not return a chunk that it reported as held", _REMEDY_INCORRECT)
        if outcome is not Outcome.OK:
            raise TierError("it stored a chunk but could not read it", REMEDY_FAILED)
        return seconds

    async def _delete(self, key: ChunkKey) -> None:
        """Delete a chunk. Retry until the deadline: a pool may keep a chunk for a while after a read."""
        until = time.monotonic() + self._deadline
        while True:
            # A backend that forbids deletion raises as well. The lookup below decides.
            with suppress(OSError):
                await self._timed("deleting a chunk", lambda: self._backend.delete([key]))
            held, _ = await self._contains(key)
            if not held:
                return
            if time.monotonic() > until:
                raise TierError(
                    f"it still holds a chunk {format_duration(self._deadline)} after it was deleted",
                    "allow this user to delete",
                )
            await anyio.sleep(DELETING_PAUSE_SECONDS)

    async def _call_single(
        self, operation: str, call: Callable[[], Awaitable[Sequence[AnswerT]]]
    ) -> tuple[AnswerT, float]:
        """Call a batch method with one item. Return its only result, and the time in seconds."""
        answers, seconds = await self._timed(operation, call)
        if len(answers) != 1:
            raise TierError(
                f"{operation}: it returned {len(answers)} results for one item", _REMEDY_INCORRECT
            )
        return answers[0], seconds

    async def _timed(self, operation: str, call: Callable[[], Awaitable[AnswerT]]) -> tuple[AnswerT, float]:
        """Return the result of ``call`` and its duration in seconds. Raises: Overdue."""
        seconds, answer = await timed(lambda: within(self._deadline, operation, call))
        if seconds > self._deadline:  # It has ended, but a cache would not have waited for it.
            raise Overdue(operation, self._deadline)
        return answer, seconds


def _speed(size: int, seconds: float) -> str:
    rate = size / max(seconds, 1e-9)
    shown = f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
    return f"{_format_seconds(seconds)} ({shown})"


def _format_seconds(seconds: float) -> str:
    """Format with two significant digits: a single measurement is no more precise."""
    return format_duration(float(f"{seconds:.2g}"))
