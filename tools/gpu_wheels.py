"""Download kvtier's requirements as wheels, for a machine that has torch but no network.

    python tools/gpu_wheels.py build/gpu-wheels 3.12 pytest hypothesis

The first argument is the target folder, the second the Python version of that machine. The others are
packages in addition to kvtier's own requirements, which are read from ``pyproject.toml``.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")


def fetch(folder: str, python: str, packages: Sequence[str]) -> None:
    """Run ``pip download`` and exit with its status."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, "--only-binary=:all:"]
    command += [f"--python-version={python}", *platforms, *project["dependencies"], *packages]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    fetch(sys.argv[1], sys.argv[2], sys.argv[3:])
