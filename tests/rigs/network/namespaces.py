"""System calls for network namespaces. As a script, run a command in a namespace:

    python namespaces.py NAMESPACE PARENT COMMAND...

``NAMESPACE`` is an inherited file descriptor, ``PARENT`` the id of the process that the command must not
outlive. Startup takes 15 ms, because this file imports only the standard library.

See namespaces(7), setns(2), network_namespaces(7). /sys shows the network devices of the namespace that it
was mounted in: sysfs(5).
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS = 0x0002_0000
CLONE_NEWNET = 0x4000_0000
MS_REC = 0x4000
MS_SLAVE = 0x8_0000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1

# Python has os.setns and os.unshare only since 3.12.
_libc = ctypes.CDLL(None, use_errno=True)


def leave() -> None:
    """Move this thread into a new, empty network namespace. Raises ``OSError``."""
    _check(_libc.unshare(CLONE_NEWNET), "unshare")


def enter(namespace: int) -> None:
    """Move this thread into the network namespace of a file descriptor. Raises ``OSError``."""
    _check(_libc.setns(namespace, CLONE_NEWNET), "setns")


def signal_at_parents_death(number: int) -> None:
    """Send this process a signal when the thread that started it exits. Raises ``OSError``."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def see_own_devices() -> None:
    """Mount /sys with this network namespace's devices, for this process only. Raises ``OSError``."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "mount")
    _libc.umount2(b"/sys", MNT_DETACH)  # An error is fine: nothing was mounted there.
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount")


def _check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _main() -> None:
    namespace, parent, *command = sys.argv[1:]
    enter(int(namespace))
    # Check only now: from here on, the clean-up of the namespace after the parent's exit finds this process.
    if os.getppid() != int(parent):
        sys.exit("the parent process has exited")
    os.close(int(namespace))
    see_own_devices()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    _main()
