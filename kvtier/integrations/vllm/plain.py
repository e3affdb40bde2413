"""Convert what vLLM, torch, transformers and requests pass to kvtier into Python's builtin types.

Only these are encoded into messages and keys and validated as settings. Others look like them: a hub's
revision is a subclass of ``str``, a dtype or a path is used as a name, an index may be one of numpy's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import msgspec

_SUBCLASSED: dict[type, Callable[[Any], Any]] = {
    # Not str(value) and the like, whose methods a subclass may define.
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: b"".__add__,
}
MAX_SHOWN = 128
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def plain(value: Any) -> Any:
    """Return a value of builtin types only, equal in every process. Keys of dictionaries become ``str``.

    Sets become sorted lists, and structs and dataclasses become dictionaries. Raises ``ValueError`` if it is
    nested too deeply, or if a set has elements of several types.
    """
    try:
        return msgspec.to_builtins(
            value, builtin_types=(bytes,), str_keys=True, order="deterministic", enc_hook=builtin
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except TypeError as error:  # The elements of a set have no order.
        raise ValueError(str(error)) from error


def builtin(value: Any) -> Any:
    """Return the builtin equivalent of one value that msgspec does not know: an ``enc_hook``."""
    for kind, exact in _SUBCLASSED.items():
        if isinstance(value, kind):
            return exact(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # Scalars and arrays of numpy, tensors of torch.
        return value.tolist()
    return _ADDRESS.sub("", str(value))  # Such as torch.float32.


def text(value: object) -> str:
    """Return a name as ``str``. An empty one for ``None``."""
    return "" if value is None else str(plain(value))


def shown(name: object) -> str:
    """Return a name that a client may have chosen as it is logged and sent: short, and encodable."""
    return text(name)[:MAX_SHOWN].encode(errors="replace").decode()


def commit_of(revision: str | None) -> str | None:
    """Return the commit that vLLM has resolved a hub's revision to, else the revision.

    vLLM resolves it once (``ModelConfig.__post_init__``), to a ``str`` that equals what the user has typed.
    """
    return text(getattr(revision, "resolved", None) or revision) or None
