"""A token grants access. Without one, this host has access, but no other site through a browser."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from starlette.requests import HTTPConnection

from kvtier.fleet.controller.app import WRONG_TOKEN, Authenticator


def connection_with(headers: Mapping[str, str]) -> HTTPConnection:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw, "path": "/clear", "query_string": b""})


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "localhost", "127.8.8.8"])
def test_without_a_token_this_host_has_access(host: str) -> None:
    assert Authenticator(None).refusal(connection_with({"Host": host})) is None
    assert Authenticator(None).refusal(connection_with({"Host": host, "Origin": f"http://{host}"})) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:9000", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1:9000", "Origin": "http://127.0.0.1:8080"},
        {"Host": "127.0.0.1:9000", "Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example:9000", "Origin": "http://evil.example:9000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "[::1"},
        {"Host": ""},
        {},
    ],
)
def test_without_a_token_other_sites_have_no_access(headers: dict[str, str]) -> None:
    refusal = Authenticator(None).refusal(connection_with(headers))
    assert refusal is not None
    assert refusal.status_code == 403
    assert "--token-file" in refusal.detail


@pytest.mark.parametrize("authorization", ["Bearer right", "bearer right", "Bearer  right "])
def test_token_grants_access_from_anywhere(authorization: str) -> None:
    headers = {"Host": "evil.example", "Origin": "http://elsewhere.example", "Authorization": authorization}
    assert Authenticator("right").refusal(connection_with(headers)) is None


@pytest.mark.parametrize(
    "authorization", ["", "right", "Bearer", "Bearer wrong", "Basic right", "Bearer r\xefght"]
)
def test_wrong_token_is_refused(authorization: str) -> None:
    refusal = Authenticator("right").refusal(
        connection_with({"Host": "localhost", "Authorization": authorization})
    )
    assert refusal is not None
    assert refusal.status_code == 401
    assert refusal.detail == WRONG_TOKEN
    assert refusal.headers == {"WWW-Authenticate": "Bearer"}
