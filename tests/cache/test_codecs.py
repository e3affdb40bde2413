"""Codecs in a whole cache: ``auto``, and chunks that are encoded while the machine is idle."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from kvtier import Settings, TieredCache
from kvtier.backends.base import Outcome
from kvtier.memory.header import StoredHeader
from kvtier.pipeline import encode
from kvtier.plugins import Plugins
from kvtier.tiers.codec_choice import CodecChoice
from kvtier.tiers.encoded_seal import EncodedSeal
from kvtier.tiers.tier import Tier
from tests.rigs.waiting import until

from .conftest import CHUNK_OBJECT_BYTES, TOKEN_BYTES, MakeSettings, Prompt

pytestmark = pytest.mark.anyio

TOKENS = 2048
SMALLER, DENSER = 0.7 * CHUNK_OBJECT_BYTES, 0.3 * CHUNK_OBJECT_BYTES


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs here, the machine is idle."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(encode, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(encode, "DENSE_PAUSE_SECONDS", 0.05)


def kv(tokens: list[int]) -> bytearray:
    """Return KV that differs between prompts, and becomes smaller."""
    source = random.Random(tokens[0])
    return bytearray(source.choices(b"\0\1\2\3", [8, 1, 1, 1], k=len(tokens) * TOKEN_BYTES))


async def store(cache: TieredCache, tokens: list[int]) -> None:
    model = cache.model("llama", token_bytes=TOKEN_BYTES)
    assert await model.store(tokens, kv(tokens)) == len(tokens)
    assert await cache.drain(10)


async def check(cache: TieredCache, tokens: list[int]) -> int:
    """Retrieve a prompt, and check its bytes. Return the number of tokens found."""
    out = bytearray(len(tokens) * TOKEN_BYTES)
    found = await cache.model("llama", token_bytes=TOKEN_BYTES).retrieve(tokens, out)
    assert out[: found * TOKEN_BYTES] == kv(tokens)[: found * TOKEN_BYTES]
    return found


def sizes(folder: Path) -> list[int]:
    found = []
    for file in folder.rglob("*.kv"):
        with suppress(FileNotFoundError):
            found.append(file.stat().st_size)
    return found


def with_codec(settings: MakeSettings, codec: str, **more: int) -> Settings:
    return settings(disk={"codec": codec}, **more)


@pytest.mark.parametrize(
    ("gain", "ssd", "encodes"),
    [(2.0, 512, True), (0.7, 512, False), (0.7, 8, True), (0.4, 8, False), (None, 512, True)],
)
async def test_auto(
    settings: MakeSettings,
    prompt: Prompt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gain: float | None,
    ssd: int,
    encodes: bool,
) -> None:
    """Encodes while that pays: with a gain, or in a full tier."""
    monkeypatch.setattr(CodecChoice, "gain", gain)
    monkeypatch.setattr(encode.EncodeStage, "run", lambda self, tier: anyio.sleep_forever())
    async with TieredCache.open(with_codec(settings, "auto", ssd=ssd)) as cache:
        for seed in range(2):
            await store(cache, prompt(TOKENS, seed))
        ratio = cache.catalog.ratio(1)
        assert ratio is not None
        assert (ratio > 1.3) == encodes
        status = cache.lower[0].status()
        assert (status["codec"], status["encodes"], status["codec_gain"]) == ("auto", encodes, gain)
        assert cache.catalog.used(1) == sum(sizes(tmp_path / "ssd"))
    async with TieredCache.open(with_codec(settings, "auto", ssd=ssd)) as cache:
        assert await check(cache, prompt(TOKENS, 1)) == TOKENS or ssd == 8


async def test_auto_measures_the_codec_and_the_medium(settings: MakeSettings, prompt: Prompt) -> None:
    async with TieredCache.open(with_codec(settings, "auto")) as cache:
        choice = cache.lower[0].choice
        assert choice is not None
        assert choice.gain is None
        for seed in range(4):
            await store(cache, prompt(TOKENS, seed))
        assert choice.gain is not None
        assert choice.gain > 0


async def test_what_was_stored_before_is_encoded_when_idle(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    async with TieredCache.open(settings()) as cache:
        for seed in range(3):
            await store(cache, prompt(TOKENS, seed))
    assert min(sizes(tmp_path / "ssd")) == CHUNK_OBJECT_BYTES
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        await until(lambda: cache.counts["encoded_when_idle"] == 3 * TOKENS // 256)
        assert max(sizes(tmp_path / "ssd")) < SMALLER
        assert cache.catalog.used(1) == sum(sizes(tmp_path / "ssd"))
        for seed in range(3):
            assert await check(cache, prompt(TOKENS, seed)) == TOKENS
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        assert await check(cache, prompt(TOKENS, 2)) == TOKENS


async def test_status_shows_the_ratio_of_what_is_held(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path
) -> None:
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        assert cache.lower[0].status()["ratio"] is None
        await store(cache, prompt(TOKENS))
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        held = sizes(tmp_path / "ssd")
        ratio = CHUNK_OBJECT_BYTES * len(held) / sum(held)
        assert ratio > 1.3
        assert cache.lower[0].status()["ratio"] == pytest.approx(ratio)
        await cache.clear(cache.catalog.keys(1)[1:])
        [left] = sizes(tmp_path / "ssd")
        assert cache.lower[0].status()["ratio"] == pytest.approx(CHUNK_OBJECT_BYTES / left)
        await cache.clear()
        assert cache.lower[0].status()["ratio"] is None


async def test_nothing_is_encoded_on_a_busy_machine(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TieredCache.open(settings()) as cache:
        await store(cache, prompt(TOKENS))
    load = 1.0 * (os.cpu_count() or 1)
    asked = []
    monkeypatch.setattr(os, "getloadavg", lambda: asked.append(1) or (load, load, load))
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        await until(lambda: len(asked) >= 5)
        assert cache.counts["encoded_when_idle"] == 0


async def test_chunks_that_are_hardly_smaller_are_left(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = os.urandom(TOKENS * TOKEN_BYTES)
    async with TieredCache.open(settings()) as cache:
        await cache.model("llama", token_bytes=TOKEN_BYTES).store(prompt(TOKENS), bytearray(noise))
        assert await cache.drain(10)
    before = {file: file.stat().st_ino for file in (tmp_path / "ssd").rglob("*.kv")}
    tried, put = [], EncodedSeal.encode_stored

    async def encode_stored(seal, items, **more):
        outcomes = await put(seal, items, **more)
        tried.extend(outcomes)
        return outcomes

    monkeypatch.setattr(EncodedSeal, "encode_stored", encode_stored)
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        await until(lambda: len(tried) >= TOKENS // 256)
        out = bytearray(TOKENS * TOKEN_BYTES)
        assert await cache.model("llama", token_bytes=TOKEN_BYTES).retrieve(prompt(TOKENS), out) == TOKENS
        assert out == noise
    assert tried == [Outcome.MISS] * (TOKENS // 256), "each once"
    assert {file: file.stat().st_ino for file in before} == before


async def test_chunk_that_is_cleared_while_it_is_encoded(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not come back."""
    async with TieredCache.open(settings()) as cache:
        await store(cache, prompt(TOKENS))
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        [tier] = cache.lower
        encode_stored, written = tier.seal.encode_stored, anyio.Event()

        async def slowly(items, **more):
            await cache.clear()
            outcomes = await encode_stored(items, **more)
            assert sizes(tmp_path / "ssd"), "it was written after it was cleared"
            written.set()
            return outcomes

        monkeypatch.setattr(tier.seal, "encode_stored", slowly)
        with anyio.fail_after(30):
            await written.wait()
        await until(lambda: not sizes(tmp_path / "ssd"))
        assert cache.catalog.used(1) == 0
        assert await check(cache, prompt(TOKENS)) == 0


