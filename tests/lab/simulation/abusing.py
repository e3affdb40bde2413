"""Sessions that come back, beside clients that do not mean well, on a simulated memory tier."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from typing import Any

from kvtier.catalog.hints import ChunkHints
from kvtier.lab.simulation.trace import chunk_keys
from kvtier.memory.keys import ChunkKey
from kvtier.observability.whatif.simulated_cache import SimulatedCache, configured
from kvtier.settings import Settings
from tests.lab.simulation.making import FULL, PLUGINS

CAPACITY = 400
"""Chunks of the tier."""
CHUNK_BYTES = 4096
SESSIONS, GAP_SECONDS = 8, 20.0
"""Each comes back after half to one and a half of this time."""
CHUNKS = 20
"""Of a session, on average. So all of them have 160 chunks."""
TURNS = 16
SCAN_CHUNKS = 2


class Host:
    """A tier, its clients and their clock. The same arguments give the same requests."""

    def __init__(
        self, policy: str, *, lasting: bool = True, tenants: Mapping[str, Any] | None = None
    ) -> None:
        """``lasting``: sessions never end, and always ask for the same prompt. Otherwise their prompts grow
        by a chunk with each request, and after 16 of them a new session begins.

        With ``tenants``, the sessions are of the tenant ``sessions``.
        """
        tier = {"name": "ram", "type": "cpu", "capacity": CAPACITY * CHUNK_BYTES, "eviction": policy}
        settings = Settings(tiers=[tier | FULL], tenants=dict(tenants or {}))
        self.cache = SimulatedCache(PLUGINS, configured(PLUGINS, settings, None, {}), CHUNK_BYTES)
        self.now = 0.0
        self._lasting = lasting
        self._hints = ChunkHints("sessions") if tenants else None
        self._numbers = 0
        self._chance = random.Random(7)
        self._sessions: list[tuple[float, int, list[ChunkKey], int]] = [
            (self._chance.uniform(0, GAP_SECONDS), number, [], number % TURNS) for number in range(SESSIONS)
        ]
        """By the time of their next request, with their prompt and the number of requests before."""
        heapq.heapify(self._sessions)

    def run(
        self, seconds: float, per_second: float = 0.0, hints: ChunkHints | None = None, again: float = 0.0
    ) -> float:
        """Let time pass. Return the hit rate of the sessions, for chunks that they had asked for before.

        Another client sends ``per_second`` prompts with ``hints``, each of them once, or again after
        ``again`` seconds.
        """
        end, asked, hits = self.now + seconds, 0, 0
        others: list[list[ChunkKey]] = []
        sent, repeated = 0, round(again * per_second)
        while min(self.now, self._sessions[0][0]) < end:
            if per_second and self.now < self._sessions[0][0]:
                if len(others) < repeated:
                    others.append(self._new(SCAN_CHUNKS))
                other = others[sent % repeated] if repeated else self._new(SCAN_CHUNKS)
                self.cache.serve(self.now, other, hints)
                sent += 1
                self.now += 1 / per_second
            else:
                self.now, known, found = self._next_turn()
                asked, hits = asked + known, hits + found
        self.now = end
        return hits / asked

    def used(self) -> dict[str, int]:
        """Return how many chunks each tenant has in the tier."""
        tenants = self.cache.tiers[0].tenants
        assert tenants is not None
        return {usage.tenant: usage.chunks for usage in tenants.usage()}

    def _next_turn(self) -> tuple[float, int, int]:
        """Send the next request of a session. Return its time, and the known chunks of it and their hits."""
        now, number, known, turn = self._sessions[0]
        missing = CHUNKS - TURNS // 2 if not known else 1
        if self._lasting:
            missing = 0 if known else CHUNKS
        prompt = known + self._new(missing)
        found = self.cache.serve(now, prompt, self._hints)
        ended = not self._lasting and turn + 1 == TURNS
        following = now + self._chance.uniform(0.5, 1.5) * GAP_SECONDS
        heapq.heapreplace(
            self._sessions, (following, number, [] if ended else prompt, 0 if ended else turn + 1)
        )
        return now, len(known), min(found, len(known))

    def _new(self, chunks: int) -> list[ChunkKey]:
        first, self._numbers = self._numbers, self._numbers + chunks
        return chunk_keys(range(first, self._numbers))
