"""An engine's end of the bridge: synchronous, without threads, and never in the engine's way.

Everything here is called from vLLM's hooks. Leases that nobody wants any longer when an answer comes late
are released then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.arena import ArenaMap
from kvtier.bridge import protocol
from kvtier.bridge.connection import GREETING_SECONDS, Bridge, Connection
from kvtier.bridge.notices import MAX_CHARACTERS
from kvtier.bridge.protocol import (
    Abandon,
    AskStaging,
    Cancel,
    Changed,
    Clear,
    Cleared,
    Commit,
    Confirm,
    Confirmed,
    EndHandOver,
    Found,
    FromCache,
    HandedOver,
    HandOver,
    Hello,
    LookUp,
    Notice,
    OfferStaging,
    OpenedStaging,
    Release,
    Reserve,
    Reserved,
    Status,
    StatusReport,
)
from kvtier.errors import ChannelClosed
from kvtier.keys import ChunkKey, join_keys
from kvtier.layout import ChunkLayout

logger = logging.getLogger("kvtier")
engine_logger = logging.getLogger("vllm.kvtier")
"""What the cache process has to report appears in the engine's log."""

RESERVE_SECONDS = 0.1
CONFIRM_SECONDS = 1.0


class Slot(NamedTuple):
    """Room for a chunk: the number of the reservation, and where its chunk object begins."""

    lease: int
    offset: int
    staging: int = 0
    """The number of the staging buffer that it is in, without a header; 0 for the arena."""


@dataclass
class Finding:
    """All that a look-up has been granted so far, in prefix order."""

    leases: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    fetching: int = 0
    staging: int = 0
    """The number of the staging buffer that has those whose source is the one after the last tier."""
    answered: bool = False

    @property
    def final(self) -> bool:
        """Whether nothing more will come."""
        return self.answered and not self.fetching


