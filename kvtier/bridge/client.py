"""The scheduler's and the workers' ends of the bridge: synchronous, without threads.

Everything here is called from vLLM's hooks. Nothing blocks but what takes a ``wait``, and :func:`status`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import Logger
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.arena import ArenaMap
from kvtier.bridge import protocol
from kvtier.bridge.bridge import Bridge, Question
from kvtier.bridge.connection import GREETING_SECONDS, Connection
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
    Run,
    Status,
    StatusReport,
)
from kvtier.errors import ChannelClosed, ProtocolError
from kvtier.keys import KEY_BYTES, ChunkKey, join_keys
from kvtier.layout import ChunkLayout
from kvtier.threads import run_in_background

PROBE_SECONDS = 0.25
MAX_ORPHANS = 100_000
"""Limit of the reservations that are remembered until they can be abandoned."""


class Slot(NamedTuple):
    """Room for a chunk: the number of the reservation, and where its chunk object begins."""

    lease: int
    offset: int
    staging: int = 0
    """The number of the staging buffer that it is in, without a header; 0 for the arena."""


Slots = Sequence[Slot | None]
"""For each chunk of a run its room, or ``None``."""


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
    heard_at: float = 0.0
    """When the last answer came, as :func:`time.monotonic` counts; each batch that arrives brings one."""

    @property
    def final(self) -> bool:
        """Whether nothing more will come."""
        return self.answered and not self.fetching


class SchedulerBridge(Bridge):
    """The scheduler's side: look up, reserve, release."""

    def __init__(
        self,
        hello: Hello,
        path: Path,
        start: Callable[[], None] | None = None,
        logger: Logger | None = None,
    ) -> None:
        super().__init__(hello, path, start, logger)
        self._findings: dict[int, Finding] = {}
        self._reserving: dict[int, Sequence[Run]] = {}
        """The runs of each open reservation."""
        self._changes: list[Changed] = []
        self._handing: dict[int, HandedOver | None] = {}
        """What is known of each hand-over that has not ended."""
        self._in_use: set[int] = set()

    def _make_hello(self) -> Hello:
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
        self._reserving.clear()
        self._handing.clear()
        self._in_use.clear()

    def _receive(self, message: FromCache) -> None:
        match message:
            case Found():
                self._take_found(message)
            case Reserved():
                self._answer(message.ticket, self._slots(message))
            case Cleared():
                self._answer(message.ticket, message.chunks)
            case Changed():
                self._changes.append(message)
            case HandedOver():
                if message.ticket in self._handing:
                    self._handing[message.ticket] = message
            case Notice():
                self._logger.warning("cache process: %s", message.text[:MAX_CHARACTERS])
            case _:
                self._logger.debug("unexpected message: %s", type(message).__name__)

    @property
    def staging_source(self) -> int:
        """What :attr:`Finding.sources` says of chunks in a staging buffer; -1 where there are none."""
        tiers = () if self.welcome is None else self.welcome.tiers
        return len(tiers) - 1 if tiers and tiers[-1] == protocol.STAGING else -1

    def _take_found(self, found: Found) -> None:
        self._answer(found.ticket, found)
        finding = self._findings.get(found.ticket)
        if finding is None:
            return  # Cancelled: the cache process takes back all that it has granted.
        finding.leases += found.leases
        finding.offsets += found.offsets
        finding.sources += found.sources
        finding.fetching = found.fetching
        finding.staging = found.staging
        finding.answered = True
        finding.heard_at = time.monotonic()
        self._in_use.update(found.leases)

    def look_up(
        self,
        keys: Sequence[ChunkKey],
        tokens: int,
        *,
        expect_chunks: int = 0,
        expect_seconds: float = 0.0,
    ) -> int | None:
        """Ask which leading chunks are held. ``None`` where no cache process answers; or it is unresponsive.

        The final answer may take ``expect_seconds`` longer: for so long those of the first ``expect_chunks``
        that a peer pushes here are waited for.
        """
        if not keys or not self.takes_questions:
            return None
        ticket = next(self._tickets)
        self._findings[ticket] = Finding()
        question = LookUp(ticket, join_keys(keys), tokens, expect_chunks, expect_seconds)
        return ticket if self._ask(ticket, "lookups", question) else None

    def found(self, ticket: int, wait: float = 0.0) -> Finding | None:
        """What is known of a look-up; ``None`` where its cache process is gone or it was cancelled.

        With ``wait``, seconds to wait for the first answer.
        """
        finding = self._findings.get(ticket)
        if finding is not None and not finding.final:
            question = self._questions.get(ticket)
            if wait > 0 and question is not None:
                self.await_answer(question, wait)
            else:
                self.glance()
        return self._findings.get(ticket)

    def cancel(self, ticket: int) -> None:
        """Forget a look-up and give back all that it was granted."""
        finding = self._findings.pop(ticket, None)
        if finding is not None and (finding.leases or not finding.final):
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

    @property
    def reserves(self) -> bool:
        """Whether :meth:`reserve` is of use now: no answer is outstanding."""
        return self.takes_questions and not self.late and not self._reserving

    def reserve(self, runs: Sequence[Run]) -> Question[list[Slots]] | None:
        """Ask for room for the chunks of ``runs``, in one message. ``None`` where that is of no use now.

        The answer has the slots of each run. What is granted belongs to the caller, however late it comes:
        see :meth:`abandon`. A question is ``lost`` with its connection.
        """
        if not self.reserves:
            return None
        ticket = next(self._tickets)
        self._reserving[ticket] = runs
        return self._ask(ticket, "reservations", Reserve(ticket, list(runs)))

    def _slots(self, reserved: Reserved) -> list[Slots]:
        runs = self._reserving.pop(reserved.ticket, ())
        counts = [len(run.keys) // KEY_BYTES for run in runs]
        if not sum(counts) == len(reserved.leases) == len(reserved.offsets):
            raise ProtocolError(f"{len(reserved.leases)} reservations are not the {sum(counts)} asked for")
        answers = iter(zip(reserved.leases, reserved.offsets, strict=True))
        found: list[Slots] = []
        for run, count in zip(runs, counts, strict=True):
            staging = reserved.staging if run.hand_over else 0
            pairs = islice(answers, count)
            found.append([Slot(lease, offset, staging) if lease else None for lease, offset in pairs])
        return found

    def expect_answers_within(self, seconds: float) -> None:
        """Ask nothing of a cache process that is silent for longer than that. 1 s by default."""
        self._health.limit = seconds

    def probe(self) -> None:
        """Ask a cache process that is silent while it fetches for a sign of life."""
        quiet = not self._questions and self._health.quiet_seconds >= PROBE_SECONDS
        if quiet and any(finding.fetching for finding in self._findings.values()):
            self.reserve([])

    def abandon(self, leases: Sequence[int]) -> None:
        """Give up reservations."""
        if leases:
            self._send(Abandon(list(leases)))

    def hand_over(self, to: str, root: ChunkKey, keys: Sequence[ChunkKey], tokens: int) -> int | None:
        """Have a prompt's chunks pushed to a peer as they are stored; ``None`` where nobody can.

        Never waits, and to be ended with :meth:`end_hand_over`.
        """
        if not keys or not self.takes_questions:
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

    def clear(self, wait: float) -> int | None:
        """Remove every chunk of this engine's model; how many, or ``None`` where no answer came in time.

        Blocks up to ``wait`` seconds, and not at all where the cache process is unresponsive.
        """
        self.update()
        if not self.takes_questions:
            return None
        ticket = next(self._tickets)
        question: Question[int] | None = self._ask(ticket, "clears", Clear(ticket))
        if question is None:
            return None
        self._wait(lambda: question.answer is not None or question.lost, wait)
        return question.answer

    def changes(self) -> list[Changed]:
        """What came into the tiers and left them since the last call."""
        changes, self._changes = self._changes, []
        return changes


class WorkerBridge(Bridge):
    """A worker's side: the arena, a staging buffer, confirm and commit."""

    def __init__(
        self,
        hello: Hello,
        path: Path,
        start: Callable[[], None] | None = None,
        logger: Logger | None = None,
    ) -> None:
        super().__init__(hello, path, start, logger)
        self._orphans: list[tuple[int, int]] = []
        """The epochs and numbers of reservations that are to be abandoned where this epoch is connected."""
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
        """Block until there is an answer, up to ``seconds``; ``None`` where none comes. Not for hooks."""
        self._wait(lambda: self.staging is not None, seconds)
        return self.staging

    def open_staging(self, number: int) -> None:
        """What was offered under this number is open."""
        self._send(OpenedStaging(number))

    def _connected(self, connection: Connection) -> None:
        if self._gpu is not None:
            connection.send(AskStaging(self._gpu))
        # Mapped before the old one is unmapped: that holds the lock which mapping waits for.
        old, self.arena = self.arena, connection.map_arena()
        if old is not None:
            _close_in_background(old)
        orphans, self._orphans = self._orphans, []
        self.abandon([lease for epoch, lease in orphans if epoch == self.epoch])

    def _lost(self) -> None:
        self.staging = None

    def _receive(self, message: FromCache) -> None:
        match message:
            case Confirmed():
                self._answer(message.ticket, message.held)
            case OfferStaging():
                self.staging = message
            case _:
                self._logger.debug("unexpected message: %s", type(message).__name__)

    def commit(self, leases: Sequence[int]) -> bool:
        """These reservations have been filled; whether that could be told."""
        return not leases or self._send(Commit(list(leases)))

    def abandon(self, leases: Sequence[int], epoch: int = 0) -> None:
        """Give up reservations, those of another cache process as soon as that is connected.

        ``epoch``: the process that has granted them; 0 for the one that is connected.
        """
        if epoch in (0, self.epoch):
            if leases:
                self._send(Abandon(list(leases)))
        elif len(self._orphans) + len(leases) <= MAX_ORPHANS:
            self._orphans += [(epoch, lease) for lease in leases]

    def confirm(self, leases: Sequence[int]) -> Question[bool] | None:
        """Ask whether these leases have held until now. ``None`` where there is no cache process to ask."""
        if self._connection is None:
            return None
        ticket = next(self._tickets)
        return self._ask(ticket, "confirmations", Confirm(ticket, list(leases)))

    def close(self) -> None:
        """Leave, and let go of the arena."""
        super().close()
        if self.arena is not None:
            self.arena.close()


def _close_in_background(arena: ArenaMap) -> None:
    """Unmap an arena. The last mapping frees its memory, which may take 1 s per GiB."""
    try:
        run_in_background(arena.close)
    except RuntimeError:  # The system gives no thread.
        arena.close()


def status(path: Path, seconds: float = GREETING_SECONDS) -> dict[str, Any]:
    """What a cache process holds and has done. Blocks up to ``seconds``. Raises :class:`ChannelError`."""
    connection = Connection(path, Hello(protocol.VERSION, "observer", "observer", 0, ChunkLayout(1, ()), b""))
    try:
        deadline = time.monotonic() + seconds
        connection.send(Status(1))
        messages = connection.await_welcome(seconds)
        while True:
            for message in messages:
                if isinstance(message, StatusReport):
                    report: dict[str, Any] = json.loads(message.report)
                    return report
            if (left := deadline - time.monotonic()) <= 0:
                raise ChannelClosed(f"the cache process on {path} does not answer")
            messages = connection.receive(left)
    finally:
        connection.close()
