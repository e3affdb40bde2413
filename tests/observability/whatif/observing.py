"""Prompts to observe, the caches that an estimate is about, and exact answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvtier.events import AnswerEnd, PromptLookup
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


class Asked(NamedTuple):
    """A prompt of numbered chunks, and its answer."""

    time: float
    chunks: Sequence[int]
    seconds: float
    """Until the end of the answer."""
    signature: Sequence[int]


def agents(sessions: int, seed: int = 0) -> list[Asked]:
    """Return prompts of agents, which go on soon after a tool call, or never after the end of a turn."""
    choose = random.Random(seed)
    asked, number = [], 0
    for session in range(sessions):
        now, chunks = 4.0 * session, list[int]()
        for turn in range(8):
            chunks += range(number, number + 8)
            number += 8
            goes_on = turn < 7 and choose.random() < 0.6
            seconds = choose.uniform(5, 30)
            asked.append(Asked(now, list(chunks), seconds, (1, 2 if goes_on else 3)))
            if not goes_on:
                break
            now += seconds + choose.uniform(3, 6)
    return sorted(asked, key=lambda prompt: prompt.time)


def events_of(prompts: Sequence[Asked]) -> list[tuple[float, Asked, bool]]:
    """Return the time of each request and end in their order, its prompt, and whether it is an end."""
    ends = [(prompt.time + prompt.seconds, prompt, True) for prompt in prompts]
    return sorted([(prompt.time, prompt, False) for prompt in prompts] + ends, key=lambda event: event[0])


def observe_with_ends(estimate: Estimate, prompts: Sequence[Asked]) -> None:
    """Let an estimate observe prompts and the ends of their answers."""
    for time, prompt, is_end in events_of(prompts):
        keys = chunk_keys(prompt.chunks)
        if is_end:
            estimate.answer_ended(AnswerEnd(time, keys[-1], prompt.signature))
        else:
            estimate.observe(PromptLookup(time, keys, CHUNK_BYTES, CHUNK_TOKENS, 0))


def real_hit_rate_with_ends(settings: Settings, prompts: Sequence[Asked]) -> float:
    """Return the hit rate of a simulated cache in full size to which ends of answers are reported."""
    tiers = local_tiers(settings)
    cache = SimulatedCache(PLUGINS, SimulatedTiers(tiers, [1.0] * len(tiers), settings, ""), CHUNK_BYTES)
    hits = 0
    for time, prompt, is_end in events_of(prompts):
        keys = chunk_keys(prompt.chunks)
        if is_end:
            cache.answer_ended(time, keys, prompt.signature)
        else:
            hits += cache.serve(time, keys)
    return hits / sum(len(prompt.chunks) for prompt in prompts)


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
