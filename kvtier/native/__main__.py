"""``python -m kvtier.native``: what was built."""

from __future__ import annotations

from kvtier import native

print("kvtier's native core:", native.summary())  # noqa: T201 - asked for on the command line
