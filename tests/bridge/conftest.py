"""Fixtures of a real ``kvtier serve``."""

from __future__ import annotations

from tests.rigs.bridges import _close_bridges, start

__all__ = ["_close_bridges", "start"]
