"""The tokens that lookups asked for and hit, by model and by configured tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.catalog.hints import ChunkHints
from kvtier.settings.tenants import OTHER
from kvtier.tiers.encoded_seal import Layouts

MAX_MODELS = 64
"""Namespaces that are counted. Lookups of further ones are not."""


@dataclass(slots=True)
class TokenCounts:
    """Counts since the start, without lookups that a request repeats and those of peers."""

    looked_up: int = 0
    hit: int = 0
    saved_seconds: float = 0.0
    """How long the engines would have computed what was hit, as far as they know their speed."""


class Usage:
    """Counts tokens by namespace, and by tenant if any is configured. Takes about a microsecond a lookup."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """``tenants``: the name of the configured tenant by each name that requests use for it."""
        self._tenants = tenants
        self.models: dict[bytes, TokenCounts] = {}
        names = (*tenants.values(), OTHER) if tenants else ()
        self.tenants = {name: TokenCounts() for name in names}

    def look_up(self, namespace: bytes, hints: ChunkHints | None, tokens: int) -> list[TokenCounts]:
        """Count the tokens of a lookup, and return the counts to which its hits are to be added."""
        counts = []
        if namespace in self.models or len(self.models) < MAX_MODELS:
            counts.append(self.models.setdefault(namespace, TokenCounts()))
        if self._tenants:
            name = "" if hints is None else hints.tenant
            counts.append(self.tenants[self._tenants.get(name, OTHER)])
        for each in counts:
            each.looked_up += tokens
        return counts

    def saved_seconds(self, layouts: Layouts) -> tuple[float, float]:
        """Return the prefill that hits have saved, and the same in seconds of each rank's GPU."""
        seconds = of_gpus = 0.0
        for namespace, counts in self.models.items():
            layout = layouts.get(namespace)
            seconds += counts.saved_seconds
            of_gpus += counts.saved_seconds * (1 if layout is None else layout.ranks)
        return seconds, of_gpus
