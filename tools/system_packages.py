"""Install the system's packages that the tests need, or say what to type.

    python tools/system_packages.py            all of them
    python tools/system_packages.py g++ gcc    these alone

Their names are in ``system_packages.txt``. As root on Debian or its like what is missing is installed;
elsewhere, or where that fails, the command to type is printed. The exit status is 0 all the same: a test
that misses a package is skipped and says so. Where nothing is missing, nothing is said.
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
    # Another apt-get, such as the nightly upgrade, is waited for.
    "--option=DPkg::Lock::Timeout=120",
    # An index that could not be fetched is an error, not a remark.
    "--option=APT::Update::Error-Mode=any",
    # apt's own user cannot write to a temporary folder that belongs to one user.
    "--option=APT::Sandbox::User=root",
]
_FETCHING = re.compile(r"Get:\d+ \S+ \S+ \S+ (\S+)")
_CHANGING = re.compile(r"(Unpacking|Setting up) (\S+)")


def wanted(file: Path = LIST) -> dict[str, str]:
    """Each package's name and why it is needed."""
    lines = (line.partition("#") for line in file.read_text().splitlines())
    return {name.strip(): why.strip() for name, _, why in lines if name.strip()}


def installed() -> set[str]:
    """What dpkg says is installed: names of packages, and those that they provide. Raises ``OSError``."""
    form = "${db:Status-Status}\t${Package}, ${Provides}\n"
    listed = subprocess.run(["dpkg-query", "--show", f"--showformat={form}"], capture_output=True, text=True)
    names: set[str] = set()
    for line in listed.stdout.splitlines():
        status, _, provided = line.partition("\t")
        if status == "installed":
            # A name that is provided may have a version behind it: `libgcc1 (= 1:12.2.0)`.
            names.update(name.split()[0] for name in provided.split(",") if name.strip())
    return names


def install(names: Sequence[str]) -> str | None:
    """Install with apt-get, once more where that failed; its last words where it failed again."""
    progress = Progress(f"the system's packages {', '.join(names)}")
    told: deque[str] = deque(maxlen=30)
    with no_service_is_started():
        for attempt in range(ATTEMPTS):
            if attempt:
                progress.say(f"failed; again in {PAUSE_SECONDS:.0f} s, since networks hiccup")
                time.sleep(PAUSE_SECONDS)
            told.clear()
            if _apt_get(["update"], progress, told) and _apt_get(
                ["install", "--yes", "--no-install-recommends", *names], progress, told
            ):
                progress.end("done")
                return None
    progress.end("failed")
    return "".join(told)


def _apt_get(arguments: Sequence[str], progress: Progress, told: deque[str]) -> bool:
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
            told.append(line)
            if match := _FETCHING.match(line):
                progress.rewrite(f"fetching {match[1]}")
            elif match := _CHANGING.match(line):
                progress.rewrite(f"{match[1].lower()} {match[2]}")
    return process.returncode == 0


@contextmanager
def no_service_is_started() -> Iterator[None]:
    """Keep Debian from starting what it installs, such as a Redis on its usual port, as long as this runs.

    Each package asks the file of this name, and nothing else, whether it may. One that is there already
    belongs to the machine and stays. Ours says no only while this process lives, so that it does no harm
    where a ``kill -9`` leaves it behind.
    """
    script = f"#!/bin/sh\nkill -0 {os.getpid()} 2>/dev/null && exit 101\nexit 0\n"
    try:
        with POLICY.open("x") as file:
            file.write(script)
    except OSError:
        yield
        return
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, ended)


def main(names: Sequence[str] = ()) -> None:
    """Install what is missing, of these where there are names, or say loudly what to type."""
    needed = {name: why for name, why in wanted().items() if not names or name in names}
    try:
        there = installed()
    except OSError:
        _say_what_to_do(needed, "this system has no dpkg: install what corresponds to these packages")
        return
    missing = [name for name in needed if name not in there]
    if not missing:
        return
    problem = "to install them, type"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        last_words = install(missing)
        if last_words is None:
            return
        sys.stderr.write(last_words)
        problem = "apt-get could not install them: mend what it says above, then type"
    command = f"sudo apt-get install -y --no-install-recommends {' '.join(missing)}"
    _say_what_to_do({name: needed[name] for name in missing}, problem, command)


def _say_what_to_do(missing: dict[str, str], problem: str, command: str = "") -> None:
    rule = "-" * 78
    print(rule, "Packages of the system are missing; tests that need one will be skipped.", "", sep="\n")
    for name, why in missing.items():
        print(f"  {name:<20}{why}")
    print("", problem, *([f"  {command}"] if command else []), rule, sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
