"""Measure tiers and transports as ``kvtier bench`` does: put and get through a cache's tier, and the limit.

::

    python -m benchmarks.tiers
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.common import parse, show

SMALL = ("--size", "1MiB", "--chunks", "2", "--turns", "1")


def main() -> None:
    options = parse(argparse.ArgumentParser(description="Run kvtier bench."))
    command = [sys.executable, "-m", "kvtier", "bench", "--json", *(SMALL if options.small else ())]
    measured = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    rows = [
        (f"{row['name']}: {call}", row["limit"], row[call]["gb_s"], row[call]["ratio"]["median"])
        for row in measured["rows"]
        for call in ("put", "get")
        if row["limit"]
    ]
    show("kvtier bench", ("", "limit", "GB/s", "ratio"), rows)


if __name__ == "__main__":
    main()
