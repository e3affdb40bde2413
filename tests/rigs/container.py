"""Run a program as a container does, without one: in namespaces, as another user, with a read-only root.

    python -m tests.rigs.container FOLDER PROGRAM ARGUMENTS...

``FOLDER``, with the settings, becomes ``/run/settings``. Needs root, and the commands ``unshare``, ``mount``
and ``setpriv``.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

USER = 10_001
"""As in the Containerfile."""
SHM = "64m"
"""What Docker gives a container by default."""
VOLUMES = ("/run/kvtier", "/var/cache/kvtier")
SETTINGS = Path("/run/settings")
ROOT = Path(__file__).parents[2]
ISOLATED = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--ipc", "--uts"]


def missing() -> str:
    """Return why this machine cannot do it; empty if it can."""
    if os.geteuid():
        return "needs root"
    if absent := [name for name in ("unshare", "mount", "setpriv") if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run([*ISOLATED, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


def command(folder: Path, *program: str) -> list[str]:
    """Return the command that runs a program so, with its settings in a folder."""
    return [*ISOLATED, sys.executable, "-m", "tests.rigs.container", str(folder), *program]


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _keep_visible(folder: Path) -> None:
    """Let other users find a folder, although a folder above it, such as root's home, is closed to them."""
    closed = next((above for above in reversed(folder.parents) if not above.stat().st_mode & 0o001), None)
    if closed is None:
        return
    _mount("--bind", str(folder), "/mnt")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed))
    folder.mkdir(parents=True)
    _mount("--move", "/mnt", str(folder))


def _mounted() -> Iterator[str]:
    """Yield where disks are mounted, without those that a later mount covers: their places lead elsewhere."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, place = before.split()[0], before.split()[4]
        if not after.startswith(("proc ", "sysfs ", "tmpfs ", "cgroup", "dev")) and _mount_at(place) == mount:
            yield place


def _mount_at(place: str) -> str | None:
    """Return the number of the mount that a path leads to; None if nothing is there."""
    try:
        found = os.open(place, os.O_PATH)
    except FileNotFoundError:
        return None
    try:
        info = Path(f"/proc/self/fdinfo/{found}").read_text()
    finally:
        os.close(found)
    return dict(line.split(":\t") for line in info.splitlines())["mnt_id"]


def main(settings: Path, *program: str) -> None:
    """Set up the namespaces, and become the program."""
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    shutil.copytree(settings, SETTINGS)
    SETTINGS.chmod(0o755)
    _keep_visible(Path(sys.base_prefix))
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/var/cache")
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp")
    _mount("-t", "tmpfs", "-o", f"mode=1777,size={SHM}", "tmpfs", "/dev/shm")
    for volume in map(Path, VOLUMES):
        volume.mkdir(mode=0o700)
        os.chown(volume, USER, USER)
    for place in _mounted():
        _mount("-o", "remount,bind,ro", place)
    # As much as this machine allows.
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (locked, locked))
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 65_536), min(files, 65_536)))
    os.chdir(ROOT)
    ids = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    limits = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    os.execvp("setpriv", ["setpriv", *ids, *limits, *program])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
