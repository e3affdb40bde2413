"""Logging of a peer's outages."""

from __future__ import annotations

import logging
from logging import Logger


class Outage:
    """Logs once that a peer is unavailable, and once that it is back."""

    def __init__(self, logger: Logger, name: str, *, quiet: bool = False) -> None:
        """``quiet``: log at debug level only."""
        self._logger = logger
        self._name = name
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.WARNING, logging.INFO)
        self._reported = ""

    def begin(self, kind: str, reason: str) -> None:
        """Log that the peer is unavailable, unless this kind of outage is already reported."""
        if kind != self._reported:
            self._reported = kind
            self._logger.log(self._levels[0], "peer %s: %s; continuing without it", self._name, reason)

    def end(self) -> None:
        """Log that the peer is available again, if an outage was reported."""
        if self._reported:
            self._reported = ""
            self._logger.log(self._levels[1], "peer %s: answers again", self._name)
