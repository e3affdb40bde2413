"""Paths in settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
"""A URL, also one that :class:`pathlib.Path` has read, which keeps a single slash."""


def _check_path(value: object) -> object:
    """Reject an empty path, which would mean the current folder, often because of an unset variable.

    Also reject a URL, which would mean a folder such as ``file:`` in the current one.
    """
    if value == "":
        raise ValueError("the path is empty")
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ValueError("the path contains a NUL character")
    if isinstance(value, str | Path) and (url := _URL.match(str(value))):
        scheme, rest = url.groups()
        remedy = f"use /{rest}" if scheme.lower() in ("file", "unix") else "use a path on this host"
        raise ValueError(f"{str(value)!r} is a URL, not a path: {remedy}")
    return value


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # HOME is not set, and the user is not in the password file.
        raise ValueError(f"cannot expand {str(path)!r}: {error}") from error


LocalPath = Annotated[Path, BeforeValidator(_check_path), AfterValidator(_expand)]
"""A setting that is a path on this host. `~` is expanded; an empty path and a URL are refused."""
