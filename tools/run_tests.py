"""Run pytest twice: on tests/integrations, then on all others. vLLM changes the interpreter that imports it.

    python tools/run_tests.py -m "not slow" -k reuse

The arguments are pytest's. With a path among them, there is one run, with that path.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

OWN_RUN = "tests/integrations"
SUCCESS, NOTHING_SELECTED = 0, 5


def commands(options: Sequence[str], others: Sequence[str] = ()) -> list[list[str]]:
    """Return the command of each run. ``others``: what to run besides ``OWN_RUN``; default: all tests."""
    pytest = [sys.executable, "-m", "pytest", *options]
    if any("/" in option and Path(option.partition("::")[0]).exists() for option in options):
        return [pytest]
    # Without workers: each would import vLLM.
    return [[*pytest, "-n0", OWN_RUN], [*pytest, *others]]


def passed(codes: Iterable[int]) -> bool:
    """Return whether all runs passed, of which some may have no test that the options select."""
    return {*codes} in ({SUCCESS}, {SUCCESS, NOTHING_SELECTED})


def main() -> None:
    """Run all, even if the first run fails."""
    runs = commands(sys.argv[1:])
    codes = [subprocess.run(command, check=False).returncode for command in runs]
    if codes[0] not in (SUCCESS, NOTHING_SELECTED) and len(codes) > 1:
        print(f"{OWN_RUN}: FAILED, see above")
    sys.exit(not passed(codes))


if __name__ == "__main__":
    main()
