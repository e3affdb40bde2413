"""Shared fixtures."""

from __future__ import annotations

from tests.rigs.arenas import arena

__all__ = ["arena"]
