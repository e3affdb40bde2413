"""Why a demo did not find what it should: the warnings in the logs of its servers."""

from __future__ import annotations

import re
from pathlib import Path

MAX_LINES = 12
"""Shown of each log, the first ones."""
MAX_CHARACTERS = 400
"""Of a line."""
_WARNING = re.compile(r"\b(?:WARNING|ERROR)\b")
_OURS = re.compile(r"kvtier|cache process|\btier \w+:")


def causes(folder: Path) -> list[str]:
    """Return lines for people: each log in a folder that has warnings, and these."""
    shown: list[str] = []
    for log in sorted(folder.glob("*.log")):
        if lines := warnings_in(log):
            shown += [f"{log.name} has these warnings:", *(f"  {line}" for line in lines)]
    return shown or ["the logs have no warnings"]


def warnings_in(log: Path) -> list[str]:
    """Return the warnings and errors in a log, each once.

    vLLM warns of much that has nothing to do with a cache: such lines come only where there are no others.
    """
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if _WARNING.search(line)]
    ours = [line for line in lines if _OURS.search(line)]
    return [line[:MAX_CHARACTERS] for line in dict.fromkeys(ours or lines)][:MAX_LINES]
