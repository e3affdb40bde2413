"""What ``kvtier doctor --backend`` does: one chunk written to a tier, read back, compared and deleted.

Everything happens as a cache process does it, but on nothing that one holds: a tier of memory is made small,
and a disk's chunk goes into a folder of its own that is removed again.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from pydantic import BaseModel, SecretStr

from kvtier.backends.base import Backend
from kvtier.backends.disk import DiskSettings, lock_holder
from kvtier.cli.backend_trial import GRACE_SECONDS, REMEDY_FAILED, Problem, run_trial
from kvtier.cli.checks import Check, nearest_folder, writable_remedy
from kvtier.errors import KVTierError, SettingsError
from kvtier.header import OBJECT_ALIGNMENT
from kvtier.plugins import Plugins, is_memory
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.threads import WORKER_NAME
from kvtier.units import MIB

DEFAULT_SIZE = 4 * MIB
LARGEST_SIZE = 1024 * MIB
ALL = "all"

_SPARE_BYTES = 2 * MIB
"""What memory is given beside the chunk: a huge page more than may be needed."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "**********"


def chosen(tiers: Sequence[TierSettings], names: Sequence[str]) -> list[TierSettings]:
    """The tiers that ``names`` names, by their names or else their types, in the order of the settings.

    Raises :class:`SettingsError` listing what there is for a name that is neither.
    """
    found: list[TierSettings] = []
    for name in names:
        matching = [tier for tier in tiers if tier.name == name] or [
            tier for tier in tiers if name in (tier.type, ALL)
        ]
        if not matching:
            there = ", ".join(f"{tier.name} ({tier.type})" for tier in tiers)
            raise SettingsError(f"no tier has the name or the type {name!r}: write one of {there}, or {ALL}")
        found += matching
    return [tier for tier in tiers if tier in found]


def check_backend(plugins: Plugins, tier: TierSettings, size: int, *, checksum: bool) -> Check:
    """Write, read, compare and delete one chunk of ``size`` bytes on ``tier``. Blocks meanwhile.

    Comes back soon after the tier's deadline also where a call does not, whose threads then go on:
    :func:`end_threads` tells.
    """
    told: Future[Check] = Future()

    async def check() -> None:
        # Told from within: a loop with a call that does not end does not end either.
        told.set_result(await _checked(plugins.backend(tier.type), tier, size, checksum))

    def work() -> None:
        try:
            anyio.run(check)
        except BaseException as error:
            if told.done():
                raise
            told.set_exception(error)

    threading.Thread(target=work, name="kvtier-doctor", daemon=True).start()
    return told.result()


def end_threads(before: Sequence[threading.Thread]) -> bool:
    """Wait a moment for all threads that Python would wait for, but those of ``before``; whether they ended.

    Where they have not, the interpreter cannot end either.
    """
    until = time.monotonic() + GRACE_SECONDS
    threads = [
        thread for thread in threading.enumerate() if thread not in before and thread.name != WORKER_NAME
    ]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


async def _checked(backend_type: type[Backend], tier: TierSettings, size: int, checksum: bool) -> Check:
    name = f"backend {tier.name} ({tier.type})"
    pages = -(-size // OBJECT_ALIGNMENT)
    if isinstance(tier, LocalTierSettings):
        pages = min(pages, tier.capacity // OBJECT_ALIGNMENT)
    size = pages * OBJECT_ALIGNMENT
    with _warnings() as warnings:
        try:
            with harmless(backend_type, tier, size) as (settings, remark):
                told = [await run_trial(backend_type(settings), settings, size, checksum=checksum), remark]
            check = Check(name, "warn" if warnings else "ok", _sentence([*told, *warnings[:1]]))
        except Problem as problem:
            check = Check(name, "fail", _sentence([str(problem), *warnings[:1]]), problem.remedy)
        except KVTierError as error:
            # What a folder or memory lacks is said with the error.
            remedy = "" if isinstance(tier, LocalTierSettings) else REMEDY_FAILED
            check = Check(name, "fail", _sentence([str(error), *warnings[:1]]), remedy)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            check = Check(name, "fail", _sentence([found, *warnings[:1]]), "tell those who wrote the backend")
    return check._replace(found=without_secrets(check.found, tier))


@contextmanager
def harmless(
    backend_type: type[Backend], tier: TierSettings, size: int
) -> Iterator[tuple[TierSettings, str]]:
    """Settings of a tier that is like this one and takes nothing of it; what there is to remark about it.

    Memory has room for ``size`` bytes. What is made for it is gone afterwards.

    A disk is used beside what it holds, not through its lock: a cache process may have it, or be about to
    start as another user, to whom what was made here would be closed.
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
    try:
        folder = TemporaryDirectory(dir=nearest_folder(path), prefix=".kvtier-doctor-")
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error.strerror}", writable_remedy(path)) from error
    with folder as name:
        yield Path(name)


def _in_use(path: Path) -> str:
    holder = None
    with suppress(OSError):
        holder = lock_holder(path)
    return f"{path} is in use by {holder}, which was not disturbed" if holder else ""


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What kvtier warns of meanwhile, instead of where it would be printed."""
    heard: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler = Listening(logging.WARNING)
    logger = logging.getLogger("kvtier")
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)


def _sentence(parts: Sequence[str]) -> str:
    """The parts that say something, each once."""
    return "; ".join(dict.fromkeys(part for part in parts if part))


def without_secrets(text: str, tier: TierSettings) -> str:
    """``text`` with every secret of the tier's settings masked, and whatever a URL has before its host."""
    for secret in _secrets(tier):
        text = text.replace(secret, _MASK)
    return _CREDENTIALS.sub(_MASK, text)


def _secrets(model: BaseModel | Mapping[Any, Any]) -> Iterator[str]:
    values = model.values() if isinstance(model, Mapping) else (value for _, value in model)
    for value in values:
        if isinstance(value, SecretStr) and value.get_secret_value():
            yield value.get_secret_value()
        elif isinstance(value, BaseModel | Mapping):
            yield from _secrets(value)
