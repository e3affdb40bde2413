"""The URL of a pool, and that errors do not reveal its credentials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier.backends.redis.settings import Endpoint, PoolURL, RedisSettings, parse_url, take_credentials

SECRET = "hunter2"


def settings(**given: Any) -> RedisSettings:
    return RedisSettings(name="pool", type="redis", **given)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://cache", PoolURL("single", False, (Endpoint("cache", 6379),))),
        ("redis://cache:7000/", PoolURL("single", False, (Endpoint("cache", 7000),))),
        ("rediss://10.0.0.1:7000/3", PoolURL("single", True, (Endpoint("10.0.0.1", 7000),), database=3)),
        ("redis://[::1]:7000", PoolURL("single", False, (Endpoint("::1", 7000),))),
        ("redis://[::1]", PoolURL("single", False, (Endpoint("::1", 6379),))),
        (
            "unix:///run/a%20b.sock?db=2",
            PoolURL("single", False, (Endpoint("/run/a b.sock", None),), database=2),
        ),
        ("unix:///run/redis.sock", PoolURL("single", False, (Endpoint("/run/redis.sock", None),))),
        (
            "redis+sentinel://s1,s2:1/mymaster/4",
            PoolURL("sentinel", False, (Endpoint("s1", 26379), Endpoint("s2", 1)), "mymaster", 4),
        ),
        ("rediss+sentinel://s1/my", PoolURL("sentinel", True, (Endpoint("s1", 26379),), "my")),
        ("redis+cluster://c1,c2:7/0", PoolURL("cluster", False, (Endpoint("c1", 6379), Endpoint("c2", 7)))),
        ("rediss+cluster://c1", PoolURL("cluster", True, (Endpoint("c1", 6379),))),
    ],
)
def test_valid_urls(url: str, place: PoolURL) -> None:
    assert settings(url=url).pool_url == place


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("cache:6379", "use redis://HOST:PORT"),
        ("http://cache", "use redis://HOST:PORT"),
        ("valkey://cache", "use redis://HOST:PORT"),
        ("redis+ring://cache", "use redis://HOST:PORT"),
        ("redis://", "is not HOST:PORT"),
        ("redis://cache:port", "is not HOST:PORT"),
        ("redis://cache:0", "is not HOST:PORT"),
        ("redis://cache:65536", "is not HOST:PORT"),
        ("redis://[::1", "is not HOST:PORT"),
        ("redis://[::1]7000", "is not HOST:PORT"),
        ("redis://a,,b", "is not HOST:PORT"),
        ("redis://cache/zero", "use /0"),
        ("redis://cache/-1", "use /0"),
        ("redis://cache/0/1", "use /0"),
        ("redis://cache?db=1", "every other option is a setting"),
        ("redis://a,b", "use redis+sentinel:// or redis+cluster://"),
        ("redis+sentinel://a", "add the service name"),
        ("redis+cluster://a/1", "a cluster has only database 0"),
        ("unix://run/redis.sock", "use unix:///run/redis.sock"),
        ("unix://", "use unix:///run/redis.sock"),
        ("unix:///run/redis.sock?timeout=1", "the only option"),
    ],
)
def test_invalid_urls(url: str, remedy: str) -> None:
    with pytest.raises(ValidationError) as failure:
        settings(url=url)
    (details,) = failure.value.errors()
    assert details["loc"] == ("url",)
    assert remedy in details["msg"]


def test_credentials_move_out_of_the_url() -> None:
    created = settings(url=f"redis://me%40home:{SECRET}%2F@cache:7000/1")
    assert (created.url, created.user) == ("redis://cache:7000/1", "me@home")
    assert created.password is not None
    assert created.password.get_secret_value() == f"{SECRET}/"
    assert SECRET not in repr(created) + str(created) + created.model_dump_json()
    alone = settings(url=f"unix://:{SECRET}@/run/redis.sock")
    assert (alone.url, alone.user) == ("unix:///run/redis.sock", None)
    assert alone.password is not None
    user = settings(url="redis://me@cache", password={"env": "HOME"})
    assert (user.url, user.user) == ("redis://cache", "me")


@pytest.mark.parametrize(
    "given",
    [
        {"url": f"redis://:{SECRET}@cache", "password": "other"},
        {"url": f"redis://me:{SECRET}@cache", "user": "you"},
        {"url": f"http://me:{SECRET}@cache"},
        {"url": f"redis://me:{SECRET}@cache:port"},
        {"url": f"redis://me:{SECRET}/1@cache"},
        {"url": f"redis://me:{SECRET}"},
        {"url": f"redis://cache/0?password={SECRET}"},
        {"url": f"{SECRET}@cache"},
        {"url": f"redis://me:{SECRET}@cache", "connections": 0},
    ],
)
def test_errors_do_not_show_secrets(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as failure:
        settings(**given)
    assert SECRET not in str(failure.value)
    assert SECRET not in "".join(
        str(details["msg"]) + str(details.get("ctx")) for details in failure.value.errors()
    )


@pytest.mark.parametrize("name", ["ca_file", "certificate_file"])
def test_tls_files_require_a_tls_url(name: str) -> None:
    with pytest.raises(ValidationError, match="use rediss:// there"):
        settings(url="redis://cache", **{name: "ca.pem"})
    assert getattr(settings(url="rediss://cache", **{name: "~/ca.pem"}), name) == Path.home() / "ca.pem"


@pytest.mark.parametrize("given", [{"user": "me"}, {"url": "redis://me@cache"}, {"sentinel_user": "me"}])
def test_user_requires_a_password(given: dict[str, Any]) -> None:
    """Without one the client would silently be the default user."""
    with pytest.raises(ValidationError, match=r"user` requires `(sentinel_)?password`"):
        settings(**{"url": "redis://cache", **given})


def test_key_requires_a_certificate() -> None:
    with pytest.raises(ValidationError, match="requires `certificate_file`: set that, too"):
        settings(url="rediss://cache", key_file="key.pem")


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    url, _ = take_credentials(text)
    try:
        place = parse_url(url, "redis")
    except ValueError:
        return
    assert place.endpoints


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8")))
def test_quoted_credentials_round_trip(user: str, password: str) -> None:
    from urllib.parse import quote

    url, credentials = take_credentials(f"redis://{quote(user, safe='')}:{quote(password, safe='')}@cache/1")
    assert (url, *credentials) == ("redis://cache/1", user, password)