class SchedulerBridge(Bridge):
    """The scheduler's side: look up, reserve, release."""

    def __init__(self, hello: Hello, path: Path, start: Callable[[], None] | None = None) -> None:
        super().__init__(hello, path, start)
        self._findings: dict[int, Finding] = {}
        self._unwanted_reserves: set[int] = set()
        self._reserved: dict[int, Reserved] = {}
        self._cleared: dict[int, Cleared] = {}
        self._changes: list[Changed] = []
        self._handing: dict[int, HandedOver | None] = {}
        """What is known of each hand-over that has not ended."""
        self._in_use: set[int] = set()

    def _greeting(self) -> Hello:
        return Hello(
            self._hello.version,
            self._hello.engine,
            self._hello.role,
            self._hello.rank,
            self._hello.layout,
            self._hello.namespace,
            self._hello.changes,
            sorted(self._in_use),
            self._hello.model,
        )

    def _lost(self) -> None:
        self._findings.clear()
        self._reserved.clear()
        self._unwanted_reserves.clear()
        self._handing.clear()
        self._in_use.clear()

    def _receive(self, message: FromCache) -> None:
        match message:
            case Found():
                self._take_found(message)
            case Reserved():
                if message.ticket in self._unwanted_reserves:
                    self._unwanted_reserves.discard(message.ticket)
                    self.abandon([lease for lease in message.leases if lease])
                else:
                    self._reserved[message.ticket] = message
            case Cleared():
                self._cleared[message.ticket] = message
            case Changed():
                self._changes.append(message)
            case HandedOver():
                if message.ticket in self._handing:
                    self._handing[message.ticket] = message
            case Notice():
                engine_logger.warning("cache process: %s", message.text[:MAX_CHARACTERS])
            case _:
                logger.debug("an answer that nobody asked for: %s", type(message).__name__)

    @property
    def staging_source(self) -> int:
        """What :attr:`Finding.sources` says of chunks in a staging buffer; -1 where there are none."""
        tiers = () if self.welcome is None else self.welcome.tiers
        return len(tiers) - 1 if tiers and tiers[-1] == protocol.STAGING else -1

    def _take_found(self, found: Found) -> None:
        finding = self._findings.get(found.ticket)
        if finding is None:
            # Cancelled before it was answered; the cache process is told already.
            return
        finding.leases += found.leases
        finding.offsets += found.offsets
        finding.sources += found.sources
        finding.fetching = found.fetching
        finding.staging = found.staging
        finding.answered = True
        self._in_use.update(found.leases)

    def look_up(
        self,
        keys: Sequence[ChunkKey],
        tokens: int,
        *,
        expect_chunks: int = 0,
        expect_seconds: float = 0.0,
    ) -> int | None:
        """Ask which leading chunks are held; never waits. ``None`` where there is nobody to ask.

        The final answer may take ``expect_seconds`` longer: for so long those of the first ``expect_chunks``
        that a peer pushes here are waited for.
        """
        if not keys or not self._takes_questions():
            return None
        ticket = next(self._tickets)
        self._findings[ticket] = Finding()
        question = LookUp(ticket, join_keys(keys), tokens, expect_chunks, expect_seconds)
        return ticket if self._send(question) else None

    def _takes_questions(self) -> bool:
        return self.ready() and self._connection is not None and not self._connection.congested

    def found(self, ticket: int, wait: float = 0.0) -> Finding | None:
        """What is known of a look-up; ``None`` where its cache process is gone or it was cancelled.

        With ``wait``, seconds to wait for the first answer.
        """
        finding = self._findings.get(ticket)
        if finding is None:
            return None
        if not finding.final:
            self.poll()
            if wait > 0:
                self._await(lambda: self._answered(ticket) or None, wait)
        return self._findings.get(ticket)

    def _answered(self, ticket: int) -> bool:
        finding = self._findings.get(ticket)
        return finding is None or finding.answered

    def cancel(self, ticket: int) -> None:
        """Forget a look-up and give back all that it was granted."""
        finding = self._findings.pop(ticket, None)
        if finding is not None:
            self._in_use.difference_update(finding.leases)
            self._send(Cancel(ticket))

    def take(self, ticket: int) -> None:
        """The leases of a final look-up are the caller's from now on, to be released one by one."""
        self._findings.pop(ticket, None)

    def release(self, leases: Sequence[int]) -> None:
        """Give leases back."""
        if leases:
            self._in_use.difference_update(leases)
            self._send(Release(list(leases)))

    def reserve(
        self,
        parent: ChunkKey,
        keys: Sequence[ChunkKey],
        last_tokens: int,
        seconds: float = RESERVE_SECONDS,
        hand_over: int = 0,
    ) -> list[Slot | None]:
        """Room for consecutive chunks, in one round trip; ``None`` for what is held or does not fit.

        With the ticket of a hand-over, in the staging buffer, for those that it still awaits.
        Where no answer comes in time nothing is stored, and what is granted later is given back.
        """
        nothing: list[Slot | None] = [None] * len(keys)
        if not keys or not self._takes_questions():
            return nothing
        ticket = next(self._tickets)
        if not self._send(Reserve(ticket, parent, join_keys(keys), last_tokens, hand_over)):
            return nothing
        answer = self._await(lambda: self._reserved.pop(ticket, None), seconds)
        if answer is None:
            self._unwanted_reserves.add(ticket)
            return nothing
        granted = zip(answer.leases, answer.offsets, repeat(answer.staging), strict=False)
        return [slot if slot.lease else None for slot in map(Slot._make, granted)]

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled."""
        if leases:
            self._send(Abandon(list(leases)))

    def hand_over(self, to: str, root: ChunkKey, keys: Sequence[ChunkKey], tokens: int) -> int | None:
        """Have a prompt's chunks pushed to a peer as they are stored; ``None`` where nobody can.

        Never waits, and to be ended with :meth:`end_hand_over`.
        """
        if not keys or not self._takes_questions():
            return None
        ticket = next(self._tickets)
        self._handing[ticket] = None
        return ticket if self._send(HandOver(ticket, to, root, join_keys(keys), tokens)) else None

    def handed_over(self, ticket: int) -> HandedOver | None:
        """What the other side has said of a hand-over; ``None`` where nothing is known of it yet.

        Raises ``KeyError`` where it has ended, be it with its cache process.
        """
        self.poll()
        return self._handing[ticket]

    def end_hand_over(self, ticket: int, *, complete: bool) -> None:
        """No further chunk will be reserved; unless ``complete``, none is pushed any longer either."""
        if ticket in self._handing:
            del self._handing[ticket]
            self._send(EndHandOver(ticket, complete))

    def clear(self, seconds: float) -> int | None:
        """Remove every chunk of this engine's model; how many, or ``None`` where no answer came in time."""
        if not self.ready():
            return None
        ticket = next(self._tickets)
        if not self._send(Clear(ticket)):
            return None
        answer = self._await(lambda: self._cleared.pop(ticket, None), seconds)
        return None if answer is None else answer.chunks

    def changes(self) -> list[Changed]:
        """What came into the tiers and left them since the last call."""
        changes, self._changes = self._changes, []
        return changes


