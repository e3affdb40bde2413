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


LocalPath = Annotated[Path, BeforeValidator(_check_path), AfterValidator(Path.expanduser)]
