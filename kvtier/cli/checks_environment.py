"""Checks of ``kvtier doctor`` on the environment: variables, temporary folder, and the ``vllm`` command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from shutil import which

from kvtier.cli.check import Check
from kvtier.settings import SOCKET_PATH_BYTES

VLLM_SUFFIX_BYTES = 37
"""What vLLM adds to the path of the temporary folder for a socket: a slash and a UUID."""
COMMAND_SECONDS = 60.0
SERVER = "python -m vllm.entrypoints.openai.api_server"
"""vLLM's server without its command."""


def check_temporary_folder(variables: Mapping[str, str] = os.environ) -> Check:
    """Check that sockets fit into the temporary folder, and that it is the one that ``TMPDIR`` names."""
    name = "TMPDIR"
    folder = tempfile.gettempdir()
    named = variables.get(name, "")
    if named and Path(named).absolute() != Path(folder):
        found = f"{named} is not a folder that can be written; {folder} is used instead"
        return Check(name, "warn", found, f"mkdir -p {named}, or unset {name}")
    taken = len(os.fsencode(folder)) + VLLM_SUFFIX_BYTES
    if taken > SOCKET_PATH_BYTES:
        found = (
            f"{folder} is too long: vLLM's sockets in it have {taken} bytes, at most {SOCKET_PATH_BYTES} work"
        )
        return Check(name, "warn", found, f"export {name}=/tmp")
    return Check(name, "ok", folder)


def check_lmcache_variables(variables: Mapping[str, str] = os.environ) -> Check:
    """Check that no variables of LMCache are set, which kvtier does not read."""
    name = "LMCACHE_*"
    found = sorted(variable for variable in variables if variable.startswith("LMCACHE_"))
    if found:
        remedy = f"use the settings of docs/settings.md, and unset {' '.join(found)}"
        return Check(name, "warn", f"{', '.join(found)}: set without effect on kvtier", remedy)
    return Check(name, "ok", "none set")


class VLLMCommand:
    """The ``vllm`` command, started with ``--version`` to see whether it can: that takes seconds."""

    def __init__(self) -> None:
        own = str(Path(sys.executable).parent)
        self.path = which("vllm", path=os.pathsep.join((own, os.environ.get("PATH", ""))))
        self._error: OSError | None = None
        self._process: subprocess.Popen[str] | None = None
        if self.path is None:
            return
        try:
            self._process = subprocess.Popen(
                [self.path, "--version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:  # Its interpreter does not exist, for example.
            self._error = error

    def check(self) -> Check:
        """Wait for the command, and return whether it has started. Blocking."""
        name = "vllm command"
        remedy = f"start `{SERVER}` instead, or reinstall vLLM"
        if self._error is not None:
            return Check(name, "warn", f"{self.path} cannot be started: {self._error.strerror}", remedy)
        if self._process is None:
            return Check(name, "warn", "not found", f"start `{SERVER}`, or add its folder to PATH")
        try:
            output, _ = self._process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return Check(name, "warn", f"{self.path} --version does not end", remedy)
        last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "no output")
        if self._process.returncode:
            return Check(name, "warn", f"{self.path} cannot start: {last[:300]}", remedy)
        return Check(name, "ok", f"{self.path}, {last[:100]}")
