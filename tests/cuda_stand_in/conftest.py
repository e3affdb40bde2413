"""Shared fixtures."""

from __future__ import annotations

from tests.rigs.arenas import arena
from tests.rigs.cuda_stand_in.fixtures import stand_in

__all__ = ["arena", "stand_in"]
