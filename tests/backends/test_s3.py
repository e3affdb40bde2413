"""Settings, checks and messages; capacity; sharing between hosts."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvtier import KVTierError, Settings, TieredCache, TierError, load_settings
from kvtier.backends.base import SupportsCheck
from kvtier.backends.s3 import S3Backend, S3Settings
from kvtier.backends.s3.errors import StoreError, explain
from kvtier.memory.header import MAGIC
from kvtier.plugins import Plugins
from kvtier.testing.backend import make_key, noise
from tests.rigs.s3_proxy import FaultyProxy
from tests.rigs.s3_stores import FAILED, MIB, OK, found, make, opened, values
from tests.rigs.servers.s3 import ACCESS_KEY, BUCKET, READER_KEY, SECRET_KEY, S3Server

TOKEN_BYTES = 64


def check_settings(**settings: Any) -> None:
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "1MiB"},
        {"name": "pool", "type": "s3", **settings},
    ]
    Plugins.load([]).tier_settings(load_settings({"tiers": tiers}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"tiers\[1\]\.url .*is required, for example s3://bucket/kvtier"),
        (
            {"url": "bucket/kvtier"},
            "it must start with s3://, gs:// or az://: write for example s3://bucket/kvtier",
        ),
        ({"url": "s3://id:hunter2@bucket"}, "it must not contain .*: set them under credentials"),
        ({"url": "az://box/chunks?sig=hunter2"}, "it must not contain .*: set them under credentials"),
        ({"url": "s3:///chunks"}, "it has no bucket: write s3://bucket/prefix"),
        ({"url": "file:///chunks"}, "it must start with s3://, gs:// or az://"),
        (
            {"url": "s3://b", "endpoint": "s3.example.com"},
            "it is not an HTTP URL: write one such",
        ),
        ({"url": "s3://b", "endpoint": "http://id:hunter2@h"}, "it must not contain"),
        ({"url": "s3://b", "part_size": "4MiB"}, "it should be greater than or equal to 5242880"),
        ({"url": "s3://b", "capacity": "1KiB"}, "it should be greater than or equal to 1048576"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(KVTierError, match=message) as refused:
        check_settings(**settings)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/a", "az://container/a"])
def test_valid_settings(url: str) -> None:
    check_settings(url=url, options={"a": "b"}, credentials={"c": "d"})


def test_credentials_from_a_file_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    secret = {"secret_access_key": {"file": str(tmp_path / "key")}}
    settings = S3Settings(name="pool", type="s3", url="s3://b", credentials=secret)
    assert settings.credentials["secret_access_key"].get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings) + str(settings.model_dump_json())


@pytest.mark.anyio
@pytest.mark.parametrize(
    "settings",
    [
        {"url": "s3://b", "options": {"no_such_option": "x"}},
        {"url": "gs://b", "credentials": {"service_account_key": "hunter2"}},
        {"url": "az://c/a", "options": {"account_name": "a"}, "credentials": {"account_key": "hunter2"}},
    ],
)
async def test_settings_that_obstore_rejects_are_not_shown(settings: dict[str, Any]) -> None:
    with pytest.raises(TierError, match="tier 'pool': obstore rejects this url with these") as refused:
        await make(**settings).open()
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


@pytest.mark.anyio
async def test_check_reports_success(s3: S3Server) -> None:
    async with opened(**{**s3.tier(), "url": f"s3://{BUCKET}/check"}) as backend:
        assert isinstance(backend, SupportsCheck)
        answer = await backend.check()
    assert answer.startswith(f"s3://kvtier/check at {s3.url}: an object was written, read and deleted in ")
    assert await anyio.to_thread.run_sync(s3.objects, "check") == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "s3://no-such-bucket/a"}, "has no such bucket: create it, or set url to another"),
        (
            {"credentials": {"access_key_id": "kvtier", "secret_access_key": "hunter2"}},
            r"refuses these credentials \(403 Forbidden, SignatureDoesNotMatch\): check credentials",
        ),
        ({"reader": True}, r"refuses these credentials \(403 Forbidden, AccessDenied\): .*their permissions"),
        ({"endpoint": "http://127.0.0.1:1"}, "cannot be reached: check url and endpoint"),
    ],
)
async def test_check_reports_errors(s3: S3Server, settings: dict[str, Any], message: str) -> None:
    tier = {**s3.tier(), "deadline": 4, **settings}
    if tier.pop("reader", False):
        tier["credentials"] = {**tier["credentials"], "access_key_id": READER_KEY}
    async with opened(**tier) as backend:
        with pytest.raises(TierError, match=message) as wrong:
            await backend.check()
    assert "hunter2" not in str(wrong.value)
    assert wrong.value.__context__ is None


@pytest.fixture
def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


@pytest.mark.anyio
@pytest.mark.usefixtures("without_credentials")
async def test_no_credentials_anywhere(s3: S3Server) -> None:
    # In place of the machine's own metadata service.
    options = {"metadata_endpoint": "http://127.0.0.1:1"}
    async with opened(**{**s3.tier(), "deadline": 4, "credentials": {}, "options": options}) as backend:
        with pytest.raises(TierError, match="needs credentials, and there are none: set credentials, or"):
            await backend.check()
        assert await backend.put(await values(1, 4000)) == [FAILED]


@pytest.mark.anyio
@pytest.mark.usefixtures("without_credentials")
async def test_credentials_of_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    async with opened(**{**s3.tier(), "credentials": {}}) as backend:
        assert "an object was written" in await backend.check()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"url": "gs://bucket/a", "options": {"skip_signature": "true"}}, "/bucket/a%2F|/bucket/a/"),
        (
            {
                "url": "az://box/a",
                "options": {"account_name": "me"},
                "credentials": {"account_key": "aHVudGVyMg=="},
            },
            "/box/a/",
        ),
    ],
)
async def test_other_clouds_are_asked_at_the_endpoint(
    s3: S3Server, settings: dict[str, Any], line: str
) -> None:
    async with (
        FaultyProxy(s3.port) as proxy,
        opened(**settings, endpoint=proxy.url, deadline=4) as backend,
    ):
        with suppress(StoreError):
            await backend.contains([make_key(0)])
    assert re.match(f"HEAD .*({line})", proxy.requests[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("status code: 301: PermanentRedirect", "is elsewhere: set region"),
        (
            "507 Insufficient Storage <Code>XMinioStorageFull</Code>",
            r"is full \(XMinioStorageFull\): free some",
        ),
        ("https://h/a?X-Amz-Signature=hunter2", r"failed \(ValueError\): see the server's log"),
    ],
)
def test_errors_are_explained_and_not_quoted(text: str, message: str) -> None:
    error = explain("s3://b", ValueError(text))
    assert re.fullmatch(f"s3://b {message}.*", str(error))
    assert error.full is ("full" in message)
    assert "hunter2" not in repr(error)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvtier.backends.s3.store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(TierError, match=r"tier 'pool': obstore is missing: pip install 'kvtier\[s3\]'"):
        anyio.run(make(url="s3://b").open)


def test_loading_the_backend_does_not_load_the_library() -> None:
    script = (
        "import sys; from kvtier.plugins import Plugins; "
        "Plugins.load([]).backend('s3'); "
        "print('kvtier.backends.s3' in sys.modules, 'obstore' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]


@pytest.mark.anyio
async def test_a_closed_backend_has_no_connection(s3: S3Server) -> None:
    before = sockets()
    async with opened(**{**s3.tier(), "url": f"s3://{BUCKET}/closing"}) as backend:
        assert await backend.put(await values(30, 4000)) == [OK] * 30
        assert sockets() > before
    with anyio.fail_after(30):
        while sockets() > before:
            await anyio.sleep(0.01)


def sockets() -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += str(descriptor.readlink()).startswith("socket:")
    return count


@pytest.mark.anyio
async def test_lookups_end_at_the_first_missing_key(s3: S3Server) -> None:
    items = await values(8, 2000)
    keys = [key for key, _ in items]
    async with FaultyProxy(s3.port) as proxy:
        tier = {**s3.tier(), "url": f"s3://{BUCKET}/lookups", "endpoint": proxy.url, "requests": 4}
        async with opened(**tier) as backend:
            assert await backend.put(items) == [OK] * 8
            del proxy.requests[:]
            assert await backend.held_prefix(keys) == 8
            assert len(proxy.requests) == 8
            assert await backend.held_prefix([make_key(number) for number in range(100, 200)]) == 0
            assert len(proxy.requests) == 8 + 4
            await backend.delete(keys[5:6])
            assert await backend.held_prefix(keys) == 5
            assert await backend.held_prefix([]) == 0


@pytest.mark.anyio
async def test_capacity_deletes_the_oldest_chunks_and_nothing_else(s3: S3Server) -> None:
    old, new = await values(4, MIB // 8, seed=1), (await values(12, MIB // 8, seed=2))[4:]
    folder = f"capacity-{secrets.token_hex(4)}"
    tier = {**s3.tier(), "url": f"s3://{BUCKET}/{folder}"}
    other = {**tier, "url": f"s3://{BUCKET}/{folder}/deeper"}
    async with opened(**tier) as unbounded, opened(**other) as deeper:
        assert await unbounded.put(old) == [OK] * 4
        assert await deeper.put(old) == [OK] * 4
        # Stores tell times of writing in whole seconds.
        await anyio.sleep(1.1)
        assert await unbounded.put(new[:-1]) == [OK] * 7
        async with opened(**tier, capacity=MIB) as backend:
            assert await backend.put(new[-1:]) == [OK]
            with anyio.fail_after(60):
                # Room for eight, of which one sixteenth is kept free.
                while sum(await unbounded.contains([key for key, _ in old + new])) > 7:
                    await anyio.sleep(0.05)
        assert await unbounded.contains([key for key, _ in old]) == [False] * 4
        assert sum(await unbounded.contains([key for key, _ in new])) == 7
        assert await deeper.contains([key for key, _ in old]) == [True] * 4


@pytest.mark.anyio
async def test_capacity_is_checked_after_a_sixteenth_was_written(s3: S3Server) -> None:
    items = await values(24, MIB // 32)
    async with FaultyProxy(s3.port) as proxy:
        tier = {**s3.tier(), "url": f"s3://{BUCKET}/sixteenth", "endpoint": proxy.url}
        async with opened(**tier, capacity=MIB) as backend:
            for item in items:
                assert await backend.put([item]) == [OK]
                await settled(backend)
        lists = [line for line in proxy.requests if "list-type=2" in line]
    # At the first write, and then at each second one.
    assert len(lists) == 1 + 23 // 2


@pytest.mark.anyio
async def test_a_capacity_without_the_permission_to_delete(
    s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    tier = {**s3.tier(), "url": f"s3://{BUCKET}/kept"}
    items = await values(12, MIB // 8)
    async with opened(**tier) as backend:
        assert await backend.put(items) == [OK] * 12
    tier["credentials"] = {**tier["credentials"], "access_key_id": READER_KEY}
    async with opened(**tier, capacity=MIB) as backend:
        backend._note_written(1)
        await settled(backend)
        assert await found(backend, items) == [OK] * 12
    (record,) = caplog.records
    assert "refuses these credentials (403 Forbidden, AccessDenied)" in record.message


async def settled(backend: S3Backend) -> None:
    """Wait until nothing is trimmed."""
    with anyio.fail_after(60):
        while backend._trim is not None and not backend._trim.done():
            await anyio.sleep(0.01)


def cached(s3: S3Server, folder: str) -> Settings:
    pool = {"name": "pool", **s3.tier(), "url": f"s3://{BUCKET}/{folder}"}
    ram = {"name": "ram", "type": "cpu", "capacity": "4MiB"}
    return load_settings({"chunk_tokens": 256, "tiers": [ram, pool]})


@pytest.mark.anyio
async def test_hosts_share_the_store(s3: S3Server) -> None:
    settings = cached(s3, "shared")
    tokens = list(range(2000))
    rows = bytearray(noise(b"rows", len(tokens) * TOKEN_BYTES))
    async with TieredCache.open(settings) as cache, TieredCache.open(settings) as beside:
        assert await cache.model("llama", token_bytes=TOKEN_BYTES).store(tokens, rows) == 2000
        assert await cache.drain(20)
        read = bytearray(len(rows))
        assert await beside.model("llama", token_bytes=TOKEN_BYTES).retrieve(tokens, read) == 2000
        assert read == rows
    async with TieredCache.open(settings) as cache:
        read = bytearray(len(rows))
        model = cache.model("llama", token_bytes=TOKEN_BYTES)
        assert await model.retrieve(tokens, read) == 2000
        assert read == rows
        await cache.clear()
        assert await model.retrieve(tokens, read) == 0
    assert await anyio.to_thread.run_sync(s3.objects, "shared") == []


@pytest.mark.anyio
@pytest.mark.parametrize("damage", ["flipped", "of another version"])
async def test_a_damaged_object_is_a_miss_and_is_deleted(s3: S3Server, damage: str) -> None:
    folder = damage.replace(" ", "-")
    settings = cached(s3, folder)
    tokens = list(range(256))
    rows = bytearray(noise(b"rows", 256 * TOKEN_BYTES))
    async with TieredCache.open(settings) as cache:
        assert await cache.model("llama", token_bytes=TOKEN_BYTES).store(tokens, rows) == 256
        assert await cache.drain(20)
    (name,) = await anyio.to_thread.run_sync(s3.objects, folder)
    # Where the header has the version of the format.
    at = None if damage == "flipped" else len(MAGIC)
    await anyio.to_thread.run_sync(lambda: s3.flip(f"{folder}/{name}", at))
    async with TieredCache.open(settings) as cache:
        assert await cache.model("llama", token_bytes=TOKEN_BYTES).retrieve(tokens, bytearray(len(rows))) == 0
        assert await cache.drain(20)
    assert await anyio.to_thread.run_sync(s3.objects, folder) == []
