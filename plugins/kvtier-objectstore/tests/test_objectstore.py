"""Settings, checks and messages; a full store; sharing between hosts."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from kvtier_objectstore.settings import ObjectStoreSettings
from s3_server import BUCKET, READER_KEY, S3Server
from stores import FULL, MISS, OK, found, make, opened, values

from kvtier import KVTierError, TieredCache, TierError, load_settings
from kvtier.backends.base import SupportsCheck
from kvtier.plugins import Plugins
from kvtier.testing.backend import noise

TOKEN_BYTES = 64


def check_settings(**settings: Any) -> None:
    tiers = [
        {"name": "ram", "type": "cpu", "capacity": "1MiB"},
        {"name": "pool", "type": "objectstore", **settings},
    ]
    Plugins.load(["kvtier-objectstore"]).tier_settings(load_settings({"tiers": tiers}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"tiers\[1\]\.url .*is required, for example s3://bucket/kvtier"),
        ({"url": "bucket/kvtier"}, "it must start with one of s3://, gs://, az://, file://, memory://"),
        ({"url": "s3://id:hunter2@bucket"}, "it must not contain .*: set them under credentials"),
        ({"url": "az://box/chunks?sig=hunter2"}, "it must not contain .*: set them under credentials"),
        ({"url": "s3:///chunks"}, "it has no bucket: write s3://bucket/prefix"),
        ({"url": "file://chunks"}, "it has no absolute path: write three slashes"),
        (
            {"url": "s3://b", "endpoint": "s3.example.com"},
            "it is not an HTTP URL: write one such",
        ),
        ({"url": "s3://b", "endpoint": "http://id:hunter2@h"}, "it must not contain"),
        ({"url": "s3://b", "part_size": "4MiB"}, "it should be greater than or equal to 5242880"),
        ({"url": "s3://b", "capacity": "1GiB"}, r"capacity .*is not a setting"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(KVTierError, match=message) as refused:
        check_settings(**settings)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/a", "az://container/a", "file:///a/b", "memory://"]
)
def test_valid_settings(url: str) -> None:
    check_settings(url=url, options={"a": "b"}, credentials={"c": "d"})


def test_credentials_from_a_file_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    secret = {"secret_access_key": {"file": str(tmp_path / "key")}}
    settings = ObjectStoreSettings(name="pool", type="objectstore", url="s3://b", credentials=secret)
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
async def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"tier 'pool': url: .*file.*: set it to a folder"):
        await make(url=f"file://{tmp_path}/file/chunks").open()


@pytest.mark.anyio
async def test_a_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    async with opened(url=f"file://{tmp_path}/a%20b"):
        assert stat.S_IMODE((tmp_path / "a b").stat().st_mode) == 0o700


@pytest.mark.anyio
async def test_check_reports_success(s3: S3Server, tmp_path: Path) -> None:
    async with opened(**{**s3.tier(), "url": f"s3://{BUCKET}/check"}) as backend:
        assert isinstance(backend, SupportsCheck)
        answer = await backend.check()
    assert answer.startswith(f"s3://kvtier/check at {s3.url}: an object was written, read and deleted in ")
    assert await anyio.to_thread.run_sync(s3.objects, "check") == []
    async with opened(url=f"file://{tmp_path}/chunks") as backend:
        assert "an object was written" in await backend.check()
    assert list((tmp_path / "chunks").iterdir()) == []


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
    assert wrong.value.__suppress_context__


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "kvtier-test", str(mount)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.anyio
@pytest.mark.parametrize("size", [3_000_000, 12_000_000])
async def test_a_store_that_is_full(small_disk: Path, size: int) -> None:
    items = await values(8, size)
    async with opened(url=f"file://{small_disk}/chunks", requests=1) as backend:
        outcomes = list(await backend.put(items))
        assert set(outcomes) == {OK, FULL}
        assert await found(backend, items) == [OK if outcome is OK else MISS for outcome in outcomes]
        files = sorted(path.name for path in (small_disk / "chunks").iterdir())
        kept = [key for (key, _), outcome in zip(items, outcomes, strict=True) if outcome is OK]
        assert files == sorted(key.hex() for key in kept), "failed writes left files behind"
        await backend.delete(kept)
        assert await backend.put(items[:1]) == [OK]


def test_loading_the_plugin_does_not_load_the_library() -> None:
    script = (
        "import sys; from kvtier.plugins import Plugins; "
        "Plugins.load(['kvtier-objectstore']).backend('objectstore'); "
        "print('kvtier_objectstore' in sys.modules, 'obstore' in sys.modules)"
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
@pytest.mark.parametrize("kind", ["s3", "file"])
async def test_hosts_share_the_store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "s3":
        server: S3Server = request.getfixturevalue("s3")
        pool = {**server.tier(), "url": f"s3://{BUCKET}/shared"}
    else:
        pool = {"type": "objectstore", "url": f"file://{tmp_path}/shared"}
    ram = {"name": "ram", "type": "cpu", "capacity": "4MiB"}
    settings = load_settings({"chunk_tokens": 256, "tiers": [ram, {"name": "pool", **pool}]})
    tokens = list(range(2000))
    rows = bytearray(noise(b"rows", len(tokens) * TOKEN_BYTES))
    async with TieredCache.open(settings) as cache:
        assert await cache.model("llama", token_bytes=TOKEN_BYTES).store(tokens, rows) == 2000
        assert await cache.drain(20)
    async with TieredCache.open(settings) as cache:
        read = bytearray(len(rows))
        assert await cache.model("llama", token_bytes=TOKEN_BYTES).retrieve(tokens, read) == 2000
        assert read == rows
