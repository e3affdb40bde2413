"""Paths in settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator


def _check_path(value: object) -> object:
    """Reject an empty path, which would mean the current folder, often because of an unset variable."""
    if value == "":
        raise ValueError("the path is empty")
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ValueError("the path contains a NUL character")
    return value


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:  # HOME is not set, and the user is not in the password file.
        raise ValueError(f"cannot expand {str(path)!r}: {error}") from error


LocalPath = Annotated[Path, BeforeValidator(_check_path), AfterValidator(_expand)]
