"""Entry point of a cache process started by an engine: settings on stdin, socket path as argument."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

import anyio

from kvtier.bridge.serve import serve
from kvtier.errors import KVTierError
from kvtier.settings import Settings

logger = logging.getLogger("kvtier")


def main() -> None:
    """Serve until ``linger`` seconds after the last engine has disconnected."""
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    sys.stdin.close()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        anyio.run(partial(serve, settings, socket=Path(sys.argv[1]), exit_when_idle=True))
    except KVTierError as error:
        logger.error("%s", error)  # noqa: TRY400 - no traceback: the engine shows this line as the reason
        sys.exit(1)


if __name__ == "__main__":
    main()
