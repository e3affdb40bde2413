"""Codecs between peers: processes whose chunks are fetched encoded over TCP, damaged, killed and stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest

from kvtier import native
from kvtier.backends.base import Outcome
from kvtier.catalog.gone import Gone
from kvtier.catalog.misses import MissReason
from kvtier.errors import SettingsError
from kvtier.instance import Instance
from kvtier.memory.arena import Arena
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.observability.metrics import CacheMetrics
from kvtier.peers.grants import GrantBook
from kvtier.peers.link_codec import GrantEncoder, LinkDecoder
from kvtier.peers.protocol import Await, Readable
from kvtier.peers.remote_leases import RemoteLease
from kvtier.peers.source import Read, Source
from kvtier.pipeline.query import Expected, Query
from kvtier.plugins import Plugins
from kvtier.settings.peer import PeerSettings
from kvtier.testing.backend import make_key
from kvtier.tiers import codec_choice
from kvtier.tiers.encoded_seal import Encoder, Layouts
from kvtier.transports.base import Access
from kvtier.units import MIB
from tests.rigs.instance_process import CONTENTS, NAMESPACE, InstanceProcess, settings_of
from tests.rigs.scripted_peer import ScriptedPeer
from tests.rigs.scripted_peer import reading_from as reading_from_scripted
from tests.rigs.waiting import until

from .test_backend import blanks as blanks_of
from .test_backend import connected, keys_of
from .test_backend_processes import blanks, started, until_nothing_granted

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not native.available(), reason="the codec needs the native core"),
]

PAYLOAD, COUNT = MIB, 8
LENGTH = object_bytes(PAYLOAD)
TOTAL = COUNT * LENGTH


class Reader:
    """An instance in this process that fetches from peers."""

    def __init__(self, instance: Instance) -> None:
        self.cache = instance.cache
        self.tier = self.cache.lower[-1]
        assert instance.peers is not None
        self.peers = instance.peers

    @property
    def peer(self) -> dict[str, object]:
        return self.peers.status()[0]

    @property
    def source(self) -> Source:
        source = self.peers.clients[0].source
        assert source is not None
        return source

    async def lease(self, numbers: Sequence[int]) -> list[RemoteLease]:
        keys = keys_of(numbers)
        await self.source.look_up(keys, prefix=True)
        return [lease for key in keys if (lease := self.source.leases.find(key))]

    async def connected(self) -> None:
        await until(lambda: self.peer["linked"])

    async def fetch(self, numbers: Sequence[int], contents: str = "values", payload: int = PAYLOAD) -> int:
        """Return how many leading chunks arrive, all of them intact."""
        keys = keys_of(numbers)
        found = self.cache.look_up(Query(keys), Expected(NAMESPACE, [object_bytes(payload)] * len(keys)))
        await found.settle(None)
        for chunk in found.chunks:
            ChunkHeader.verify(chunk.lease.view, chunk.key)
            assert chunk.lease.view[HEADER_BYTES:][:payload] == CONTENTS[contents](chunk.key, payload)
        ready = found.ready
        found.release()
        return ready


@asynccontextmanager
async def reading_from(*processes: InstanceProcess, codec: str = "lossless") -> AsyncIterator[Reader]:
    addresses = [process.address for process in processes]
    settings = settings_of(None, addresses, 64 * LENGTH, codec=codec, timeout=20.0)
    async with Instance.open(settings) as instance:
        reader = Reader(instance)
        await reader.connected()
        yield reader
        await until(lambda: reader.cache.arena.leases == reader.cache.catalog.count(0))


def source(contents: str = "values", codec: str = "lossless", spoils: str = "") -> InstanceProcess:
    return InstanceProcess(range(COUNT), PAYLOAD, contents=contents, spoils=spoils, codec=codec, share=1.0)


async def awaits_of_another_fetch(process: InstanceProcess, reader: Reader, contents: str = "values") -> int:
    """Return how often the source is asked to wait or encode, when all its chunks have checksums."""
    await reader.cache.clear(keys_of(range(COUNT)))
    before = (await process.status())["serving"]["requests"]
    assert await reader.fetch(range(COUNT), contents) == COUNT
    after = (await process.status())["serving"]["requests"]
    return after.get("Await", 0) - before.get("Await", 0)


async def test_chunks_are_encoded_on_the_way() -> None:
    process = source()
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT)) == COUNT
        written = reader.tier.written
        assert written is not None
        assert written.chunk_bytes == TOTAL
        assert written.stored_bytes < TOTAL / 1.3
        assert reader.peer["read_bytes"] == written.stored_bytes, "others were read as well"
        await until_nothing_granted(process)


async def test_bytes_that_do_not_get_smaller_are_sent_as_they_are() -> None:
    process = source("noise")
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT), "noise") == COUNT
        assert reader.peer["read_bytes"] == TOTAL
        assert await awaits_of_another_fetch(process, reader, "noise") == 1, "not requested encoded"
        await until_nothing_granted(process)


@pytest.mark.parametrize(("here", "there"), [("lossless", "identity"), ("identity", "lossless")])
async def test_peer_without_the_codec_gets_and_sends_chunks_as_they_are(here: str, there: str) -> None:
    process = source(codec=there)
    async with started(process), reading_from(process, codec=here) as reader:
        assert await reader.fetch(range(COUNT)) == COUNT
        assert reader.peer["read_bytes"] == TOTAL
        assert await awaits_of_another_fetch(process, reader) == 0, "a round trip for nothing"


async def test_no_room_for_encoded_copies_sends_chunks_as_they_are() -> None:
    process = InstanceProcess(
        range(COUNT), PAYLOAD, capacity=TOTAL + LENGTH // 2, contents="values", codec="lossless", share=1.0
    )
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT)) == COUNT
        assert reader.peer["read_bytes"] == TOTAL


async def test_damaged_byte_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """In each field of the header, in the tables of the codec, in its codes, and in its last bytes."""
    fields = [0, 8, 10, 12, 14, 16, 24, 32, 64, 96, 128, 144, 400, 404, 412, 414, 420, 432]
    places = [*fields, HEADER_BYTES, HEADER_BYTES + 9, HEADER_BYTES + 4096, PAYLOAD // 3, -9, -1]
    process = source(spoils=f"flip {' '.join(map(str, places))}")
    async with started(process), reading_from(process) as reader:
        for number, place in enumerate(places):
            assert await reader.fetch([number % COUNT]) == 0, f"byte {place}"
            assert reader.tier.corrupt == number + 1, "it is read once, and counted"
        assert reader.peer["state"] == "connected"
        with anyio.fail_after(5):  # Sooner than a lease ends.
            await until_nothing_granted(process)
    assert "corrupt chunk" in caplog.text


async def test_other_codec_is_a_miss_with_that_reason(caplog: pytest.LogCaptureFixture) -> None:
    process = source(spoils="codec 999")
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT)) == 0
        assert (reader.tier.unreadable, reader.tier.corrupt) == (COUNT, 0)
        assert reader.cache.catalog.gone.find(make_key(0)) == Gone(MissReason.UNREADABLE, reader.tier.index)
    assert "is encoded by codec 999, which is not installed" in caplog.text


async def test_codec_with_loss_is_not_decoded() -> None:
    process = source(spoils="codec 3")  # That of int8.
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT)) == 0
        assert reader.tier.unreadable == COUNT


@pytest.mark.parametrize("by", [-4096, 4096])
async def test_length_of_another_object_is_a_miss(by: int) -> None:
    process = source(spoils=f"length {by}")
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT)) == 0
        assert reader.tier.corrupt + reader.tier.unreadable <= COUNT
        await until_nothing_granted(process)


@pytest.mark.parametrize("by", [1, -1, LENGTH, 1 << 40, -(1 << 40)])
async def test_length_that_no_codec_makes_ends_the_connection(
    by: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before memory is taken for it."""
    process = source(spoils=f"length {by}")
    async with started(process), reading_from(process) as reader:
        assert await reader.fetch(range(COUNT)) == 0
        await until(lambda: "invalid offset or length" in str(reader.peer["last_error"]))
        await reader.connected()


