"""pip, told so that a person can follow it: what it is at, what is large, and everything where it fails.

    python tools/pip_install.py "kvtier and its tools" -e . --group test

The first argument says what is installed; the others are those of ``pip install``.
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


class _Shown(Progress):
    """pip's own words in few of them."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._collected = 0

    def follow(self, line: str) -> None:
        """Show what one line of pip's says."""
        if match := _COLLECTING.match(line):
            self._collected += 1
            self.rewrite(f"{self._collected} packages, now {match[1]}")
        elif match := _DOWNLOADING.match(line):
            megabytes = float(match[2]) * _MEGABYTES[match[3]]
            if megabytes >= LARGE_MEGABYTES:
                self.say(f"downloading {match[1]}, {megabytes:,.0f} MB")
        elif line.startswith("Building wheel"):
            self.say(line.strip().lower())
        elif line.startswith("Installing collected packages"):
            self.say(f"unpacking {line.count(',') + 1} packages")


if __name__ == "__main__":
    pip_install(sys.argv[1], sys.argv[2:])
