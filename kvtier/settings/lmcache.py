"""Variables of LMCache, which kvtier does not read."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "LMCACHE_"
COMMAND = "kvtier config from-lmcache --env"
"""Translates them."""


def lmcache_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the names of those that are set."""
    return sorted(name for name in variables if name.startswith(PREFIX))
