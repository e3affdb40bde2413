"""What a peer does for a request of another instance is in the trace of that request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
import opentelemetry.sdk.trace.export  # noqa: F401 - the thread that exports would block the event loop
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import Settings
from kvtier.instance import Instance
from kvtier.observability.traces.spans import NO_TRACER, Sampling, Tracer, following
from kvtier.peers.protocol import Commit, Lookup, decode_from_client
from kvtier.plugins import Plugins
from kvtier.rpc.frames import Request, decoder, encode_body
from kvtier.testing.servers import free_port
from tests.rigs.collector import Collector

pytestmark = pytest.mark.anyio

PLUGINS = Plugins.load([])
TOKENS, TOKEN_BYTES, CHUNK = list(range(512)), 512, 64
CHUNKS = len(TOKENS) // CHUNK
TRACE = Sampling.of({}).trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
TRACE_ID, CLIENT = TRACE[:16].hex(), TRACE[16:].hex()


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector(tmp_path).start()
    for name, value in collector.environment().items():
        monkeypatch.setenv(name, value)
    yield collector
    collector.kill()


@asynccontextmanager
async def two_peers(folder: Path, *, traced_server: bool = True) -> AsyncIterator[tuple[Instance, Instance]]:
    """One that has stored the prompt on its disk, and one that fetches from it."""
    listens = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def settings(at: int) -> Settings:
        disk = {"name": "ssd", "type": "disk", "path": str(folder / f"ssd{at}"), "capacity": "16MiB"}
        transport = {"type": "tcp", "deadline": "60s"}
        peer = {"secret": "0123456789abcdef" * 4, "listen": listens[at], "transport": transport}
        others = [listens[0]] if at else []
        return Settings(
            traces=traced_server or at == 1,
            tiers=[{"name": "ram", "type": "cpu", "capacity": "4MiB"}, disk],
            chunk_tokens=CHUNK,
            peer={**peer, "timeout": "60s", "share": 0.9, "others": others},
        )

    async with (
        Instance.open(settings(0), plugins=PLUGINS) as server,
        Instance.open(settings(1), plugins=PLUGINS) as client,
    ):
        model = server.cache.model("llama", token_bytes=TOKEN_BYTES)
        assert await model.store(TOKENS, bytearray(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)
        assert await server.cache.drain(60)
        server.cache.memory.drop(model.keys(TOKENS))
        yield server, client


async def fetch(client: Instance) -> None:
    model = client.cache.model("llama", token_bytes=TOKEN_BYTES)
    with following(TRACE):
        assert await model.retrieve(TOKENS, bytearray(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)


async def test_what_is_read_at_a_peer_is_in_the_trace_of_the_request(
    collector: Collector, tmp_path: Path
) -> None:
    async with two_peers(tmp_path) as (_, client):
        await fetch(client)
    spans = [span for span in collector.spans if span.trace == TRACE_ID]
    [serve] = [span for span in spans if span.name == "kvtier.peer.serve"]
    assert (serve.parent, serve.error, serve.attributes["kvtier.chunks"]) == (CLIENT, "", CHUNKS)
    assert int(serve.attributes["kvtier.bytes"]) >= len(TOKENS) * TOKEN_BYTES
    [lookup] = [span for span in spans if span.name == "kvtier.tier.lookup"]
    assert (lookup.parent, lookup.attributes["kvtier.tier"]) == (CLIENT, "peers")
    assert (lookup.attributes["kvtier.chunks"], lookup.attributes["kvtier.missed_chunks"]) == (CHUNKS, 0)
    reads = [span for span in spans if span.name == "kvtier.tier.read"]
    assert {(span.attributes["kvtier.tier"], span.parent) for span in reads} == {
        ("peers", CLIENT),
        ("ssd", serve.id),
    }
    assert serve.end >= max(span.end for span in reads if span.parent == serve.id)


async def test_what_is_pushed_to_a_peer_is_in_the_trace_of_the_request(
    collector: Collector, tmp_path: Path
) -> None:
    async with two_peers(tmp_path) as (server, client):
        model = server.cache.model("llama", token_bytes=TOKEN_BYTES)
        assert await model.retrieve(TOKENS, bytearray(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)
        assert client.server is not None
        host, port = client.server.address
        with following(TRACE):
            transfer = server.transfer_kv(f"{host}:{port}", model.keys(TOKENS))
        assert (await transfer.finish(60)).leading == CHUNKS
    receives = collector.named("kvtier.peer.receive")
    assert {(span.trace, span.parent) for span in receives} == {(TRACE_ID, CLIENT)}
    assert sum(int(span.attributes["kvtier.chunks"]) for span in receives) == CHUNKS


async def test_a_peer_without_traces_serves_and_records_nothing(collector: Collector, tmp_path: Path) -> None:
    async with two_peers(tmp_path, traced_server=False) as (_, client):
        await fetch(client)
    assert not collector.named("kvtier.peer.serve")
    reads = collector.named("kvtier.tier.read")
    assert {span.attributes["kvtier.tier"] for span in reads} == {"peers"}


async def test_a_request_without_a_trace_has_none_at_the_peer(collector: Collector, tmp_path: Path) -> None:
    async with two_peers(tmp_path) as (_, client):
        model = client.cache.model("llama", token_bytes=TOKEN_BYTES)
        assert await model.retrieve(TOKENS, bytearray(len(TOKENS) * TOKEN_BYTES)) == len(TOKENS)
    assert {span.name for span in collector.spans} <= {"kvtier.tier.read", "kvtier.tier.write"}


async def test_what_a_lost_peer_was_served_ends_with_its_connection(
    collector: Collector, tmp_path: Path
) -> None:
    async with two_peers(tmp_path) as (_, client):
        assert client.peers is not None
        model = client.cache.model("llama", token_bytes=TOKEN_BYTES)
        with following(TRACE):
            assert await client.peers.held_prefix(model.keys(TOKENS)) == CHUNKS
        assert not collector.named("kvtier.peer.serve")
        await client.peers.close()
        with anyio.fail_after(60):
            while not collector.named("kvtier.peer.serve"):
                await anyio.sleep(0.1)


@given(st.binary(max_size=64))
def test_a_wrong_trace_of_a_peer_is_ignored(sent: bytes) -> None:
    tracer = Tracer(Sampling.of({}))
    valid = len(sent) == 24 and any(sent[:16]) and any(sent[16:])
    assert tracer.received(sent) == (sent if valid else b"")
    assert NO_TRACER.received(sent) == b""


def test_a_trace_of_any_length_is_ignored_but_a_right_one() -> None:
    tracer = Tracer(Sampling.of({}))
    assert tracer.received(TRACE) == TRACE
    for wrong in (TRACE[:-1], TRACE + b"\1", bytes(24), bytes(16) + TRACE[16:], TRACE[:16] + bytes(8)):
        assert tracer.received(wrong) == b""
    assert tracer.received(b"\1" * (3 << 20)) == b""


class OldLookup(Request, frozen=True, array_like=True, tag=10):
    """As a peer has it that knows nothing of traces."""

    keys: bytes
    prefix: bool


def test_a_peer_of_a_version_without_traces_understands_and_is_understood() -> None:
    old = decoder(OldLookup, "a lookup")(encode_body(Lookup(7, bytes(32), True, TRACE)))
    assert old == OldLookup(7, bytes(32), True)
    assert decode_from_client(encode_body(old)) == Lookup(7, bytes(32), True)
    assert decode_from_client(encode_body(Commit(7, 1, [0], bytes(16)))).trace == b""
