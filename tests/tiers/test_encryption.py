"""Encryption of what a tier stores."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvtier import Settings, SettingsError, TieredCache
from kvtier.backends.base import Backend, Outcome
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.misses import MissReason
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.errors import TierError, UnreadableChunk
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.pipeline.query import Query
from kvtier.plugins import Plugins
from kvtier.testing.backend import make_key
from kvtier.testing.noise import noise
from kvtier.tiers import encryption
from kvtier.tiers.codec import Codec, CodecSettings, IdentityCodec
from kvtier.tiers.encoded_seal import Codecs, EncodedSeal, Encoder, Layouts
from kvtier.tiers.encryption import Keys
from kvtier.tiers.lossless import LosslessCodec
from kvtier.tiers.sealer import Sealer
from tests.rigs.chunks import memory, opened
from tests.rigs.composed_backends import StoredLengths
from tests.rigs.servers.redis import RedisServer

pytestmark = pytest.mark.anyio

PAYLOAD = 20_000
ONE, TWO = bytes(range(32)), bytes(range(1, 33))


class Tenants(StoredLengths):
    """Each chunk belongs to the tenant of this name."""

    name = ""

    def tenant(self, key: ChunkKey) -> str:
        return self.name


def sealed(
    backend: Backend, keys: Keys | None, catalog: Any, codec: type[Codec] = IdentityCodec
) -> EncodedSeal:
    own, lossless = codec(CodecSettings(type="mine")), LosslessCodec(CodecSettings(type="lossless"))
    encoder = Encoder(Codecs(own, {lossless.code: lossless}), Layouts(), checksum=True, keys=keys)
    return EncodedSeal(backend, Sealer(), encoder, catalog, 1)


def chunk(number: int, length: int = PAYLOAD) -> tuple[ChunkKey, memoryview]:
    """Return a chunk object whose payload becomes smaller."""
    key, view = make_key(number), memoryview(bytearray(object_bytes(length)))
    view[:HEADER_BYTES] = ChunkHeader(key, make_key(0), bytes(32), length).packed()
    content = noise(b"%d" % number, 100) + b"secret" * length
    view[HEADER_BYTES : HEADER_BYTES + length] = content[:length]
    return key, view


def blank_of(item: tuple[ChunkKey, memoryview]) -> tuple[ChunkKey, memoryview]:
    return item[0], memoryview(bytearray(len(item[1])))


async def raw(backend: Backend, catalog: StoredLengths, item: tuple[ChunkKey, memoryview]) -> memoryview:
    view = memoryview(bytearray(catalog.stored_length(item[0], 1, len(item[1]))))
    assert list(await backend.get([(item[0], view)])) == [Outcome.OK]
    return view


@pytest.mark.parametrize("codec", [IdentityCodec, LosslessCodec])
@pytest.mark.parametrize("length", [1, 3632, 3640, 3648, 3649, PAYLOAD, 3_000_001])
async def test_comes_back_and_is_not_readable(codec: type[Codec], length: int) -> None:
    """In as many bytes as without encryption."""
    inner, catalog, plain, keys = memory(), Tenants(), StoredLengths(), Keys({1: ONE})
    item = chunk(1, length)
    before = bytes(item[1])
    async with opened(memory()) as other:
        assert list(await sealed(other, None, plain, codec).put([item])) == [Outcome.OK]
    item[1][:] = before
    async with opened(inner):
        seal = sealed(inner, keys, catalog, codec)
        assert list(await seal.put([item])) == [Outcome.OK]
        assert bytes(item[1]) == before, "memory is not encrypted"
        assert catalog.stored_length(item[0], 1, -1) == plain.stored_length(item[0], 1, len(item[1]))
        stored = await raw(inner, catalog, item)
        assert b"secretsecret" not in bytes(stored)
        read = blank_of(item)
        assert list(await seal.get([read])) == [Outcome.OK]
        end = HEADER_BYTES + length
        assert read[1][:end] == before[:end]


async def test_each_object_has_a_key_of_its_own() -> None:
    """Also the same chunk, stored again, in the same process or another one."""
    seen = set()
    for _ in range(3):
        inner, catalog = memory(), Tenants()
        async with opened(inner):
            for _ in range(3):
                assert list(await sealed(inner, Keys({1: ONE}), catalog).put([chunk(1)])) == [Outcome.OK]
                stored = await raw(inner, catalog, chunk(1))
                seen.add(bytes(stored[HEADER_BYTES : HEADER_BYTES + 64]))
    assert len(seen) == 9


@pytest.mark.parametrize("codec", [IdentityCodec, LosslessCodec])
async def test_a_changed_byte_is_a_miss(codec: type[Codec]) -> None:
    """Checksums are not what finds it: they can be computed again after a change."""
    inner, catalog, item = memory(), Tenants(), chunk(1)
    async with opened(inner):
        seal = sealed(inner, Keys({1: ONE}), catalog, codec)
        assert list(await seal.put([item])) == [Outcome.OK]
        stored = await raw(inner, catalog, item)
        header = StoredHeader.parse(stored)
        assert header.encryption is not None
        used, of, end = header.encryption, header.chunk, HEADER_BYTES + header.stored_bytes
        changes: list[Any] = [
            of._replace(tokens=7),
            of._replace(parent=make_key(9)),
            of._replace(namespace=bytes([1]) * 32),
            of._replace(block_hashes=bytes(16)),
            used._replace(tag=bytes(16)),
            used._replace(salt=bytes(12)),
            used._replace(tenant=b"others"),
            used._replace(key_number=2),
            None,
            *range(HEADER_BYTES, end, 997),
            end - 1,
        ]
        for change in changes:
            changed = memoryview(bytearray(stored))
            chunk_header, encryption = of, header.encryption
            if isinstance(change, int):
                changed[change] ^= 1
            elif isinstance(change, ChunkHeader):
                chunk_header = change
            else:
                encryption = change
            StoredHeader.seal(
                changed, chunk_header, header.codec, header.stored_bytes, checksum=True, encryption=encryption
            )
            assert list(await inner.put([(item[0], changed)])) == [Outcome.OK]
            assert list(await seal.get([blank_of(item)])) == [Outcome.MISS], change
        assert list(await inner.put([(item[0], stored)])) == [Outcome.OK]
        assert list(await seal.get([blank_of(item)])) == [Outcome.OK]


async def test_rotation() -> None:
    """A new first key encrypts, and the old one still decrypts, until it is removed."""
    inner, catalog, first, second = memory(), Tenants(), chunk(1), chunk(2)
    old, both, new = Keys({1: ONE}), Keys({2: TWO, 1: ONE}), Keys({2: TWO})
    async with opened(inner):
        assert list(await sealed(inner, old, catalog).put([first])) == [Outcome.OK]
        assert list(await sealed(inner, both, catalog).put([second])) == [Outcome.OK]
        assert (
            list(await sealed(inner, both, catalog).get([blank_of(first), blank_of(second)]))
            == [Outcome.OK] * 2
        )
        seal = sealed(inner, new, catalog)
        assert list(await seal.get([blank_of(first), blank_of(second)])) == [Outcome.MISS, Outcome.OK]


async def test_tenants_have_different_keys() -> None:
    keys, item, catalog, inner = Keys({1: ONE}), chunk(1), Tenants(), memory()
    catalog.name = "team-a"
    async with opened(inner):
        assert list(await sealed(inner, keys, catalog).put([item])) == [Outcome.OK]
        stored = await raw(inner, catalog, item)
    header = StoredHeader.parse(stored)
    assert header.encryption is not None
    assert header.encryption.tenant == keys.mark_of("team-a") != keys.mark_of("team-b") != keys.mark_of("")
    source, target = stored[HEADER_BYTES : HEADER_BYTES + PAYLOAD], memoryview(bytearray(PAYLOAD))
    keys.decrypt(header, source, target)
    assert target == item[1][HEADER_BYTES : HEADER_BYTES + PAYLOAD]
    other = header._replace(encryption=header.encryption._replace(tenant=keys.mark_of("team-b")))
    with pytest.raises(UnreadableChunk):
        keys.decrypt(other, source, target)


def test_names_of_tenants_cannot_be_tried_without_the_key() -> None:
    """Headers are not encrypted, and a list of customers is easily found."""
    mark = Keys({1: ONE}).mark_of("team-a")
    assert mark == Keys({1: ONE, 2: TWO}).mark_of("team-a")
    assert mark != Keys({1: TWO}).mark_of("team-a")
    assert mark != blake3(b"team-a").digest(len(mark))
    assert Keys({1: ONE}).mark_of("") == bytes(len(mark))


async def test_tenant_of_an_old_key() -> None:
    """What another first key has marked differently is still decrypted."""
    inner, catalog, item = memory(), Tenants(), chunk(1)
    catalog.name = "team-a"
    async with opened(inner):
        assert list(await sealed(inner, Keys({1: ONE}), catalog).put([item])) == [Outcome.OK]
        both = Keys({2: TWO, 1: ONE})
        read = blank_of(item)
        assert list(await sealed(inner, both, catalog).get([read])) == [Outcome.OK]
        assert read[1][HEADER_BYTES:] == item[1][HEADER_BYTES:]
        header = StoredHeader.parse(await raw(inner, catalog, item))
        assert header.encryption is not None
        assert header.encryption.tenant != both.mark_of("team-a")


def encrypted(keys: Keys, tenant: str) -> tuple[StoredHeader, memoryview]:
    header, payload = ChunkHeader(make_key(1), make_key(0), bytes(32), 6), memoryview(bytearray(b"secret"))
    used = keys.encrypt(header, 0, keys.mark_of(tenant), payload, payload)
    return StoredHeader(header, 0, len(payload), None, used), payload


def test_remembers_some_tenants_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "TENANTS", 4)
    keys = Keys({1: ONE})
    stored = [encrypted(keys, f"team-{number}") for number in range(10)]
    for header, payload in stored * 2:
        target = memoryview(bytearray(len(payload)))
        keys.decrypt(header, payload, target)
        assert target == b"secret"
        assert len(keys._of_tenant) <= 4


def test_keys_leave_memory_with_their_tier() -> None:
    """At once, and not when the garbage collector runs next."""
    keys = Keys({1: ONE})
    encrypted(keys, "team-a")
    kept = weakref.ref(keys)
    gc.disable()
    try:
        del keys
        assert kept() is None
    finally:
        gc.enable()


def test_authenticates_all_but_tag_and_checksums() -> None:
    stored, _ = encrypted(Keys({1: ONE}), "team-a")
    assert stored.encryption is not None
    head = memoryview(bytearray(object_bytes(6)))
    StoredHeader.seal(head, stored.chunk, 0, 6, checksum=False, encryption=stored.encryption)
    assert (
        StoredHeader.authenticated(stored.chunk, 0, 6, stored.encryption)
        == bytes(head[:404]) + bytes(head[412:HEADER_BYTES])[:-16]
    )


@pytest.mark.parametrize(
    ("keys", "reason"), [(None, "is encrypted"), (Keys({1: TWO}), "was not encrypted with")]
)
async def test_with_another_key_or_none_a_pool_keeps_it(
    keys: Keys | None,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a miss, with its reason, and stays there for those who can read it, also when it is stored."""
    if missing := RedisServer.missing():
        pytest.skip(missing)
    with RedisServer(tmp_path) as server:
        pool = {**server.tier(), "name": "pool"}
        settings = Settings(tiers=[{"name": "ram", "type": "cpu", "capacity": "4MiB"}, pool])
        [_, tier] = Plugins.load([]).tier_settings(settings)
        backend = Plugins.load([]).backend("redis")(tier)
        item = chunk(1)
        async with opened(backend):
            assert list(await sealed(backend, Keys({1: ONE}), Tenants()).put([item])) == [Outcome.OK]
            seal = sealed(backend, keys, Tenants())
            assert list(await seal.get([blank_of(item)])) == [Outcome.MISS]
            assert (seal.corrupt, seal.unreadable) == (0, 1)
            assert reason in caplog.text
            assert list(await seal.put([chunk(2), item, chunk(3)])) == [Outcome.OK, Outcome.MISS, Outcome.OK]
            owner = sealed(backend, Keys({1: ONE}), Tenants())
            assert list(await owner.get([blank_of(item)])) == [Outcome.OK]
            monkeypatch.setattr("kvtier.tiers.seal.OF_OTHERS_SECONDS", 0)
            assert list(await seal.put([item])) == [Outcome.OK]
            assert list(await seal.get([blank_of(item)])) == [Outcome.OK]


