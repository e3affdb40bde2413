"""What instances report for display: tokens by model and tenant, transfers, peers, outages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier import Settings, TieredCache
from kvtier.catalog.hints import ChunkHints
from kvtier.fleet.member.counters import counters_of
from kvtier.fleet.member.protocol import Counters, TokenCount
from kvtier.observability.transfers import TransferCounts
from kvtier.pipeline.query import Expected, Query
from tests.rigs.fleet import CHUNK_TOKENS, MODEL, TOKEN_BYTES, fleet
from tests.rigs.waiting import until

pytestmark = pytest.mark.anyio

NO_COMMANDS: Any = None
TOKENS = list(range(4 * CHUNK_TOKENS))


def tenants(cache: TieredCache) -> dict[str, tuple[int, int]]:
    return {name: (counts.looked_up, counts.hit) for name, counts in cache.usage.tenants.items()}


async def test_tokens_are_counted_by_model_and_tenant_with_the_time_saved() -> None:
    settings = Settings(
        chunk_tokens=16,
        tiers=[{"name": "ram", "type": "cpu", "capacity": "4MiB"}],
        tenants={"team-a": {"share": 0.5}},
    )
    async with TieredCache.open(settings) as cache:
        model = cache.model("llama", token_bytes=64)
        await model.store(TOKENS[:32], bytearray(32 * 64))
        keys, namespace = model.keys(TOKENS), model.namespace
        for hints, repeated in ((ChunkHints(tenant="team-a"), False), (None, False), (None, True)):
            query = Query(keys, len(TOKENS), hints, compute_seconds=2.0, repeated=repeated)
            found = cache.look_up(query, Expected(namespace, [100] * len(keys)))
            found.release()
        counts = cache.usage.models[namespace]
        assert (counts.looked_up, counts.hit, counts.saved_seconds) == (128, 64, 2.0)
        assert tenants(cache) == {"team-a": (64, 32), "other": (64, 32)}
        assert cache.usage.saved_seconds(cache.layouts) == (2.0, 2.0)
        cache.counts["miss_tokens_evicted"] = 5
        counters = counters_of(cache, TransferCounts(cache), tuple)
        assert counters.models == [TokenCount(namespace.hex(), 128, 64, 2.0)]
        assert (counters.misses, counters.outages, counters.peers) == ({"evicted": 5}, [0], [])


async def test_without_tenants_there_are_no_counts_of_them() -> None:
    settings = Settings(chunk_tokens=16, tiers=[{"name": "ram", "type": "cpu", "capacity": "4MiB"}])
    async with TieredCache.open(settings) as cache:
        model = cache.model("llama", token_bytes=64)
        await model.retrieve(TOKENS, bytearray(64 * 64))
        assert tenants(cache) == {}
        assert [counts.looked_up for counts in cache.usage.models.values()] == [64]


async def test_instances_report_transfers_and_peers(tmp_path: Path) -> None:
    async with fleet(
        tmp_path, NO_COMMANDS, "one", "two", heartbeat="100ms", instance_timeout="30s"
    ) as running:
        await running.store("one", TOKENS)
        two = running.instances["two"]
        into = bytearray(len(TOKENS) * TOKEN_BYTES)
        assert await two.cache.model(MODEL, token_bytes=TOKEN_BYTES).retrieve(TOKENS, into) == len(TOKENS)
        member = running.controller.registry.members["two"]

        def counters() -> Counters | None:
            return None if member.heartbeat is None else member.heartbeat.counters

        def moved() -> int:
            known = counters()
            routes = () if known is None else known.routes
            return sum(route.bytes for route in routes if (route.source, route.target) == ("peers", "ram"))

        await until(lambda: moved() >= len(into))
        found = counters()
        assert found is not None
        (model,) = found.models
        assert (model.looked_up, model.hit) == (len(TOKENS), len(TOKENS))
        (peer,) = found.peers
        assert (peer.instance.partition(":")[0], peer.state) == ("one", "connected")
        assert peer.read_bytes >= len(into)
        status: Any = two.status()
        assert status["models"] == [
            {"model": MODEL, "looked_up_tokens": len(TOKENS), "hit_tokens": len(TOKENS)}
        ]
