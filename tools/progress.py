"""What a person sees while something is installed: one line on a terminal that is rewritten."""

from __future__ import annotations

import sys
import time

LINE = 78


class Progress:
    """A line that is rewritten on a terminal; elsewhere a line for what takes long."""

    def __init__(self, title: str) -> None:
        self._started = time.monotonic()
        self._terminal = sys.stdout.isatty()
        print(f"installing {title}", flush=True)

    def rewrite(self, text: str) -> None:
        """Show what it is at, in the place of what was shown before; nothing where that cannot be."""
        if self._terminal:
            print(f"\r  {text}"[:LINE].ljust(LINE), end="", flush=True)

    def say(self, text: str) -> None:
        """Show what is to stay."""
        start = "\r" if self._terminal else ""
        print(f"{start}  {text}".ljust(LINE if self._terminal else 0), flush=True)

    def end(self, how: str) -> None:
        """Show how it has ended, and how long it took."""
        self.say(f"{how} in {time.monotonic() - self._started:.0f} s")
