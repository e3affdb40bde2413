"""Progress of an installation: one line that is rewritten on a terminal."""

from __future__ import annotations

import sys
import time

LINE = 78


class Progress:
    """Shows progress in one line on a terminal; otherwise prints only the permanent lines."""

    def __init__(self, title: str) -> None:
        self._started = time.monotonic()
        self._terminal = sys.stdout.isatty()
        print(f"installing {title}", flush=True)

    def rewrite(self, text: str) -> None:
        """Replace the current line. Prints nothing if standard output is not a terminal."""
        if self._terminal:
            print(f"\r  {text}"[:LINE].ljust(LINE), end="", flush=True)

    def print_line(self, text: str) -> None:
        """Print a permanent line."""
        start = "\r" if self._terminal else ""
        print(f"{start}  {text}".ljust(LINE if self._terminal else 0), flush=True)

    def end(self, result: str) -> None:
        """Print the result and the elapsed time."""
        self.print_line(f"{result} in {time.monotonic() - self._started:.0f} s")
