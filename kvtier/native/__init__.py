"""The native core: whether it is there, and the one place that imports it.

kvtier works without it, slower: each part that has a native path asks :func:`available` and else takes its
Python path. ``KVTIER_NATIVE=0`` leaves it out where it is there, to compare the two or to rule it out.

    if native.available():
        native.core.something(...)

What needs CUDA is a module of its own, which is loaded where somebody asks for it: :func:`cuda_problem`.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

logger = logging.getLogger("kvtier")

__all__ = ["ADVICE", "available", "core", "cuda", "cuda_problem", "summary", "warn_if_missing", "why_not"]

if TYPE_CHECKING:
    from kvtier import _native as core  # noqa: TC004 - at run time it may not be there
    from kvtier import _native_cuda as cuda  # noqa: TC004 - the same, and loaded by cuda_problem()

ADVICE = "install a C++ compiler (Debian: g++) and then kvtier again; pip install -v says what went wrong"

VARIABLE = "KVTIER_NATIVE"
"""Of the environment, and no setting: it counts from the first import on."""
ABI = 4
"""Of the names, arguments and results of the extensions: one that was built with another is left out."""

_problem = ""
_warned = False


def _load() -> str:
    """Import the extension as ``core``; why it is not there, or nothing."""
    global core
    if os.environ.get(VARIABLE, "").strip().lower() in {"0", "off", "false", "no"}:
        return "KVTIER_NATIVE leaves it out"
    try:
        module = importlib.import_module("kvtier._native")
    except ImportError as error:
        return f"{error}"
    if problem := _other_sources(module.build_info().get("abi")):
        return problem
    core = module
    return ""


def _other_sources(abi: int | None) -> str:
    return "" if abi == ABI else f"it was built of other sources: its interface is {abi or 0}, not {ABI}"


def available() -> bool:
    """Whether :data:`core` is there. Costs nothing; the answer stays the same while the process lives."""
    return not _problem


def why_not() -> str:
    """Why it is not there; empty where it is."""
    return _problem


@cache
def cuda_problem() -> str:
    """Why :data:`cuda` cannot be used here; empty where it can. Loads it, and looks for a device, once."""
    global cuda
    if _problem:
        return _problem
    try:
        module = importlib.import_module("kvtier._native_cuda")
    except ImportError as error:
        return f"built without CUDA ({error})"
    if problem := _other_sources(getattr(module, "abi", None)):
        return problem
    cuda = module
    return "" if cuda.device_count() else "there is no CUDA device, or no driver for it"


def summary() -> str:
    """One line: what was built and what this processor has of it, or why there is nothing."""
    if _problem:
        return f"missing ({_problem}): {ADVICE}"
    info = core.build_info()
    found = [name for name in ("avx2", "avx512", "io_uring") if info[name]]
    if find_spec("kvtier._native_cuda") is not None:
        found.append("CUDA")
    return f"built with {info['compiler']}; here: {', '.join(found) or 'nothing special'}"


def warn_if_missing() -> None:
    """Say once in a process that the native core is not there. What runs data through kvtier calls this."""
    global _warned
    if _problem and not _warned:
        _warned = True
        logger.warning("kvtier runs without its native core, slower: %s", summary())


_problem = _load()
