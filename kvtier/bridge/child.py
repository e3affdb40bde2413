"""Entry point of a cache process started by an engine: settings on stdin, socket path as argument."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from kvtier.bridge.serve import serve
from kvtier.concurrency.children import settle
from kvtier.errors import KVTierError
from kvtier.settings import Settings

logger = logging.getLogger("kvtier")


def main() -> None:
    """Start a cache process that is no descendant of the engine. Exit once it serves, or with its status.

    A vLLM that is stopped kills all descendants of its engine (``kill_process_tree`` in
    ``vllm/utils/system_utils.py``): the chunks in memory would be lost, for other engines as well.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        # A byte, or the end of the pipe if it has exited before.
        status = 0 if os.read(reader, 1) else os.waitpid(process, 0)[1]
        os._exit(abs(os.waitstatus_to_exitcode(status)))
    os.close(reader)
    _serve(writer)


def _serve(writer: int) -> None:
    """Serve until ``linger`` seconds after the last engine has disconnected.

    ``writer``: a descriptor that receives a byte once engines can connect. It is closed then.
    """

    def notify() -> None:
        with suppress(BrokenPipeError):
            os.write(writer, b"1")
        os.close(writer)

    settle()
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    sys.stdin.close()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        socket = Path(sys.argv[1])
        anyio.run(partial(serve, settings, socket=socket, exit_when_idle=True, on_serving=notify))
    except KVTierError as error:
        logger.error("%s", error)  # noqa: TRY400 - no traceback: the engine shows this line as the reason
        sys.exit(1)


if __name__ == "__main__":
    main()
