"""Errors of this package."""

from __future__ import annotations

from kvtier.errors import KVTierError


class BenchFailed(KVTierError):
    """A measured tier or transport, or its limit, failed. The message states how."""


class Stuck(BenchFailed):
    """A call does not end although it was cancelled, and may still access the memory passed to it."""
