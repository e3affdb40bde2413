"""The conformance suite, and a tier that uses the codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from kvtier_zlib import ZlibCodec

from kvtier import Settings, SettingsError, TieredCache
from kvtier.memory.header import StoredHeader
from kvtier.plugins import Plugins
from kvtier.testing.codec import CodecConformance
from kvtier.testing.noise import noise

PLUGINS = Plugins.load(["kvtier-zlib"])
TOKENS = list(range(1024))
KV = b"".join(noise(b"%d" % (token // 4), 64) for token in TOKENS)
"""Compressible: each row occurs four times."""


class TestConformance(CodecConformance):
    codec = ZlibCodec


class TestBestCompression(CodecConformance):
    codec = ZlibCodec
    settings: ClassVar = {"level": 9}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def settings(path: Path, codec: Any) -> Settings:
    ram = {"name": "ram", "type": "cpu", "capacity": "4MiB"}
    ssd = {"name": "ssd", "type": "disk", "capacity": "4MiB", "path": str(path), "codec": codec}
    return Settings(tiers=[ram, ssd], prefetch={"policy": "wait"})


@pytest.mark.anyio
async def test_tier_stores_less_and_returns_the_same(tmp_path: Path) -> None:
    configured = settings(tmp_path, {"type": "zlib", "level": 6})
    async with TieredCache.open(configured, plugins=PLUGINS) as cache:
        model = cache.model("llama", token_bytes=64)
        assert await model.store(TOKENS, KV) == 1024
        assert await cache.drain(30)
        used = cache.tiers[1].used_bytes
        assert used < cache.tiers[0].used_bytes / 2
        files = list(tmp_path.rglob("*.kv"))
        assert sum(file.stat().st_size for file in files) == used
        assert {StoredHeader.parse(file.read_bytes()).codec for file in files} == {ZlibCodec.code}
    async with TieredCache.open(configured, plugins=PLUGINS) as cache:
        assert cache.tiers[1].used_bytes == used
        out = bytearray(len(KV))
        assert await cache.model("llama", token_bytes=64).retrieve(TOKENS, out) == 1024
        assert out == KV


def test_level_is_validated(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tiers\[1\]\.codec\.level .*less than or equal to 9"):
        PLUGINS.tier_settings(settings(tmp_path, {"type": "zlib", "level": 10}))
