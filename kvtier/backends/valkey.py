"""Valkey backend: :mod:`kvtier.backends.redis` with Valkey's own client library and names."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvtier.backends.redis import RedisBackend
from kvtier.backends.redis.settings import URL_FORMS, RedisSettings
from kvtier.backends.redis.topology import ClientLibrary
from kvtier.settings import TierSettings

__all__ = ["ValkeyBackend", "ValkeySettings"]


class ValkeySettings(RedisSettings):
    """Settings of a tier of type ``valkey``: the same as ``redis``, except for the URL scheme."""

    scheme: ClassVar[str] = "valkey"

    url: str = Field(description=URL_FORMS.format("valkey"), examples=["valkey://cache:6379/0"])


class ValkeyBackend(RedisBackend):
    """Chunks as values in a Valkey pool."""

    settings_type: ClassVar[type[TierSettings]] = ValkeySettings
    in_parts: ClassVar[bool] = False  # Since 9.0, Valkey sends a value without copying it.
    library: ClassVar[ClientLibrary] = ClientLibrary("Valkey", "valkey", "Valkey", "ValkeyError")
