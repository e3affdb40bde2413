"""Certificates for tests: self-signed ones, and those of a throwaway authority. Skips without openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rigs.servers.redis import TLSFiles

EXPIRED = ("-startdate", "200101000000Z", "-enddate", "200102000000Z")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: str | Path) -> None:
    """Run openssl. Skips the test if it is missing."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing: apt-get install openssl")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def expire(files: TLSFiles) -> None:
    """Replace a self-signed certificate by one that has expired."""
    folder = files.certificate.parent
    configuration = folder / "ca.cnf"
    (folder / "index.txt").touch()
    configuration.write_text(
        f"[ca]\ndefault_ca=a\n[a]\ndatabase={folder}/index.txt\nnew_certs_dir={folder}\nserial={folder}/serial\npolicy=p\n"
        "default_md=sha256\nx509_extensions=e\n[p]\ncommonName=supplied\n"
        "[e]\nsubjectAltName=IP:127.0.0.1\nbasicConstraints=CA:TRUE\n"
    )
    request = folder / "request.pem"
    openssl("req", "-new", "-key", files.key, "-subj", "/CN=kvtier", "-out", request)
    openssl(
        *("ca", "-batch", "-selfsign", "-rand_serial", "-config", configuration, *EXPIRED),
        *("-keyfile", files.key, "-in", request, "-out", files.certificate),
    )


def make_certificate(folder: Path, name: str = "IP:127.0.0.1") -> TLSFiles:
    """Create a self-signed certificate for a host (``DNS:...`` or ``IP:...``)."""
    folder.mkdir(parents=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    openssl(
        *("req", "-x509", "-days", "2", "-subj", "/CN=kvtier", "-addext", f"subjectAltName={name}"),
        *(*_NEW_KEY, "-keyout", key, "-out", certificate),
    )
    return TLSFiles(certificate, key, authority=certificate)


class Authority:
    """A throwaway certificate authority that signs certificates in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = folder / f"{name}.key"
        self.certificate = folder / f"{name}.pem"
        openssl(
            *("req", "-x509", "-subj", f"/CN={name}", "-days", "2", *_NEW_KEY),
            *("-keyout", self._key, "-out", self.certificate),
        )

    def sign(self, name: str, days: int = 2) -> dict[str, str]:
        """Return the ``peer.tls`` settings of one instance. Negative ``days``: an expired certificate."""
        key, request, certificate = (self._folder / f"{name}{end}" for end in ("-key.pem", ".csr", ".pem"))
        openssl("req", "-subj", f"/CN={name}", *_NEW_KEY, "-keyout", key, "-out", request)
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", str(days), "-out", certificate),
        )
        return {"certificate": str(certificate), "key": str(key), "authority": str(self.certificate)}
