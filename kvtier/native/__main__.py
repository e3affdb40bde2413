"""Print how the native core was built: ``python -m kvtier.native``."""

from __future__ import annotations

from kvtier import native

print("kvtier's native core:", native.summary())  # noqa: T201 - the output of a command
