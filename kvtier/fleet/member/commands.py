"""Execute the controller's commands, each as a cancellable unit of work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from kvtier.cache import TieredCache
from kvtier.errors import PeerError, ProtocolError
from kvtier.fleet.member.protocol import (
    MAX_KEYS,
    Command,
    Delete,
    DeleteAll,
    Done,
    Explain,
    ExplainPrompt,
    Fetch,
    Pin,
    Progress,
    Tokenize,
    Unpin,
)
from kvtier.fleet.member.tokenizing import Tokenizers
from kvtier.memory.keys import ChunkKey, join_keys, split_keys
from kvtier.observability.requests import PromptReport, WhyReport
from kvtier.peers.backend import PeersBackend
from kvtier.pipeline.clear import Cleared
from kvtier.pipeline.move import ChunkProvider
from kvtier.pipeline.query import Expected
from kvtier.tiers.level import Level
from kvtier.tiers.tier import Tier

KEYS_A_STEP = 4096
"""Number of keys processed before yielding to the event loop."""
Why = Callable[[str, int], Awaitable[WhyReport]]
WhyPrompt = Callable[[Sequence[int], str, str], Awaitable[list[PromptReport]]]


class Peers(NamedTuple):
    """The backend for chunks of other instances, and the tier that represents all of them."""

    backend: PeersBackend
    tier: Tier


class Work(ABC):
    """Execution of one command."""

    changes = True
    """Whether it changes the contents of tiers."""

    def __init__(self, commands: Commands, command: Command, keys: bytes = b"") -> None:
        """``keys``: those of the chunks that the command names."""
        self._commands = commands
        self._cache = commands.cache
        self._ticket = command.ticket
        self._keys = _split(keys)
        self._done: list[ChunkKey] = []
        self._bytes = 0

    @abstractmethod
    async def run(self) -> None:
        """Execute the command. Raises :class:`kvtier.errors.KVTierError` if it cannot start."""

    def answer(self, reason: str | None) -> Done:
        """Return the outcome, also of a cancelled command; ``reason``: why it was cancelled, if it was."""
        return Done(self._ticket, join_keys(self._done), len(self._done), self._bytes, reason)

    def progress(self) -> Progress | None:
        """Return the progress of a long-running command."""
        return None


class Commands:
    """Creates work from commands. ``peers`` is ``None`` if fetching from other instances is disabled.

    ``why`` and ``why_prompt`` are those of :class:`kvtier.instance.Instance`.
    """

    def __init__(
        self, cache: TieredCache, peers: Peers | None, tokenizers: Tokenizers, why: Why, why_prompt: WhyPrompt
    ) -> None:
        self.cache = cache
        self.peers = peers
        self.tokenizers = tokenizers
        self.why = why
        self.why_prompt = why_prompt

    def begin(self, command: Command) -> Work:
        """Create the work of a command without running it. Raises :class:`ProtocolError` if invalid."""
        match command:
            case Fetch():
                return _Fetching(self, command)
            case Delete():
                return _Deleting(self, command)
            case DeleteAll():
                return _DeletingAll(self, command)
            case Pin() | Unpin():
                return _Pinning(self, command)
            case Tokenize() | Explain() | ExplainPrompt():
                return _Asking(self, command)

    def tier(self, number: int) -> Level:
        """Return a tier by its number. Raises :class:`ProtocolError`."""
        tiers = self.cache.tiers
        if not 0 <= number < len(tiers):
            raise ProtocolError(f"invalid tier number {number}: this instance has {len(tiers)} tiers")
        return tiers[number]


class _Fetching(Work):
    def __init__(self, commands: Commands, command: Fetch) -> None:
        super().__init__(commands, command, command.keys)
        keys = self._keys
        if len(command.lengths) != len(keys) or any(length <= 0 for length in command.lengths):
            raise ProtocolError(
                f"{len(keys)} distinct chunks with {len(command.lengths)} lengths, or a length below 1"
            )
        self._command = command
        self._tier = commands.tier(command.tier)
        expected = Expected(command.namespace, command.lengths)
        self._gathering = commands.cache.gather(keys, expected, self._tier.name)
        self._last_error: str | None = None

    async def run(self) -> None:
        seconds = self._command.seconds
        with anyio.move_on_after(None if seconds is None else max(seconds, 0.0)) as scope:
            await self._run()
        if scope.cancelled_caught:
            self._last_error = f"its deadline of {seconds:g} s has expired"

    async def _run(self) -> None:
        address, gathering, peers = self._command.peer, self._gathering, self._commands.peers
        if peers is not None and self._tier is peers.tier:
            raise ProtocolError(f"tier {self._tier.name} cannot be written to: choose another one")
        if address is None or not gathering.is_incomplete():
            await gathering.run()
            return
        if peers is None:
            self._last_error = "this instance cannot fetch from others: set peer.secret or peer.tls"
            await gathering.run()
            return
        try:
            async with peers.backend.temporary_peer(address) as peer:
                await gathering.run(ChunkProvider(peers.tier, peer.lease, f"peer {address}"))
        except PeerError as error:
            await gathering.run()  # Chunks in this instance's other tiers can still be fetched.
            self._last_error = str(error)

    def answer(self, reason: str | None) -> Done:
        self._done, self._bytes = self._gathering.held(), self._gathering.transferred_bytes
        if len(self._done) == len(self._keys):
            return super().answer(None)
        return super().answer(
            reason or self._last_error or self._gathering.reason or "some were removed in the meantime"
        )

    def progress(self) -> Progress | None:
        return Progress(self._ticket, len(self._gathering.held()), self._gathering.transferred_bytes)


class _Deleting(Work):
    def __init__(self, commands: Commands, command: Delete) -> None:
        super().__init__(commands, command, command.keys)
        self._tier = commands.tier(command.tier)

    async def run(self) -> None:
        for part in _steps(self._keys):
            cleared = await self._cache.clear(part, tiers=[self._tier.name])
            self._done += cleared.keys
            self._bytes += cleared.bytes
            await anyio.lowlevel.checkpoint()


class _DeletingAll(Work):
    def __init__(self, commands: Commands, command: DeleteAll) -> None:
        super().__init__(commands, command)
        if command.tier is not None:
            tiers = [commands.tier(command.tier)]
        else:
            # Never delete chunks of peers.
            peers_tier = None if commands.peers is None else commands.peers.tier
            tiers = [tier for tier in commands.cache.tiers if tier is not peers_tier]
        self._tiers = [tier.name for tier in tiers]
        self._cleared = Cleared([], 0, 0)

    async def run(self) -> None:
        self._cleared = await self._cache.clear(tiers=self._tiers)

    def answer(self, reason: str | None) -> Done:
        return Done(self._ticket, b"", self._cleared.chunks, self._cleared.bytes, reason)


class _Pinning(Work):
    changes = False

    def __init__(self, commands: Commands, command: Pin | Unpin) -> None:
        super().__init__(commands, command, command.keys)
        self._command = command

    async def run(self) -> None:
        for part in _steps(self._keys):
            if isinstance(self._command, Pin):
                self._pin(part, self._command.seconds)
            else:
                self._cache.unpin(part)
                self._done += part
            await anyio.lowlevel.checkpoint()

    def _pin(self, keys: Sequence[ChunkKey], seconds: float | None) -> None:
        catalog = self._cache.catalog
        local = sum(1 << tier.index for tier in self._cache.tiers if not tier.shared)
        places = zip(keys, catalog.places(keys), strict=True)
        held = [key for key, (ready, _) in places if ready & local]
        self._cache.pin(held, seconds)
        self._done += held
        self._bytes += sum(catalog.length(key) for key in held)

    def answer(self, reason: str | None) -> Done:
        if len(self._done) < len(self._keys):
            reason = reason or "no tier of this instance holds the others"
        return super().answer(reason)


class _Asking(Work):
    changes = False

    def __init__(self, commands: Commands, command: Tokenize | Explain | ExplainPrompt) -> None:
        super().__init__(commands, command)
        self._command = command
        self._answer = super().answer(None)

    async def run(self) -> None:
        commands, answer = self._commands, self._answer
        match self._command:
            case Tokenize(namespace=namespace, prompt=prompt, chat=chat):
                tokens = await commands.tokenizers.tokenize(namespace, prompt, chat=chat)
                self._answer = replace(answer, tokens=tokens)
            case Explain(request=request, last=last):
                self._answer = replace(answer, report=await commands.why(request, last))
            case ExplainPrompt(model=model, tokens=joined, salt=salt):
                prompts = await commands.why_prompt(array("I", joined), model, salt)
                self._answer = replace(answer, prompts=prompts)

    def answer(self, reason: str | None) -> Done:
        return replace(self._answer, reason=reason)


def _split(joined: bytes) -> list[ChunkKey]:
    keys = split_keys(joined)
    if len(keys) > MAX_KEYS:
        raise ProtocolError(f"{len(keys)} chunks in one command exceed the limit of {MAX_KEYS}")
    return list(dict.fromkeys(keys))


def _steps(keys: Sequence[ChunkKey]) -> Iterator[Sequence[ChunkKey]]:
    for start in range(0, len(keys), KEYS_A_STEP):
        yield keys[start : start + KEYS_A_STEP]
