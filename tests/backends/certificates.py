"""Self-signed certificates for tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers.redis import TLSFiles


def make_certificate(folder: Path, name: str = "IP:127.0.0.1") -> TLSFiles:
    """Create a self-signed certificate for a host (``DNS:...`` or ``IP:...``). Skips without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: apt-get install openssl")
    folder.mkdir(parents=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        *(
            "openssl",
            "req",
            "-x509",
            "-days",
            "2",
            "-subj",
            "/CN=kvtier",
            "-addext",
            f"subjectAltName={name}",
        ),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", str(key), "-out", str(certificate)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return TLSFiles(certificate, key, authority=certificate)
