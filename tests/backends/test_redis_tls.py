"""Redis over TLS, through either client library: what is verified, what is refused, what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtier.backends.redis import RedisBackend
from kvtier.errors import TierError
from kvtier.testing.servers.redis import HOST, RedisServer, TLSFiles

from .certificates import make_certificate
from .redis_pool import FAILED, KEYS, assert_says_nothing, assert_works, backend_on, opened, values, warnings

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.loop_may_block("it starts servers"),
    pytest.mark.parametrize("scheme", ["redis", "valkey"]),
]

Serve = Callable[..., RedisServer]


@pytest.fixture
def files(tmp_path: Path) -> TLSFiles:
    return make_certificate(tmp_path / "tls")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a Redis, since the Valkey that a package carries has no TLS."""
    if reason := RedisServer.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(RedisServer(tmp_path, **options))


def through(scheme: str, server: RedisServer) -> dict[str, Any]:
    """The settings that make either backend use a server."""
    return {"type": scheme, "url": f"{scheme}s://{HOST}:{server.port}"}


async def assert_refuses(backend: RedisBackend, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing goes there, and why is said once in the log, and when it is checked."""
    assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
    await assert_says_nothing(backend)
    (warning,) = warnings(caplog)
    assert words in warning
    with pytest.raises(TierError) as failure:
        await backend.check()
    assert words in str(failure.value)


async def test_a_certificate_of_its_own(scheme: str, serve: Serve, files: TLSFiles) -> None:
    server = serve(tls=files, password="sesame")
    async with opened(server, **through(scheme, server)) as backend:
        await assert_works(backend)
        assert " used" in await backend.check()


async def test_a_certificate_that_nobody_vouches_for(
    scheme: str, serve: Serve, files: TLSFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=files)
    async with opened(server, **through(scheme, server), ca_file=None) as backend:
        await assert_refuses(
            backend, f"the certificate of {HOST}:{server.port} is not verified: self", caplog
        )


async def test_a_certificate_that_another_vouches_for(
    scheme: str, serve: Serve, files: TLSFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, other = serve(tls=files), make_certificate(tmp_path / "other")
    async with opened(server, **through(scheme, server), ca_file=other.authority) as backend:
        await assert_refuses(backend, f"the certificate of {HOST}:{server.port} is not verified: ", caplog)


async def test_a_certificate_for_another_host(
    scheme: str, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=make_certificate(tmp_path / "tls", name="DNS:cache.internal"))
    async with opened(server, **through(scheme, server)) as backend:
        await assert_refuses(backend, "is not verified: IP address mismatch", caplog)


async def test_a_server_that_wants_to_see_ours(
    scheme: str, serve: Serve, files: TLSFiles, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(tls=files, options=["--tls-auth-clients", "yes"])
    ours = {"certificate_file": files.certificate, "key_file": files.key}
    async with opened(server, **through(scheme, server), **ours) as backend:
        await assert_works(backend)
        assert " used" in await backend.check()
    async with opened(server, **through(scheme, server)) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        assert len(warnings(caplog)) == 1
        with pytest.raises(TierError):
            await backend.check()


async def test_tls_where_there_is_none_and_none_where_there_is(
    scheme: str, serve: Serve, files: TLSFiles, tmp_path: Path
) -> None:
    server = serve()
    async with opened(server, **through(scheme, server), deadline=0.5) as backend:
        assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
        with pytest.raises(TierError, match="does it speak TLS if `url` says so"):
            await backend.check()
    server.stop()
    (tmp_path / "second").mkdir()
    with RedisServer(tmp_path / "second", tls=files) as server:
        plain = {"type": scheme, "url": f"{scheme}://{HOST}:{server.port}", "ca_file": None}
        async with opened(server, **plain, deadline=2) as backend:
            assert list(await backend.put(values(100))) == [FAILED] * len(KEYS)
            with pytest.raises(TierError, match=f"{HOST}:{server.port}"):
                await backend.check()


@pytest.mark.parametrize("setting", ["ca_file", "certificate_file"])
async def test_a_file_that_holds_no_certificate(
    scheme: str, serve: Serve, files: TLSFiles, setting: str, tmp_path: Path
) -> None:
    server = serve(tls=files)
    text = tmp_path / "text.pem"
    text.write_text("none")
    for path in (text, tmp_path / "missing.pem"):
        backend = backend_on(server, **through(scheme, server), **{"ca_file": files.authority, setting: path})
        with pytest.raises(TierError, match=f"pool: `{setting}` is {path}, which holds no certificate"):
            await backend.open()
