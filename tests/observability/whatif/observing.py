"""Prompts to observe, the caches that an estimate is about, and exact answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier.events import PromptLookup
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.observability.whatif.estimate import Estimate
from kvtier.observability.whatif.simulated_cache import SimulatedCache, SimulatedTiers
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings

PLUGINS = Plugins.load([])
CHUNK_BYTES = 64 << 20
CHUNK_TOKENS = 256
FOREVER = 1e9


def settings_of(*tiers: dict[str, Any], sample_chunks: int = 4096, **more: Any) -> Settings:
    """Return the settings of a cache; ``chunks``: the capacity of each tier. By default, by LRU."""
    described = []
    for at, tier in enumerate(tiers):
        rest = {name: value for name, value in tier.items() if name != "chunks"}
        medium = {"type": "disk", "path": f"/nowhere/{at}"} if at else {"type": "cpu"}
        always = {"name": f"t{at}", "capacity": tier["chunks"] * CHUNK_BYTES, "eviction": "lru"}
        described.append({**always, **medium, **rest})
    whatif = {"sample_chunks": sample_chunks, "half_life": FOREVER}
    return Settings(**{"tiers": described, "whatif": whatif, **more})


def local_tiers(settings: Settings) -> list[LocalTierSettings]:
    return [tier for tier in PLUGINS.tier_settings(settings) if isinstance(tier, LocalTierSettings)]


def estimate_of(settings: Settings) -> Estimate:
    return Estimate(PLUGINS, settings, local_tiers(settings))


def observe(estimate: Estimate, prompts: Iterable[Sequence[int]]) -> None:
    """Let an estimate observe prompts of numbered chunks, one a second."""
    for at, prompt in enumerate(prompts):
        estimate.observe(PromptLookup(float(at), chunk_keys(prompt), CHUNK_BYTES, CHUNK_TOKENS, 0))


def real_hit_rate(settings: Settings, prompts: Sequence[Sequence[int]]) -> float:
    """Return the hit rate of a simulated cache in full size."""
    tiers = local_tiers(settings)
    cache = SimulatedCache(PLUGINS, SimulatedTiers(tiers, [1.0] * len(tiers), settings, ""), CHUNK_BYTES)
    hits = sum(cache.serve(float(at), chunk_keys(prompt)) for at, prompt in enumerate(prompts))
    return hits / sum(map(len, prompts))


def chats(requests: int, sessions: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of chats that grow by some chunks each turn, after a system prompt that all share.

    Which chat goes on has a Zipf distribution; after some turns, it begins anew.
    """
    choose = random.Random(seed)
    weights = [1 / rank for rank in range(1, sessions + 1)]
    system, number = list(range(10)), 10
    open_chats: dict[int, list[int]] = {}
    prompts = []
    for session in choose.choices(range(sessions), weights, k=requests):
        chat = open_chats.setdefault(session, list(system))
        if len(chat) > 100:
            chat = open_chats[session] = list(system)
        more = choose.randrange(1, 12)
        chat += range(number, number + more)
        number += more
        prompts.append(list(chat))
    return prompts
