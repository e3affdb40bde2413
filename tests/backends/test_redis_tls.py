"""Redis over TLS with both client libraries: verification, rejections and messages."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier.errors import TierError
from tests.rigs.certificates import expire, make_certificate
from tests.rigs.chunks import FAILED
from tests.rigs.redis_pool import KEYS, assert_rejected, assert_works, backend_on, opened, values
from tests.rigs.servers.redis import HOST, RedisServer, TLSFiles
from tests.rigs.tcp_server import serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loop_may_block("starts servers"),
    pytest.mark.parametrize("scheme", ["redis", "valkey"]),
]

Serve = Callable[..., RedisServer]


@pytest.fixture
def files(tmp_path: Path) -> TLSFiles:
    return make_certificate(tmp_path / "tls")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a Redis, because the packaged Valkey is built without TLS."""
    if reason := RedisServer.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(RedisServer(tmp_path, **options))


def client_settings(scheme: str, server: RedisServer) -> dict[str, Any]:
    """Return the settings with which the redis or valkey backend uses a server."""
    return {"type": scheme, "url": f"{scheme}s://{HOST}:{server.port}"}


def listens(port: int) -> bool:
    """Return whether a port accepts connections."""
    with socket.socket() as connection:
        return connection.connect_ex((HOST, port)) == 0


async def test_self_signed_certificate_as_ca_file(scheme: str, serve: Serve, files: TLSFiles) -> None:
    server = serve(tls=files, password="sesame")
    async with opened(server, **client_settings(scheme, server)) as backend:
        await assert_works(backend)
        assert " used" in await backend.check()


async def test_untrusted_certificate_is_rejected(
    scheme: str, serve: Serve, files: TLSFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=files)
    async with opened(server, **client_settings(scheme, server), ca_file=None) as backend:
        await assert_rejected(
            backend, f"the certificate of {HOST}:{server.port} cannot be verified: self", caplog
        )


async def test_certificate_of_another_authority_is_rejected(
    scheme: str, serve: Serve, files: TLSFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, other = serve(tls=files), make_certificate(tmp_path / "other")
    async with opened(server, **client_settings(scheme, server), ca_file=other.authority) as backend:
        await assert_rejected(
            backend, f"the certificate of {HOST}:{server.port} cannot be verified: ", caplog
        )


async def test_certificate_for_another_host_is_rejected(
    scheme: str, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=make_certificate(tmp_path / "tls", name="DNS:cache.internal"))
    async with opened(server, **client_settings(scheme, server)) as backend:
        await assert_rejected(backend, "cannot be verified: IP address mismatch", caplog)


async def test_client_certificate_is_sent_if_the_server_requires_it(
    scheme: str, serve: Serve, files: TLSFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=files, options=["--tls-auth-clients", "yes"])
    client_files = {"certificate_file": files.certificate, "key_file": files.key}
    async with opened(server, **client_settings(scheme, server), **client_files) as backend:
        await assert_works(backend)
        assert " used" in await backend.check()
    async with opened(server, **client_settings(scheme, server)) as backend:
        await assert_rejected(backend, "check `certificate_file` and `key_file`", caplog)


@contextmanager
def rejecting_server(files: TLSFiles, last_words: str) -> Iterator[int]:
    """Serve TLS 1.3, whose handshake succeeds for the client before the server rejects it. Yield the port.

    ``last_words``: ``alert``, after which the connection stays open, ``close`` or ``reset``.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.authority)
    context.load_cert_chain(files.certificate, files.key)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if last_words == "alert":
        context.verify_mode = ssl.CERT_REQUIRED

    def reject(accepted: socket.socket) -> None:
        with context.wrap_socket(accepted, True, do_handshake_on_connect=False) as client:
            with suppress(ssl.SSLError):
                client.do_handshake()
            if last_words == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if last_words == "alert":
                while socket.socket.recv(client, 1 << 16):
                    pass

    with serving(reject) as port:
        yield port


@pytest.mark.parametrize("last_words", ["alert", "close", "reset"])
async def test_client_is_rejected_after_its_handshake(
    scheme: str, files: TLSFiles, last_words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rejecting_server(files, last_words) as port:
        settings = {"type": scheme, "url": f"{scheme}s://{HOST}:{port}"}
        async with opened(RedisServer(tmp_path, tls=files), **settings) as backend:
            await assert_rejected(backend, "check `certificate_file` and `key_file`", caplog)
        caplog.clear()
        async with opened(RedisServer(tmp_path, tls=files), **settings) as backend:
            assert set(await backend.put(values(8 << 20))) == {FAILED}
            assert "check `certificate_file` and `key_file`" in caplog.text


async def test_expired_certificate_is_rejected(
    scheme: str,
    serve: Serve,
    files: TLSFiles,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expire(files)
    monkeypatch.setattr(RedisServer, "_answers", lambda server: listens(server.port))
    server = serve(tls=files)
    async with opened(server, **client_settings(scheme, server)) as backend:
        await assert_rejected(backend, "certificate has expired: renew it on the server", caplog)


async def test_tls_mismatch_between_client_and_server(
    scheme: str, serve: Serve, files: TLSFiles, tmp_path: Path
) -> None:
    server = serve()
    async with opened(server, **client_settings(scheme, server), deadline=0.5) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match="does `url` match its TLS"):
            await backend.check()
        with pytest.raises(ConnectionError, match="handshake in time: its port is probably a plain one"):
            await backend.contains(KEYS)
    await anyio.to_thread.run_sync(server.stop)
    (tmp_path / "second").mkdir()
    with RedisServer(tmp_path / "second", tls=files) as server:
        plain = {"type": scheme, "url": f"{scheme}://{HOST}:{server.port}", "ca_file": None}
        async with opened(server, **plain, deadline=2) as backend:
            assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
            with pytest.raises(TierError, match=f"{HOST}:{server.port}.*does `url` match its TLS"):
                await backend.check()


@pytest.mark.parametrize("setting", ["ca_file", "certificate_file"])
async def test_file_without_a_certificate_is_refused(
    scheme: str, serve: Serve, files: TLSFiles, setting: str, tmp_path: Path
) -> None:
    server = serve(tls=files)
    text = tmp_path / "text.pem"
    text.write_text("none")
    for path in (text, tmp_path / "missing.pem"):
        backend = backend_on(
            server, **client_settings(scheme, server), **{"ca_file": files.authority, setting: path}
        )
        with pytest.raises(TierError, match=f"pool: `{setting}` is {path}, which does not contain"):
            await backend.open()
