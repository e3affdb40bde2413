"""A Valkey: what :mod:`kvtier.backends.redis` does, with Valkey's own client library and names."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvtier.backends.redis import RedisBackend
from kvtier.backends.redis.control import ClientLibrary
from kvtier.backends.redis.settings import RedisSettings, url_description
from kvtier.settings import TierSettings

__all__ = ["ValkeyBackend", "ValkeySettings"]


class ValkeySettings(RedisSettings):
    """Settings of a tier of type ``valkey``: those of ``redis``, but for the URL's scheme."""

    scheme: ClassVar[str] = "valkey"

    url: str = Field(description=url_description("valkey"), examples=["valkey://cache:6379/0"])


class ValkeyBackend(RedisBackend):
    """Chunks as values of a Valkey pool."""

    settings_type: ClassVar[type[TierSettings]] = ValkeySettings
    in_parts: ClassVar[bool] = False  # From 9.0 on it sends a value from where it is.
    library: ClassVar[ClientLibrary] = ClientLibrary("Valkey", "valkey", "Valkey", "ValkeyError")
