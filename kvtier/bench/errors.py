"""The errors of this package."""

from __future__ import annotations

from kvtier.errors import KVTierError


class BenchFailed(KVTierError):
    """What is measured, or its limit, did not do what it was asked. The message says so in words."""


class Stuck(BenchFailed):
    """A call has not ended though it was cancelled, and still has the memory that it was given."""
