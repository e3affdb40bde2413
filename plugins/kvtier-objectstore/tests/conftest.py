"""An S3 server shared by all tests that do not damage it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_server import S3Server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if reason := S3Server.missing():
        pytest.skip(reason)
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
