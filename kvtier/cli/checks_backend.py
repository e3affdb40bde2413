"""Checks of tiers by ``kvtier doctor``: contact every shared pool, and try the tiers given by ``--backend``.

A trial writes one chunk to a tier, reads, compares and deletes it, like a cache process, but without touching
the data of one: a memory tier is created with minimal capacity, and a disk tier in a temporary folder.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, SecretStr

from kvtier.backends.base import Backend
from kvtier.backends.disk.backend import DiskSettings, lock_holder
from kvtier.cli.backend_trial import GRACE_SECONDS, REMEDY_FAILED, Problem, run_contact, run_trial
from kvtier.cli.check import Check
from kvtier.cli.checks_disk import find_obstacle, nearest_folder, remedy_of
from kvtier.concurrency.threads import WORKER_NAME
from kvtier.errors import KVTierError, TierError
from kvtier.lab.bench.run import run
from kvtier.memory.header import OBJECT_ALIGNMENT
from kvtier.plugins import Plugins, is_memory
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.units import MIB

_SPARE_BYTES = 2 * MIB
"""Additional capacity of a memory tier: one huge page, for rounding."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "**********"
_SHORT_CHARACTERS = 8


def check_backend(plugins: Plugins, tier: TierSettings, size: int, *, checksum: bool) -> Check:
    """Write, read, compare and delete one chunk of ``size`` bytes, whole pages, on a tier. Blocking.

    Returns soon after the tier's deadline even if a call of the backend hangs. The threads of that call then
    continue to run: see :func:`join_threads`.
    """
    if isinstance(tier, LocalTierSettings):
        size = min(size, tier.capacity // OBJECT_ALIGNMENT * OBJECT_ALIGNMENT)
    backend_type = plugins.backend(tier.type)

    async def trial() -> list[str]:
        with isolated_settings(backend_type, tier, size) as (settings, remark):
            return [await run_trial(backend_type(settings), settings, size, checksum=checksum), remark]

    return run(lambda: _run_check(f"backend {tier.name} ({tier.type})", tier, trial))


def check_pools(plugins: Plugins, tiers: Sequence[TierSettings]) -> Iterator[Check]:
    """Contact each shared pool, without storing a chunk. Lazy; blocks like a trial."""
    for tier in tiers:
        if not isinstance(tier, LocalTierSettings):
            yield _check_pool(plugins.backend(tier.type), tier)


def _check_pool(backend_type: type[Backend], tier: TierSettings) -> Check:
    async def contact() -> list[str]:
        return [await run_contact(backend_type(tier), tier)]

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


async def _run_check(name: str, tier: TierSettings, run: Callable[[], Awaitable[list[str]]]) -> Check:
    with _warnings() as warnings:
        try:
            parts = await run()
            check = Check(name, "warn" if warnings else "ok", _join_parts([*parts, *warnings[:1]]))
        except Problem as problem:
            check = _failed(name, str(problem), problem.remedy, warnings)
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
        raise Problem(*obstacle)
    try:
        folder = TemporaryDirectory(dir=nearest_folder(path), prefix=".kvtier-doctor-")
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}", remedy_of(error, path)) from error
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
