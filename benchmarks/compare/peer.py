"""Client of the process that runs LMCache."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peer import python

SCRIPT = Path(__file__).with_name("lmcache_process.py")


class LMCacheProcess:
    """Context manager that starts ``lmcache_process.py``, and kills it at the end."""

    def __init__(self, options: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [str(python()), str(SCRIPT), *options],
            env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, kind: str, call: str) -> float:
        """Run a call; return its seconds."""
        assert self._process.stdin is not None
        print(json.dumps([kind, call]), file=self._process.stdin)
        return float(self._receive())

    def _receive(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("LMCache exited; see its output above")
        return str(json.loads(line))
