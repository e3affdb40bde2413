"""Whose turn it is: operations on the same chunks, of which one may delete, come one after the other.

Two moves of one prompt in opposite directions, carried out at once, could each delete what the other has
just confirmed. What only copies or pins may go beside its like.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from kvtier.keys import ChunkKey


class Claim:
    """What an operation is about to touch. In force from :meth:`Turns.claim` until its turn is over."""

    def __init__(
        self, instances: frozenset[str], roots: frozenset[ChunkKey] | None, *, deletes: bool
    ) -> None:
        """``roots`` are the first keys of prompts; ``None`` for all that the ``instances`` hold.

        A key stands for all tokens before it, so that two prompts have no chunk in common unless they have
        the first. This errs on the side of waiting, and is one comparison however long the prompts are.
        """
        self._instances = instances
        self._roots = roots
        self._deletes = deletes
        self.over = anyio.Event()

    def excludes(self, other: Claim) -> bool:
        """Whether the two may not be carried out at once."""
        if not (self._deletes or other._deletes):
            return False
        if self._roots is None or other._roots is None:
            return not self._instances.isdisjoint(other._instances)
        return not self._roots.isdisjoint(other._roots)


class Turns:
    """The claims in force, in the order in which they were made."""

    def __init__(self) -> None:
        self._claims: dict[Claim, None] = {}

    def is_free(self, claim: Claim) -> bool:
        """Whether it would have to wait for nobody."""
        return not any(claim.excludes(other) for other in self._claims)

    def claim(self, claim: Claim) -> None:
        """Join the queue. Who does must leave it by :meth:`turn` or :meth:`withdraw`."""
        self._claims[claim] = None

    def withdraw(self, claim: Claim) -> None:
        """Leave the queue. Harmless when repeated."""
        self._claims.pop(claim, None)
        claim.over.set()

    @asynccontextmanager
    async def turn(self, claim: Claim) -> AsyncIterator[None]:
        """Wait until all who came before and are in the way are through; then have the turn in the block.

        Nobody waits for one that came later, so that there is always one that waits for nobody.
        """
        try:
            before = []
            for other in self._claims:
                if other is claim:
                    break
                if claim.excludes(other):
                    before.append(other)
            for other in before:
                await other.over.wait()
            yield
        finally:
            self.withdraw(claim)
