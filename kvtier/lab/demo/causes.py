"""Diagnose a failed demo: collect the warnings from the logs of its servers."""

from __future__ import annotations

import re
from pathlib import Path

MAX_LINES = 12
"""Lines shown per log, the first ones."""
MAX_CHARACTERS = 400
"""Characters shown per line."""
_WARNING = re.compile(r"\b(?:WARNING|ERROR)\b")
_KVTIER = re.compile(r"kvtier|cache process|\btier \w+:")


def causes(folder: Path) -> list[str]:
    """Return lines to print: the name of each log in ``folder`` that has warnings, and the warnings."""
    shown: list[str] = []
    for log in sorted(folder.glob("*.log")):
        if lines := warnings_in(log):
            shown += [f"{log.name} has these warnings:", *(f"  {line}" for line in lines)]
    return shown or ["the logs have no warnings"]


def warnings_in(log: Path) -> list[str]:
    """Return the warnings and errors in a log, without duplicates.

    Many of vLLM's warnings have nothing to do with the cache: they are returned only if kvtier logged none.
    """
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if _WARNING.search(line)]
    from_kvtier = [line for line in lines if _KVTIER.search(line)]
    return [line[:MAX_CHARACTERS] for line in dict.fromkeys(from_kvtier or lines)][:MAX_LINES]
