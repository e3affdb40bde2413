"""Import the native core, if it is available.

kvtier works without it, but slower: code with a native path checks :func:`available` and otherwise uses its
Python path. ``KVTIER_NATIVE=0`` disables the native core, for comparison and debugging.

    if native.available():
        native.core.something(...)

CUDA code is in a separate module, which :func:`cuda_problem` loads on demand.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

logger = logging.getLogger("kvtier")

__all__ = [
    "ADVICE",
    "available",
    "core",
    "cuda",
    "cuda_problem",
    "missing_reason",
    "summary",
    "warn_if_missing",
]

if TYPE_CHECKING:
    import kvtier._native as core  # noqa: TC004 - may be missing at run time
    import kvtier._native_cuda as cuda  # noqa: TC004 - loaded by cuda_problem()

ADVICE = "install a C++ compiler (Debian: g++) and reinstall kvtier; pip install -v shows the build log"

VARIABLE = "KVTIER_NATIVE"
"""An environment variable and not a setting, because it is read at the first import."""
ABI = 13
"""ABI version (names, arguments, results). Extensions with another version are ignored."""

_problem = ""
_warned = False


def _load() -> str:
    """Import the extension as ``core``. Return why it is not available, or an empty string."""
    global core
    if os.environ.get(VARIABLE, "").strip().lower() in {"0", "off", "false", "no"}:
        return "disabled by KVTIER_NATIVE"
    try:
        module = importlib.import_module("kvtier._native")
    except ImportError as error:
        return f"{error}"
    if problem := _abi_mismatch(module.build_info().get("abi")):
        return problem
    core = module
    return ""


def _abi_mismatch(abi: int | None) -> str:
    return "" if abi == ABI else f"built from other sources: its ABI version is {abi or 0}, not {ABI}"


def available() -> bool:
    """Whether :data:`core` is available. Cheap; the result never changes within a process."""
    return not _problem


def missing_reason() -> str:
    """Return why :data:`core` is not available; empty if it is."""
    return _problem


@cache
def cuda_problem() -> str:
    """Return why :data:`cuda` is not usable; empty if it is. Loads it and probes for a device, once."""
    global cuda
    if _problem:
        return _problem
    try:
        module = importlib.import_module("kvtier._native_cuda")
    except ImportError as error:
        return f"built without CUDA ({error})"
    if problem := _abi_mismatch(getattr(module, "abi", None)):
        return problem
    cuda = module
    return "" if cuda.device_count() else "no CUDA device or driver found"


def summary() -> str:
    """Return one line: compiler and available CPU features, or why the core is missing."""
    if _problem:
        return f"missing ({_problem}): {ADVICE}"
    info = core.build_info()
    found = [name for name in ("avx2", "avx512", "io_uring") if info[name]]
    if find_spec("kvtier._native_cuda") is not None:
        found.append("CUDA")
    return f"built with {info['compiler']}; features: {', '.join(found) or 'none'}"


def warn_if_missing() -> None:
    """Warn once per process if the native core is missing. Called by code on the data path."""
    global _warned
    if _problem and not _warned:
        _warned = True
        logger.warning("running without the native core, which is slower: %s", summary())


_problem = _load()
