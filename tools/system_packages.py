"""Install the system packages that the tests need, or print the command for it.

    python tools/system_packages.py            all of them
    python tools/system_packages.py g++ gcc    only these

``system_packages.txt`` lists them. As root on Debian and its derivatives, this installs missing packages;
otherwise, or if that fails, it prints the command to run. The exit status is always 0: tests that need a
missing package are skipped with a reason. Prints nothing if no package is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from progress import Progress

LIST = Path(__file__).with_name("system_packages.txt")
POLICY = Path("/usr/sbin/policy-rc.d")
ATTEMPTS = 2
PAUSE_SECONDS = 5.0
APT_GET = [
    "apt-get",
    "--quiet",
    "--option=Acquire::Retries=2",
    # Wait for another apt-get, such as the nightly upgrade.
    "--option=DPkg::Lock::Timeout=120",
    # Fail if an index cannot be fetched; the default is a warning.
    "--option=APT::Update::Error-Mode=any",
    # apt's sandbox user cannot write to a private temporary folder.
    "--option=APT::Sandbox::User=root",
]
_FETCHING = re.compile(r"Get:\d+ \S+ \S+ \S+ (\S+)")
_CHANGING = re.compile(r"(Unpacking|Setting up) (\S+)")


def required(file: Path = LIST) -> dict[str, str]:
    """Return the name of each package and the reason for it."""
    lines = (line.partition("#") for line in file.read_text().splitlines())
    return {name.strip(): reason.strip() for name, _, reason in lines if name.strip()}


def installed() -> set[str]:
    """Return the names of installed packages, and the names that they provide. Raises ``OSError``."""
    form = "${db:Status-Status}\t${Package}, ${Provides}\n"
    listed = subprocess.run(["dpkg-query", "--show", f"--showformat={form}"], capture_output=True, text=True)
    names: set[str] = set()
    for line in listed.stdout.splitlines():
        status, _, provided = line.partition("\t")
        if status == "installed":
            # A provided name can be followed by a version: `libgcc1 (= 1:12.2.0)`.
            names.update(name.split()[0] for name in provided.split(",") if name.strip())
    return names


def install(names: Sequence[str]) -> str | None:
    """Install with apt-get, with one retry. Return the end of its output if that fails, else ``None``."""
    progress = Progress(f"system packages {', '.join(names)}")
    last_lines: deque[str] = deque(maxlen=30)
    with services_disabled():
        for attempt in range(ATTEMPTS):
            if attempt:
                progress.print_line(f"failed; retrying in {PAUSE_SECONDS:.0f} s, in case of a network error")
                time.sleep(PAUSE_SECONDS)
            last_lines.clear()
            if _apt_get(["update"], progress, last_lines) and _apt_get(
                ["install", "--yes", "--no-install-recommends", *names], progress, last_lines
            ):
                progress.end("done")
                return None
    progress.end("failed")
    return "".join(last_lines)


def _apt_get(arguments: Sequence[str], progress: Progress, last_lines: deque[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(
        [*APT_GET, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last_lines.append(line)
            if match := _FETCHING.match(line):
                progress.rewrite(f"fetching {match[1]}")
            elif match := _CHANGING.match(line):
                progress.rewrite(f"{match[1].lower()} {match[2]}")
    return process.returncode == 0


@contextmanager
def services_disabled() -> Iterator[None]:
    """Prevent Debian from starting services that it installs, such as a Redis on its default port.

    Packages run ``policy-rc.d`` to find out if they may start services. An existing file stays unchanged.
    The one written here forbids it only while this process lives, so that it does no harm if a ``kill -9``
    leaves it behind.
    """
    script = f"#!/bin/sh\nkill -0 {os.getpid()} 2>/dev/null && exit 101\nexit 0\n"
    try:
        with POLICY.open("x") as file:
            file.write(script)
    except OSError:
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, previous)


def main(names: Sequence[str] = ()) -> None:
    """Install missing packages, only those in ``names`` if given; otherwise print the command to run."""
    needed = {name: reason for name, reason in required().items() if not names or name in names}
    try:
        present = installed()
    except OSError:
        _print_instructions(needed, "this system has no dpkg: install the corresponding packages")
        return
    missing = [name for name in needed if name not in present]
    if not missing:
        return
    problem = "to install them, run"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        output = install(missing)
        if output is None:
            return
        sys.stderr.write(output)
        problem = "apt-get could not install them: fix the error above, then run"
    command = f"sudo apt-get install -y --no-install-recommends {' '.join(missing)}"
    _print_instructions({name: needed[name] for name in missing}, problem, command)


def _print_instructions(missing: dict[str, str], problem: str, command: str = "") -> None:
    rule = "-" * 78
    print(rule, "System packages are missing; tests that need one will be skipped.", "", sep="\n")
    for name, reason in missing.items():
        print(f"  {name:<20}{reason}")
    print("", problem, *([f"  {command}"] if command else []), rule, sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