@pytest.mark.parametrize("denser", [False, True])
async def test_chunk_that_is_replaced_while_it_is_read(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, denser: bool
) -> None:
    """It is read again, with its new length."""
    async with TieredCache.open(with_codec(settings, "lossless") if denser else settings()) as cache:
        await store(cache, prompt(TOKENS))
    monkeypatch.setattr(encode, "PAUSE_SECONDS", 3600)
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        [tier] = cache.lower
        get, stage = tier.backend.get, encode.EncodeStage(cache._hierarchy, cache._reader)
        # What is being read is in memory, or on the way, and so not cold.
        monkeypatch.setattr(stage, "_is_cold", lambda tier, key: True)

        async def replaced(items):
            monkeypatch.setattr(tier.backend, "get", get)
            await stage.encode(tier, cache.catalog.rows, denser=denser)
            return await get(items)

        monkeypatch.setattr(tier.backend, "get", replaced)
        assert await check(cache, prompt(TOKENS)) == TOKENS
        assert cache.counts["encoded_when_idle"] == TOKENS // 256


async def test_cold_chunks_of_a_full_disk_become_denser(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that memory holds do not, and none is tried twice, also not after a restart."""
    configured = with_codec(settings, "lossless", ram=16)
    async with TieredCache.open(configured) as cache:
        for seed in range(8):
            await store(cache, prompt(TOKENS, seed))
        # Not before: encoding needs memory as well, which has room for two prompts.
        monkeypatch.setattr(Tier, "is_full", lambda self: True)
        [tier] = cache.lower
        await until(lambda: len(tier.densest) >= 6 * TOKENS // 256)
        lengths = {key: cache.catalog.stored_length(key, 1, 0) for key in cache.catalog.keys(1)}
        assert all((length < DENSER) == (key in tier.densest) for key, length in lengths.items())
        assert cache.catalog.used(1) == sum(sizes(tmp_path / "ssd"))
        encoded, dense = cache.counts["encoded_when_idle"], set(tier.densest)
        assert encoded == len(dense)
    async with TieredCache.open(configured) as cache:
        [tier] = cache.lower
        assert tier.densest == dense, "as the headers have it"
        await until(lambda: tier.densest == set(lengths))
        assert cache.counts["encoded_when_idle"] == len(lengths) - encoded
        assert max(sizes(tmp_path / "ssd")) < DENSER
        for seed in range(8):
            assert await check(cache, prompt(TOKENS, seed)) == TOKENS


async def test_chunks_of_a_disk_with_room_do_not_become_denser(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read faster as they are."""
    async with TieredCache.open(with_codec(settings, "lossless", ram=8)) as cache:
        [tier] = cache.lower
        asked, is_full = [], tier.is_full
        monkeypatch.setattr(tier, "is_full", lambda: asked.append(is_full()) or asked[-1])
        for seed in range(2):
            await store(cache, prompt(TOKENS, seed))
        await until(lambda: len(asked) >= 3)
        assert not any(asked)
        assert min(sizes(tmp_path / "ssd")) > DENSER


async def test_chunk_that_is_stored_again_is_no_longer_dense(settings: MakeSettings, prompt: Prompt) -> None:
    async with TieredCache.open(with_codec(settings, "dense")) as cache:
        await store(cache, prompt(TOKENS))
        assert cache.lower[0].densest is None, "no codec is denser"
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        [tier] = cache.lower
        assert len(tier.densest) == TOKENS // 256
        await cache.clear()
        await store(cache, prompt(TOKENS))
        assert not tier.densest


async def test_dense_chunks_are_misses_to_earlier_versions(
    settings: MakeSettings, prompt: Prompt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with TieredCache.open(with_codec(settings, "dense")) as cache:
        await store(cache, prompt(TOKENS))
    codecs = Plugins.all_codecs
    known = lambda self: {name: codec for name, codec in codecs(self).items() if name != "dense"}  # noqa: E731
    monkeypatch.setattr(Plugins, "all_codecs", known)
    async with TieredCache.open(with_codec(settings, "lossless")) as cache:
        assert await check(cache, prompt(TOKENS)) == 0
        assert cache.lower[0].unreadable == TOKENS // 256
        assert "is encoded by codec 5" in caplog.text


KILLED = """
import os, sys, anyio, json
from kvtier import Settings, TieredCache
from kvtier.pipeline import encode
from kvtier.tiers.tier import Tier

os.getloadavg = lambda: (0.0, 0.0, 0.0)
encode.PAUSE_SECONDS = 0.01
Tier.is_full = lambda self: True

async def main():
    async with TieredCache.open(Settings(**json.loads(sys.argv[1]))):
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize(("before", "length"), [("identity", SMALLER), ("lossless", DENSER)])
async def test_kill_while_chunks_are_encoded(
    settings: MakeSettings, prompt: Prompt, tmp_path: Path, before: str, length: float
) -> None:
    """Nothing is lost: each chunk is there, in one form or the other."""
    async with TieredCache.open(with_codec(settings, before)) as cache:
        for seed in range(16):
            await store(cache, prompt(TOKENS, seed))
    configured = with_codec(settings, "lossless")
    argument = configured.model_dump_json(include={"chunk_tokens", "tiers"})
    process = await anyio.open_process([sys.executable, "-c", KILLED, argument], stdout=None, stderr=None)
    await until(lambda: min(sizes(tmp_path / "ssd")) < length)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    for file in (tmp_path / "ssd").rglob("*.kv"):
        StoredHeader.parse(file.read_bytes()[:4096])
    async with TieredCache.open(configured) as cache:
        for seed in range(16):
            assert await check(cache, prompt(TOKENS, seed)) == TOKENS
