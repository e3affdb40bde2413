"""Shared fixtures."""

from __future__ import annotations

from tests.arenas import arena

__all__ = ["arena"]
