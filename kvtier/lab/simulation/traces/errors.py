"""Errors of traces."""

from __future__ import annotations

from kvtier.errors import KVTierError


class TraceError(KVTierError):
    """A trace cannot be read. The message names file, line and reason."""