class Scratch:
    """Counts the memory that is taken to read encoded chunks into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.reading = anyio.Event()
        scratch, read = Encoder.scratch, Source.read

        @contextmanager
        def counted(encoder: Encoder, lengths: Sequence[int]) -> Iterator[list[memoryview]]:
            with scratch(encoder, lengths) as buffers:
                self.taken += 1
                try:
                    yield buffers
                finally:
                    self.taken -= 1

        async def read_half(
            source: Source, reads: Sequence[Read], *, hashes: bool = False
        ) -> Sequence[Outcome]:
            await read(source, reads[: len(reads) // 2], hashes=hashes)
            self.reading.set()
            await source.ended.wait()
            return [Outcome.FAILED] * len(reads)

        monkeypatch.setattr(Encoder, "scratch", counted)
        monkeypatch.setattr(Source, "read", read_half)


async def test_killed_source_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    process, scratch, arrived = source(), Scratch(monkeypatch), []
    async with started(process), reading_from(process) as reader:

        async def fetch() -> None:
            arrived.append(await reader.fetch(range(COUNT)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await scratch.reading.wait()
            assert scratch.taken
            await process.kill()
        assert arrived == [0]
        assert not scratch.taken


async def test_cancelled_fetch_gives_memory_back_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    process, scratch, items = source(), Scratch(monkeypatch), await blanks(range(COUNT), PAYLOAD)
    async with started(process), reading_from(process) as reader:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.peers.get, items)
            await scratch.reading.wait()
            assert scratch.taken
            assert (await process.status())["arena"]["leases"] >= 2 * COUNT - 1, "nothing is encoded"
            tasks.cancel_scope.cancel()
        assert not scratch.taken
        await until_nothing_granted(process)


async def test_source_that_loses_its_peer_gives_memory_back() -> None:
    process = source()
    async with started(process):
        async with reading_from(process) as reader:
            leases = await reader.lease(range(COUNT))
            assert await reader.source.readable(leases, 1) == set(leases)
            assert all(lease.encoded for lease in leases)
            assert (await process.status())["arena"]["leases"] == 2 * COUNT
        await until_nothing_granted(process)


async def test_request_for_the_same_chunks_again_encodes_nothing_more() -> None:
    process = source()
    async with started(process), reading_from(process) as reader:
        leases = await reader.lease(range(COUNT))
        await reader.source.readable(leases, 1)
        before = [lease.encoded for lease in leases]
        assert await reader.source.readable(leases, 1) == set(leases)
        assert [lease.encoded for lease in leases] == before
        assert (await process.status())["arena"]["leases"] == 2 * COUNT
        assert await reader.source.readable(leases, 2) == set(leases), "another codec than that of the source"


async def test_auto_encodes_while_the_link_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_per_byte, read, decode = 200e-9, Source.read, LinkDecoder.decode

    async def read_slowly(
        source: Source, reads: Sequence[Read], *, hashes: bool = False
    ) -> Sequence[Outcome]:
        outcomes = await read(source, reads, hashes=hashes)
        await anyio.sleep(seconds_per_byte * sum(len(view) for _, view in reads))
        return outcomes

    monkeypatch.setattr(Source, "read", read_slowly)
    process = source()
    async with started(process), reading_from(process, codec="auto") as reader:
        with CacheMetrics.of(reader.cache) as metrics:

            def metric(name: str) -> float | None:
                return metrics.registry.get_sample_value(f"kvtier_{name}", {"tier": "peers"})

            for _ in range(4):
                assert await reader.fetch(range(4)) == 4
                await reader.cache.clear(keys_of(range(4)))
            assert reader.peer["encodes"] is True
            gain = reader.peer["codec_gain"]
            assert isinstance(gain, float)
            assert 1 < gain < 2
            assert (metric("tier_encodes"), metric("tier_codec_gain")) == (1, gain)
            status = reader.tier.status()
            assert (status["codec"], status["ratio"], status["encodes"]) == ("auto", None, 1)
            assert metric("tier_encoded_bytes_total") == 16 * LENGTH
            assert metric("tier_encoded_stored_bytes_total") == reader.peer["read_bytes"]

            # The link is fast now, and the codec slow: it is measured again after a while.
            seconds_per_byte = 0.0

            async def decode_slowly(*arguments: Any) -> Sequence[Outcome]:
                await anyio.sleep(0.2)
                return await decode(*arguments)

            monkeypatch.setattr(LinkDecoder, "decode", decode_slowly)
            monkeypatch.setattr(codec_choice, "TRIAL_SECONDS", 0.0)
            for _ in range(9):
                assert await reader.fetch(range(4)) == 4
                await reader.cache.clear(keys_of(range(4)))
            monkeypatch.setattr(codec_choice, "TRIAL_SECONDS", 600.0)
            assert reader.peer["encodes"] is False
            before = reader.peer["read_bytes"]
            assert await reader.fetch(range(4)) == 4
            assert reader.peer["read_bytes"] == before + 4 * LENGTH
            assert metric("tier_encodes") == 0

            seconds_per_byte = 200e-9
            monkeypatch.setattr(LinkDecoder, "decode", decode)
            monkeypatch.setattr(codec_choice, "TRIAL_SECONDS", 0.0)
            for _ in range(6):
                await reader.cache.clear(keys_of(range(4)))
                assert await reader.fetch(range(4)) == 4
            assert reader.peer["encodes"] is True


async def test_encoded_chunk_that_was_not_requested_ends_the_connection() -> None:
    peer = ScriptedPeer().hold(1)
    peer.late = frozenset(keys_of([1]))
    peer.script = lambda message: (
        [Readable(message.ticket, [True], [(0, 4096)])] if isinstance(message, Await) else None
    )
    async with peer.serving(), reading_from_scripted(peer) as backend:
        await connected(backend)
        assert await backend.get(blanks_of([1])) == [Outcome.FAILED]
        await until(lambda: "requested as they are" in str(backend.status()[0]["last_error"]))


@pytest.mark.parametrize("spoiled", ["writable", "released", "corrupt", "no chunk"])
async def test_what_is_not_a_granted_chunk_is_not_encoded(spoiled: str) -> None:
    plugins = Plugins.load([])
    codecs = plugins.peer_codecs(settings_of(None, [], LENGTH, codec="lossless"))
    assert codecs is not None
    arena = Arena.create(4 * LENGTH)
    lease = arena.allocate(LENGTH)
    assert lease is not None
    lease.view[HEADER_BYTES:][:PAYLOAD] = CONTENTS["values"](make_key(1), PAYLOAD)
    ChunkHeader(make_key(1), make_key(0), NAMESPACE, PAYLOAD).seal(lease.view)
    if spoiled in ("corrupt", "no chunk"):
        lease.view[HEADER_BYTES + 5 if spoiled == "corrupt" else 5] ^= 1
    grants = GrantBook(arena, PeerSettings(share=1.0))
    grant = grants.grant("a peer", [lease], Access.WRITE if spoiled == "writable" else Access.READ)
    assert grant is not None
    if spoiled == "released":
        grants.release("a peer", grant.number, [0])
    await GrantEncoder(arena, grants, Encoder(codecs, Layouts(), checksum=True)).encode(grant, [0, 1, -1])
    assert not grant.encoded
    grants.close()
    assert not arena.leases
    arena.close()


def test_codec_with_loss_is_refused() -> None:
    settings = settings_of(None, [], LENGTH, codec="int8")
    with pytest.raises(SettingsError, match=r"peer\.codec .*is int8, which loses precision"):
        Plugins.load([]).peer_codecs(settings)


def test_unknown_codec_names_those_that_peers_can_use() -> None:
    settings = settings_of(None, [], LENGTH, codec="losless")
    with pytest.raises(SettingsError, match=r"peer\.codec.*unknown codec 'losless': use one of") as raised:
        Plugins.load([]).peer_codecs(settings)
    named = str(raised.value).partition("use one of ")[2].partition(", or install")[0].split(", ")
    assert {"auto", "lossless"} <= {*named}
    assert not {"fp8", "int8", "int4"} & {*named}