async def test_what_is_not_encrypted_is_not_accepted() -> None:
    """It can be written without the key."""
    inner, catalog, item = memory(), Tenants(), chunk(1)
    async with opened(inner):
        for codec in (IdentityCodec, LosslessCodec):
            assert list(await sealed(inner, None, catalog, codec).put([item])) == [Outcome.OK]
            assert list(await sealed(inner, Keys({1: ONE}), catalog, codec).get([blank_of(item)])) == [
                Outcome.MISS
            ]


KEY = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 keys"),
        ("# none\n\n", "has 0 keys"),
        (KEY, "line 1 of .* is not a number"),
        (f"1 {KEY[:-2]}", "line 1 of .* is not a number"),
        (f"0 {KEY}", "line 1 of .* is not a number"),
        (f"65536 {KEY}", "line 1 of .* is not a number"),
        (f"1 {KEY}\n# old\n1 {KEY}", "line 3 of .* has the number 1 of a line above: give one"),
    ],
)
def test_key_files_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(TierError, match=message) as raised:
        Keys.load(file, "tier 'ssd': encrypt")
    assert KEY[:8] not in str(raised.value), "a key is secret"


def test_key_files_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"1 {KEY}")
    for mode in (0o644, 0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(TierError, match=r"others may read or change the key file .*: chmod 600"):
            Keys.load(file, "tier 'ssd': encrypt")
    file.chmod(0o440)
    assert Keys.load(file, "tier 'ssd': encrypt").current == 1
    with pytest.raises(TierError, match="cannot read the key file"):
        Keys.load(tmp_path / "none", "tier 'ssd': encrypt")


@pytest.fixture
def file_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key file of a user that is neither this one nor root."""
    file = tmp_path / "keys"
    file.write_text(f"1 {KEY}")
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, 4321, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    return file


def test_key_files_of_others(file_of_another: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their owner could change them at any time."""
    owner = file_of_another.stat().st_uid
    with pytest.raises(TierError, match=rf"user {owner} owns .*: as root, chown 1234 {file_of_another}"):
        Keys.load(file_of_another, "tier 'ssd': encrypt")
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert Keys.load(file_of_another, "tier 'ssd': encrypt").current == 1


def test_key_file_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked is what is read."""
    file, other = tmp_path / "keys", tmp_path / "others"
    for path, mode in ((file, 0o600), (other, 0o644)):
        path.write_text(f"1 {KEY}")
        path.chmod(mode)
    real = Path.open

    def replaced(path: Path, *arguments: Any, **named: Any) -> Any:
        if other.exists():
            other.replace(file)
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", replaced)
    with pytest.raises(TierError, match="others may read or change"):
        Keys.load(file, "tier 'ssd': encrypt")


@pytest.mark.parametrize("where", [0, 1])
def test_first_tier_is_not_encrypted(where: int, tmp_path: Path) -> None:
    tiers: list[dict[str, Any]] = [
        {"name": "ram", "type": "cpu", "capacity": "4MiB"},
        {"name": "ssd", "type": "disk", "capacity": "4MiB", "path": str(tmp_path)},
    ]
    tiers[where]["encrypt"] = {"key_file": str(tmp_path / "keys")}
    settings = Settings(tiers=tiers)
    if where:
        assert Plugins.load([]).tier_settings(settings)[1].encrypt is not None
        return
    with pytest.raises(
        SettingsError, match=r"tiers\[0\]\.encrypt .*is set, but engines copy to the first tier"
    ):
        Plugins.load([]).tier_settings(settings)


async def test_a_cache_with_an_encrypted_disk(tmp_path: Path) -> None:
    tokens, kv = list(range(1024)), b"secret" * 10_923
    keys = tmp_path / "keys"
    keys.write_text(f"7 {KEY}\n")
    keys.chmod(0o600)
    disk = {"name": "ssd", "type": "disk", "capacity": "4MiB", "path": str(tmp_path / "ssd")}
    ram = {"name": "ram", "type": "cpu", "capacity": "4MiB"}

    def settings(**more: Any) -> Settings:
        return Settings(tiers=[ram, {**disk, **more}], prefetch={"policy": "wait"})

    encrypt = {"key_file": str(keys)}
    kv = kv[: 64 * len(tokens)]
    for codec in ("identity", "lossless"):
        async with TieredCache.open(settings(encrypt=encrypt, codec=codec)) as cache:
            model = cache.model(codec, token_bytes=64)
            assert await model.store(tokens, kv) == len(tokens)
            assert await cache.drain(30)
            assert cache.tiers[1].status()["encrypted"] is True
    files = list((tmp_path / "ssd").rglob("*.kv"))
    assert files
    assert not [file for file in files if b"secret" in file.read_bytes()]
    for codec in ("identity", "lossless"):
        async with TieredCache.open(settings(encrypt=encrypt)) as cache:
            out = bytearray(len(kv))
            assert await cache.model(codec, token_bytes=64).retrieve(tokens, out) == len(tokens)
            assert out == kv
    keys.write_text(f"8 {KEY}\n")
    for more, codec in ({"encrypt": encrypt}, "lossless"), ({}, "identity"):
        async with TieredCache.open(settings(**more)) as cache:
            model = cache.model(codec, token_bytes=64)
            assert await model.retrieve(tokens, bytearray(len(kv))) == 0
            found = cache.look_up(Query(model.keys(tokens), len(tokens)))
            [miss] = cache.explain(found)
            assert (miss.reason, miss.tier) == (MissReason.UNREADABLE, "ssd")
            assert cache.tiers[1].unreadable == 4


def test_the_catalog_knows_whose_a_chunk_is() -> None:
    catalog = Catalog([LruPolicy.factory()])
    for number, tenant in enumerate(["", "team-a", "team-b", "team-a"]):
        catalog.add(make_key(number), 0, 4096, State.READY, hints=ChunkHints(tenant=tenant))
    assert [catalog.tenant(make_key(number)) for number in range(5)] == ["", "team-a", "team-b", "team-a", ""]
