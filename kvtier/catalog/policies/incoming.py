"""Incoming prompts: what is known of a prompt that was looked up, before the last part of it is stored.

An engine computes a long prompt in several steps, and stores a part after each. But what a prompt is worth
depends on its length, and an earlier visit of it is recognised by one of its last chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier.memory.keys import ChunkKey

MAX_PROMPTS = 1024
"""Those that were looked up longest ago are forgotten: most of them were not stored."""


class Rest(NamedTuple):
    """The chunks of a prompt that are still to be stored, counted from the next one on."""

    chunks: int
    known: int = 0
    """How many there are up to the last one by which an earlier visit is remembered."""
    ghost: int = 0
    """The hash of that chunk's key; 0 if there is none. The next part continues that visit."""
    declined: int = 0
    """The hash by which this visit is remembered if the part before was declined; otherwise 0."""


class UnfinishedPrompts:
    """The rest of each prompt, by the key of its next chunk or, behind a part, of the chunk before."""

    def __init__(self) -> None:
        self._rests: dict[int, Rest] = {}

    def expect(self, keys: Sequence[ChunkKey], ghosts: Mapping[int, int]) -> None:
        """Note the chunks that a prompt is missing. ``ghosts``: the keys by which visits are remembered."""
        self._put(hash(keys[0]), _seen(keys, ghosts))

    def rest(self, keys: Sequence[ChunkKey], parent: ChunkKey | None, ghosts: Mapping[int, int]) -> Rest:
        """Return what is known of a prompt whose next part begins with ``keys``, behind ``parent``."""
        for key in (keys[0], parent):
            rest = None if key is None else self._rests.get(hash(key))
            if rest is not None and rest.chunks >= len(keys):
                if rest.ghost in ghosts:
                    return rest
                seen = _seen(keys, ghosts)
                return rest._replace(known=seen.known, ghost=seen.ghost)
        return _seen(keys, ghosts)

    def passed(
        self, keys: Sequence[ChunkKey], parent: ChunkKey | None, rest: Rest, declined: int = 0
    ) -> None:
        """Note that a part with these chunks was stored, or declined and is remembered by ``declined``."""
        for key in (keys[0], parent):
            if key is not None:
                self._rests.pop(hash(key), None)
        left = rest.chunks - len(keys)
        if left > 0:
            self._put(hash(keys[-1]), Rest(left, declined=declined))

    def _put(self, key: int, rest: Rest) -> None:
        self._rests.pop(key, None)
        self._rests[key] = rest
        if len(self._rests) > MAX_PROMPTS:
            del self._rests[next(iter(self._rests))]


def _seen(keys: Sequence[ChunkKey], ghosts: Mapping[int, int]) -> Rest:
    """Return what is known from the chunks themselves."""
    for at in range(len(keys) if ghosts else 0, 0, -1):
        if (ghost := hash(keys[at - 1])) in ghosts:
            return Rest(len(keys), at, ghost)
    return Rest(len(keys))
