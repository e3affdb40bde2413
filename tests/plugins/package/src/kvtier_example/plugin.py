"""A minimal implementation of every hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import typer
from pydantic import Field

from kvtier import Settings, hookimpl
from kvtier.backends.base import Backend, GetItem, Outcome, PutItem
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason
from kvtier.events import Observer, Report
from kvtier.memory.header import ChunkHeader
from kvtier.memory.keys import ChunkKey
from kvtier.memory.layout import ChunkLayout
from kvtier.settings import LocalTierSettings, TierSettings
from kvtier.tiers.codec import Codec


class ShelfSettings(LocalTierSettings):
    """Settings of a tier of type ``shelf``."""

    label: str = Field(description="What is written on the shelf.", examples=["top"])


class ShelfBackend(Backend):
    """Objects in a dict."""

    settings_type: ClassVar[type[TierSettings]] = ShelfSettings

    def __init__(self, settings: ShelfSettings) -> None:
        self.label = settings.label
        self._held: dict[ChunkKey, bytes] = {}

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Drop all objects."""
        self._held.clear()

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return for each key whether it is held."""
        return [key in self._held for key in keys]

    async def put(self, items: Sequence[PutItem]) -> Sequence[Outcome]:
        """Store a copy of each value."""
        self._held.update((key, bytes(view)) for key, view in items)
        return [Outcome.OK] * len(items)

    async def get(self, items: Sequence[GetItem]) -> Sequence[Outcome]:
        """Copy each value into its buffer."""
        outcomes = []
        for key, view in items:
            held = self._held.get(key)
            fits = held is not None and len(held) == len(view)
            if held is not None and fits:
                view[:] = held
            outcomes.append(Outcome.OK if fits else Outcome.MISS)
        return outcomes

    async def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Drop each key."""
        for key in keys:
            self._held.pop(key, None)


class FifoPolicy(EvictionPolicy):
    """First in, first out."""

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        self._rows: dict[int, None] = {}

    def added(self, rows: Sequence[int], now: float) -> None:
        """Append the rows."""
        self._rows.update(dict.fromkeys(rows))

    def used(self, rows: Sequence[int], now: float) -> None:
        """Ignore it."""

    def removed(self, rows: Sequence[int], reason: RemovalReason) -> None:
        """Remove the rows."""
        for row in rows:
            self._rows.pop(row, None)

    def victims(self) -> Iterator[int]:
        """Yield the oldest rows first."""
        return iter(self._rows)


class MirrorCodec(Codec):
    """The payload backwards."""

    code = 7000

    def max_encoded_bytes(self, chunk: ChunkHeader, layout: ChunkLayout | None) -> int:
        """Return the same length."""
        return chunk.payload_bytes

    def encode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> int:
        """Copy the payload, last byte first."""
        target[: len(source)] = source[::-1]
        return len(source)

    def decode(
        self, chunk: ChunkHeader, layout: ChunkLayout | None, source: memoryview, target: memoryview
    ) -> None:
        """Copy the payload back."""
        target[:] = source[::-1]


class NamingObserver(Observer):
    """Records the events."""

    def __init__(self, chunk_tokens: int | str) -> None:
        self.chunk_tokens = chunk_tokens
        self.phases: list[str] = []

    def observe(self, report: Report) -> None:
        """Record the name of an event."""
        self.phases.append(type(report.event).__name__)


class Pigeon:
    """A placeholder for a transport."""


@hookimpl
def kvtier_backends() -> dict[str, type[Backend]]:
    """Provide a backend."""
    return {"shelf": ShelfBackend}


@hookimpl
def kvtier_transports() -> dict[str, type]:
    """Provide a transport."""
    return {"pigeon": Pigeon}


@hookimpl
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """Provide an eviction policy."""
    return {"fifo": FifoPolicy}


@hookimpl
def kvtier_codecs() -> dict[str, type[Codec]]:
    """Provide a codec."""
    return {"mirror": MirrorCodec}


@hookimpl
def kvtier_observers(settings: Settings) -> Iterable[Observer]:
    """Provide an observer."""
    return [NamingObserver(settings.chunk_tokens)]


@hookimpl
def kvtier_commands(app: typer.Typer) -> None:
    """Add a command."""

    @app.command()
    def hello(name: str) -> None:
        """Greet NAME."""
        typer.echo(f"Hello {name}, from a plugin")
