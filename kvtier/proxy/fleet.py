"""All engines, and which of them gets a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from kvtier.proxy.connections import Connections, verification
from kvtier.proxy.engine import Engine, Role, State
from kvtier.proxy.settings import MOST_ENGINES

SLACK = 4
"""Requests that an engine may have more than the idlest, and half as many again, to be chosen for what it
holds: a prefix is worth some waiting, but not a queue."""

Held = Callable[[Engine], int]


class Fleet:
    """Engines by role and URL. They come and go while the proxy runs."""

    def __init__(self, remember: int) -> None:
        self._remember = remember
        self._engines: dict[tuple[Role, str], Engine] = {}
        self.leaving: set[Engine] = set()
        """Removed, with requests under way."""

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def of(self, role: Role) -> list[Engine]:
        """All engines of a role."""
        return [engine for engine in self if engine.role == role]

    def find(self, role: Role, url: str) -> Engine | None:
        """The engine of that role and URL."""
        return self._engines.get((role, url))

    def add(self, role: Role, url: str, peer: str | None = None) -> Engine:
        """Use one more. Raises ``ValueError`` where it is there already, or there are too many."""
        if (role, url) in self._engines:
            raise ValueError(f"the {role} engine {url} is there already")
        if len(self._engines) >= 2 * MOST_ENGINES:
            raise ValueError(f"there are {len(self._engines)} engines already: start one more proxy")
        engine = Engine(role, url, peer, Connections(verification(url)), self._remember)
        self._engines[role, url] = engine
        return engine

    def remove(self, engine: Engine) -> None:
        """Give it nothing more. What is under way there may end."""
        del self._engines[engine.role, engine.url]
        engine.remove()
        self.leaving.add(engine)

    def choose(self, role: Role, held: Held, without: Collection[Engine] = ()) -> Engine | None:
        """The engine for a request: of those that are not much busier than the idlest, who holds most.

        Among equals the idlest, then whoever has waited longest. Who has failed of late is asked only where
        there is no other. A decoder is needed: where none is known to be up, one that is not may still be.
        """
        there = [engine for engine in self.of(role) if engine not in without]
        candidates = [engine for engine in there if engine.state == State.UP]
        if not candidates and role == Role.DECODE:
            candidates = there
        if not candidates:
            return None
        now = time.monotonic()
        candidates = [engine for engine in candidates if engine.avoided_until <= now] or candidates
        most = min(engine.load for engine in candidates) * 1.5 + SLACK
        return max(
            (engine for engine in candidates if engine.load <= most),
            key=lambda engine: (held(engine), -engine.load, -engine.turn),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for engine in [*self, *self.leaving]:
            await engine.connections.aclose()
