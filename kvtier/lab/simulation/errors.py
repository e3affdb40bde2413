"""Errors of a simulation."""

from __future__ import annotations

from kvtier.errors import KVTierError


class SimulationError(KVTierError):
    """An option of a simulation is unusable. The message names it."""
