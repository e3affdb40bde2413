"""The limit of open files of this process, and the errors of calls beyond it."""

from __future__ import annotations

import errno
import os
import resource
import sys

LACKING = {
    errno.EMFILE: "raise this process's limit (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "raise the limit of the host (sysctl fs.file-max)",
}
"""What a call fails with that finds no descriptor left, and what to do about it."""


def describe_lack(error: OSError) -> str:
    """Return an error that is one of :data:`LACKING`, with its remedy."""
    code = error.errno or 0
    return f"{os.strerror(code)}: {LACKING[code]}"


def raise_file_limit(needed: int = sys.maxsize) -> int:
    """Raise the soft limit (usually 1024) to ``needed``, or as far as permitted; return the limit then."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    allowed = min(needed, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] if allowed == hard else allowed, limits[1]))
    return max(soft, allowed)
