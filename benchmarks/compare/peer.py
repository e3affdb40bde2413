"""The process in which LMCache is at work."""

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
    """Runs while the block lasts, and is killed then."""

    def __init__(self, options: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [str(python()), str(SCRIPT), *options],
            env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, kind: str, call: str) -> float:
        """The seconds that one call took."""
        assert self._process.stdin is not None
        print(json.dumps([kind, call]), file=self._process.stdin)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("LMCache has ended; what it said is above")
        return str(json.loads(line))
