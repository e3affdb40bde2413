"""With a token whoever has it is let in; without one this host, but no other site through its browsers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from starlette.requests import HTTPConnection

from kvtier.controller.door import Door, denial


def asking(headers: Mapping[str, str]) -> HTTPConnection:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": raw, "path": "/clear", "query_string": b""})


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "localhost", "127.8.8.8"])
def test_without_a_token_this_host_is_let_in(host: str) -> None:
    assert Door(None).refusal(asking({"Host": host})) is None
    assert Door(None).refusal(asking({"Host": host, "Origin": f"http://{host}"})) is None


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
def test_without_a_token_no_other_site_is(headers: dict[str, str]) -> None:
    refusal = Door(None).refusal(asking(headers))
    assert refusal is not None
    assert refusal.status_code == 403
    assert "--token-file" in refusal.detail


@pytest.mark.parametrize("said", ["Bearer right", "bearer right", "Bearer  right "])
def test_the_token_lets_in_from_anywhere(said: str) -> None:
    headers = {"Host": "evil.example", "Origin": "http://elsewhere.example", "Authorization": said}
    assert Door("right").refusal(asking(headers)) is None


@pytest.mark.parametrize("said", ["", "right", "Bearer", "Bearer wrong", "Basic right", "Bearer r\xefght"])
def test_a_wrong_token_does_not(said: str) -> None:
    refusal = Door("right").refusal(asking({"Host": "localhost", "Authorization": said}))
    assert refusal is not None
    assert refusal.status_code == 401
    answer = denial(refusal)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
