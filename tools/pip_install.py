"""pip, told so that a person can follow it: what it is at, what is large, and everything where it fails.

    python tools/pip_install.py "kvtier and its tools" -e . --group test

The first argument says what is installed; the others are those of ``pip install``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

LARGE_MEGABYTES = 20
LINE = 78
_COLLECTING = re.compile(r"Collecting (\S+)")
_DOWNLOADING = re.compile(r"\s*Downloading (?:\S+/)?(\S+?)-\d\S* \(([\d.]+) (kB|MB|GB)\)")
_MEGABYTES = {"kB": 0.001, "MB": 1.0, "GB": 1000.0}


def pip_install(title: str, arguments: Sequence[str]) -> None:
    """Run ``pip install`` with this interpreter. Where it fails, leaves with its status."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    shown = _Shown(title)
    last: deque[str] = deque(maxlen=60)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            last.append(line)
            shown.follow(line)
    if pip.returncode:
        shown.end("failed")
        sys.stderr.writelines(last)
        sys.exit(pip.returncode)
    shown.end("done")


class _Shown:
    """A line that is rewritten on a terminal; elsewhere a line for what takes long."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._collected = 0
        self._started = time.monotonic()
        self._terminal = sys.stdout.isatty()
        print(f"installing {title}", flush=True)

    def follow(self, line: str) -> None:
        if match := _COLLECTING.match(line):
            self._collected += 1
            self._rewrite(f"{self._collected} packages, now {match[1]}")
        elif match := _DOWNLOADING.match(line):
            megabytes = float(match[2]) * _MEGABYTES[match[3]]
            if megabytes >= LARGE_MEGABYTES:
                self._say(f"downloading {match[1]}, {megabytes:,.0f} MB")
        elif line.startswith("Building wheel"):
            self._say(line.strip().lower())
        elif line.startswith("Installing collected packages"):
            self._say(f"unpacking {line.count(',') + 1} packages")

    def end(self, how: str) -> None:
        seconds = time.monotonic() - self._started
        self._say(f"{how} in {seconds:.0f} s")

    def _rewrite(self, text: str) -> None:
        if self._terminal:
            print(f"\r  {text}"[:LINE].ljust(LINE), end="", flush=True)

    def _say(self, text: str) -> None:
        start = "\r" if self._terminal else ""
        print(f"{start}  {text}".ljust(LINE if self._terminal else 0), flush=True)


if __name__ == "__main__":
    pip_install(sys.argv[1], sys.argv[2:])
