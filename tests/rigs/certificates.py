"""Self-signed certificates for tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rigs.servers.redis import TLSFiles

EXPIRED = ("-startdate", "200101000000Z", "-enddate", "200102000000Z")


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
    for command in (
        ["req", "-new", "-key", files.key, "-subj", "/CN=kvtier", "-out", request],
        [
            *("ca", "-batch", "-selfsign", "-rand_serial", "-config", configuration, *EXPIRED),
            *("-keyfile", files.key, "-in", request, "-out", files.certificate),
        ],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)


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
