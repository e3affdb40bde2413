"""Where each setting was given: the file and its line, the variable, or the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Origin(NamedTuple):
    """The source of a value."""

    kind: Literal["default", "file", "environment", "override"]
    where: str = ""
    """Path of the file, name of the variable, or empty."""
    line: int = 0
    """Line in the file, from 1."""


@dataclass
class Origins:
    """The sources of all values."""

    given: dict[str, Origin] = field(default_factory=dict)
    """By dotted key, without lines. A list such as ``tiers`` has one source."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Lines in the file, also of keys within lists, such as ``tiers[1].path``."""

    def of(self, key: str) -> Origin:
        """Return the source of the dotted ``key``, or of what encloses it."""
        origin = next((self.given[name] for name in _enclosing(key) if name in self.given), Origin("default"))
        if origin.kind != "file":
            return origin
        line = next((self.lines[name] for name in _enclosing(key) if name in self.lines), 0)
        return origin._replace(line=line)

    def at(self, key: str) -> str:
        """Return the dotted ``key`` and where it was set, for a message."""
        origin = self.of(key)
        if origin.kind == "override":
            return f"{key} (set on the command line, in code or in kv_connector_extra_config)"
        line = f", line {origin.line}" if origin.line else ""
        return f"{key} (in {origin.where}{line})" if origin.where else key


def _enclosing(key: str) -> Iterator[str]:
    """Yield the key and those that enclose it: ``tiers[1].path``, ``tiers[1]``, ``tiers``."""
    while key:
        yield key
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
