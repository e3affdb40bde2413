"""The set of engines, and the choice of one for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from kvtier.fleet.proxy.connections import Connections, verification
from kvtier.fleet.proxy.engine import Engine, Role, State
from kvtier.fleet.proxy.settings import MAX_ENGINES

SLACK = 4
"""An engine is chosen for its cached prefix only if its load is at most 1.5 times the smallest load plus
this: a cached prefix is worth some queueing, but not much."""

HeldTokens = Callable[[Engine], int]


class Fleet:
    """Engines by role and URL. Engines can be added and removed while the proxy runs."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._engines: dict[tuple[Role, str], Engine] = {}
        self.draining: set[Engine] = set()
        """Removed engines with requests in flight."""

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def of(self, role: Role) -> list[Engine]:
        """Return all engines of a role."""
        return [engine for engine in self if engine.role == role]

    def find(self, role: Role, url: str) -> Engine | None:
        """Return the engine with that role and URL, if any."""
        return self._engines.get((role, url))

    def add(self, role: Role, url: str, peer: str | None = None) -> Engine:
        """Add an engine. Raises ``ValueError`` if it exists already, or there are too many."""
        if (role, url) in self._engines:
            raise ValueError(f"{role} engine {url} exists already")
        if len(self._engines) >= 2 * MAX_ENGINES:
            raise ValueError(f"there are {len(self._engines)} engines already: start another proxy")
        engine = Engine(role, url, peer, Connections(verification(url)), self._remember)
        self._engines[role, url] = engine
        return engine

    def remove(self, engine: Engine) -> None:
        """Remove an engine; its requests in flight complete."""
        del self._engines[engine.role, engine.url]
        engine.remove()
        self.draining.add(engine)

    def choose(self, role: Role, held: HeldTokens, exclude: Collection[Engine] = ()) -> Engine | None:
        """Return the engine with the longest cached prefix among those with a load close to the smallest.

        ``held`` returns how many tokens of the prompt an engine caches. Ties go to the least loaded engine,
        then to the least recently used one. Engines that failed recently are a last resort. Every request
        needs a decoder: if no decode engine is known to be up, one in any state is returned.
        """
        engines = [engine for engine in self.of(role) if engine not in exclude]
        candidates = [engine for engine in engines if engine.state == State.UP]
        if not candidates and role == Role.DECODE:
            candidates = engines
        if not candidates:
            return None
        now = time.monotonic()
        candidates = [engine for engine in candidates if engine.avoided_until <= now] or candidates
        max_load = min(engine.load for engine in candidates) * 1.5 + SLACK
        return max(
            (engine for engine in candidates if engine.load <= max_load),
            key=lambda engine: (held(engine), -engine.load, -engine.last_used),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for engine in [*self, *self.draining]:
            await engine.connections.aclose()
