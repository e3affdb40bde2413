"""A throwaway certificate authority for tests, and the certificates that it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs certificates in a folder. Skips the test if openssl is missing."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed: apt-get install openssl")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = folder / f"{name}.key"
        self.certificate = folder / f"{name}.pem"
        self._run(
            *("req", "-x509", "-subj", f"/CN={name}", "-days", "2", *_NEW_KEY),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def sign(self, name: str, days: int = 2) -> dict[str, str]:
        """Return the ``peer.tls`` settings of one instance. Negative ``days``: an expired certificate."""
        key, request, certificate = (self._folder / f"{name}{end}" for end in ("-key.pem", ".csr", ".pem"))
        self._run("req", "-subj", f"/CN={name}", *_NEW_KEY, "-keyout", str(key), "-out", str(request))
        self._run(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", str(days), "-out", str(certificate)),
        )
        return {"certificate": str(certificate), "key": str(key), "authority": str(self.certificate)}

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
