"""Variables of LMCache, which kvtier does not read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from logging import Logger

PREFIX = "LMCACHE_"
COMMAND = "kvtier config from-lmcache --env"
"""Translates them."""


def lmcache_variables(variables: Mapping[str, str]) -> list[str]:
    """Return the names of those that are set."""
    return sorted(name for name in variables if name.startswith(PREFIX))


def warn_of_variables(logger: Logger) -> None:
    """Log the names of those that are set, and what to type."""
    if names := lmcache_variables(os.environ):
        logger.warning("no effect on kvtier: %s; `%s` translates them", ", ".join(names), COMMAND)
