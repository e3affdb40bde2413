"""Run ``pip install`` with concise progress output; print pip's own output only if it fails.

    python tools/pip_install.py "kvtier and its tools" -e . --group test

The first argument is a title; the others are passed to ``pip install``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

from progress import Progress

LARGE_MEGABYTES = 20
_COLLECTING = re.compile(r"Collecting (\S+)")
_DOWNLOADING = re.compile(r"\s*Downloading (?:\S+/)?(\S+?)-\d\S* \(([\d.]+) (kB|MB|GB)\)")
_MEGABYTES = {"kB": 0.001, "MB": 1.0, "GB": 1000.0}


def pip_install(title: str, arguments: Sequence[str]) -> None:
    """Run ``pip install`` with this interpreter. If it fails, exit with its status."""
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    progress = _PipProgress(title)
    last: deque[str] = deque(maxlen=60)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            last.append(line)
            progress.follow(line)
    if pip.returncode:
        progress.end("failed")
        sys.stderr.writelines(last)
        sys.exit(pip.returncode)
    progress.end("done")


class _PipProgress(Progress):
    """Condenses pip's output."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._collected = 0

    def follow(self, line: str) -> None:
        """Process one line of pip's output."""
        if match := _COLLECTING.match(line):
            self._collected += 1
            self.rewrite(f"{self._collected} packages, now {match[1]}")
        elif match := _DOWNLOADING.match(line):
            megabytes = float(match[2]) * _MEGABYTES[match[3]]
            if megabytes >= LARGE_MEGABYTES:
                self.print_line(f"downloading {match[1]}, {megabytes:,.0f} MB")
        elif line.startswith("Building wheel"):
            self.print_line(line.strip().lower())
        elif line.startswith("Installing collected packages"):
            self.print_line(f"unpacking {line.count(',') + 1} packages")


if __name__ == "__main__":
    pip_install(sys.argv[1], sys.argv[2:])