class WorkerBridge(Bridge):
    """A worker's side: the arena, a staging buffer, confirm and commit."""

    def __init__(self, hello: Hello, path: Path, start: Callable[[], None] | None = None) -> None:
        super().__init__(hello, path, start)
        self._confirmed: dict[int, Confirmed] = {}
        self.arena: ArenaMap | None = None
        """The memory of the cache process that is, or was last, connected."""
        self.staging: OfferStaging | None = None
        """What was said last of this worker's staging buffer, by the cache process that is connected."""
        self._gpu: str | None = None

    def ask_for_staging(self, gpu: str) -> None:
        """Want a staging buffer on a GPU, as in ``CUDA_VISIBLE_DEVICES``; empty for the host's memory.

        From every cache process that is connected from now on. The answer comes as :attr:`staging`.
        """
        self._gpu = gpu
        self._send(AskStaging(gpu))

    def await_staging(self, seconds: float) -> OfferStaging | None:
        """The answer; ``None`` where none comes in time."""
        return self._await(lambda: self.staging, seconds)

    def open_staging(self, number: int) -> None:
        """What was offered under this number is open."""
        self._send(OpenedStaging(number))

    def _connected(self, connection: Connection) -> None:
        if self._gpu is not None:
            connection.send(AskStaging(self._gpu))
        if self.arena is not None:
            self.arena.close()
        self.arena = connection.map_arena()

    def _lost(self) -> None:
        self._confirmed.clear()
        self.staging = None

    def _receive(self, message: FromCache) -> None:
        match message:
            case Confirmed():
                self._confirmed[message.ticket] = message
            case OfferStaging():
                self.staging = message
            case _:
                logger.debug("an answer that nobody asked for: %s", type(message).__name__)

    def commit(self, leases: Sequence[int]) -> bool:
        """These reservations have been filled; whether that could be told."""
        return not leases or self._send(Commit(list(leases)))

    def abandon(self, leases: Sequence[int]) -> None:
        """These reservations will not be filled."""
        if leases:
            self._send(Abandon(list(leases)))

    def confirm(self, leases: Sequence[int], seconds: float = CONFIRM_SECONDS) -> bool:
        """Whether these leases stood until now; ``False`` too where no answer came in time."""
        if not leases:
            return True
        ticket = next(self._tickets)
        if not self._send(Confirm(ticket, list(leases))):
            return False
        answer = self._await(lambda: self._confirmed.pop(ticket, None), seconds)
        return answer is not None and answer.held

    def close(self) -> None:
        """Leave, and let go of the arena."""
        super().close()
        if self.arena is not None:
            self.arena.close()


def status(path: Path, seconds: float = GREETING_SECONDS) -> dict[str, Any]:
    """What a cache process holds and has done. Raises :class:`ChannelError`."""
    connection = Connection(path, Hello(protocol.VERSION, "observer", "observer", 0, ChunkLayout(1, ()), b""))
    try:
        connection.send(Status(1))
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for message in connection.receive(left):
                if isinstance(message, StatusReport):
                    report: dict[str, Any] = json.loads(message.report)
                    return report
        raise ChannelClosed(f"the cache process on {path} does not answer")
    finally:
        connection.close()
