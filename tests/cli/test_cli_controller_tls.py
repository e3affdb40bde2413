"""Commands verify the certificate of a controller whose address begins with https."""

from __future__ import annotations

import ssl
from pathlib import Path

import anyio.to_thread
import pytest

from kvtier.cli.controller_client import Controller
from kvtier.errors import KVTierError
from kvtier.http import serving
from tests.rigs.certificates import make_certificate
from tests.test_http import hello

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_certificate_of_another_authority_is_refused(scheme: str, tmp_path: Path) -> None:
    files = make_certificate(tmp_path / "own")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)

    def ask() -> None:
        with Controller(f"{scheme}://{host}:{port}") as controller:
            controller.events(1)

    async with serving(hello, "127.0.0.1:0", ssl=context) as (host, port):
        with pytest.raises(KVTierError, match="CERTIFICATE_VERIFY_FAILED"):
            await anyio.to_thread.run_sync(ask)
