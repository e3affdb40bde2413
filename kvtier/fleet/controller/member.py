"""One connected instance: what it has reported, and the commands that it executes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import anyio
import msgspec

from kvtier.errors import ChannelError, ProtocolError
from kvtier.fleet.controller.errors import CommandFailed, MemberGone
from kvtier.fleet.controller.events import Position
from kvtier.fleet.controller.settings import WINDOW_SECONDS
from kvtier.fleet.member.protocol import (
    Cancel,
    Changing,
    Command,
    Counters,
    Delete,
    Done,
    Failed,
    Fetch,
    Heartbeat,
    Hello,
    Model,
    Outcome,
    Pin,
    Progress,
    TierDescription,
    Tokenize,
    Unpin,
)
from kvtier.memory.keys import split_keys
from kvtier.observability.traces.spans import current
from kvtier.observability.whatif.report import Report as WhatIfReport
from kvtier.rpc.calls import Call
from kvtier.rpc.endpoint import Endpoint

STEP_SECONDS = 1.0
"""Heartbeats that follow each other more closely replace the one before."""


MAX_COMMANDS = 1024
"""Maximum number of unanswered commands of one instance, including cancelled ones."""
MAX_REASON_CHARACTERS = 1000
CHECK_SECONDS = 0.05
"""Interval at which :meth:`Member.responds` checks for messages other than a pong."""
PEERS = "peers"
"""The type of the pseudo tier that stands for all peers of an instance."""
OnProgress: TypeAlias = Callable[[Progress], None]
NO_COUNTERS = Counters([], [], [], [], [], [])
"""Those of a version that reports none."""


class Faults(NamedTuple):
    """What went wrong."""

    outages: int = 0
    corrupt: int = 0
    failed: int = 0
    """Chunks whose transfer failed."""

    @classmethod
    def of(cls, counters: Counters) -> Faults:
        """Return the sums over all tiers and routes."""
        failed = sum(route.failed for route in counters.routes)
        return cls(sum(counters.outages), sum(counters.corrupt), failed)


class Hits(NamedTuple):
    """What was looked up and hit in the window, in tokens, and the faults in it."""

    looked_up: int = 0
    by_tier: Sequence[int] = ()
    faults: Faults = Faults()

    @property
    def rate(self) -> float | None:
        """The hit rate; ``None`` without a lookup."""
        return self.share(sum(self.by_tier))

    def share(self, tokens: int) -> float | None:
        """Return which part of the tokens looked up these are."""
        return min(1.0, tokens / self.looked_up) if self.looked_up else None


class HitWindow:
    """The counters of one connection in the last five minutes. Times are those of ``time.monotonic()``.

    They start at zero with the instance's process, so only differences count: the hit rate of an instance
    that has restarted is that since then.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, Hits]] = deque()
        """The latest counters, after those of the beginning of the window."""

    def __len__(self) -> int:
        """Return how many heartbeats it keeps."""
        return len(self._reports)

    def add(self, heartbeat: Heartbeat, now: float) -> None:
        """Add the counters of a heartbeat."""
        hits = [tier.hit_tokens for tier in heartbeat.tiers]
        counters = Hits(heartbeat.looked_up_tokens, hits, Faults.of(heartbeat.counters or NO_COUNTERS))
        if len(self._reports) > 1 and now - self._reports[-2][0] < STEP_SECONDS:
            self._reports.pop()
        self._reports.append((now, counters))
        while len(self._reports) > 1 and self._reports[1][0] <= now - WINDOW_SECONDS:
            self._reports.popleft()

    def hits(self) -> Hits:
        """Return the hits between the first and the last heartbeat of the window."""
        if not self._reports:
            return Hits()
        (_, first), (_, last) = self._reports[0], self._reports[-1]
        by_tier = [max(0, after - before) for before, after in zip(first.by_tier, last.by_tier, strict=True)]
        faults = Faults(
            *(max(0, after - before) for before, after in zip(first.faults, last.faults, strict=True))
        )
        return Hits(max(0, last.looked_up - first.looked_up), by_tier, faults)


class Member:
    """A connected instance, until its connection ends. Created by the registry."""

    def __init__(
        self, hello: Hello, places: Sequence[int], endpoint: Endpoint, term: Callable[[], int] = lambda: 0
    ) -> None:
        """``term`` returns that of the controller's lease."""
        self.id = hello.instance
        self.hello = hello
        self.places = places
        """By tier number."""
        self.endpoint = endpoint
        self._term = term
        self.models: Sequence[Model] = ()
        self.heartbeat: Heartbeat | None = None
        """The last one."""
        self.hit_window = HitWindow()
        self.what_if: WhatIfReport | None = None
        """What other settings would bring, as it has reported last; ``None`` before that."""
        self.what_if_at: float | None = None
        """When it was reported, on the clock of :func:`time.time`."""
        self.registered_at = time.time()
        self.up_to_date = False
        """Whether it has reported all its chunks."""

    @property
    def explains(self) -> bool:
        """Whether its version knows :class:`Explain` and chat messages. It has counters since then."""
        return self.heartbeat is not None and self.heartbeat.counters is not None

    @property
    def counters(self) -> Counters:
        """The last ones."""
        return NO_COUNTERS if self.heartbeat is None else self.heartbeat.counters or NO_COUNTERS

    @property
    def last_message_at(self) -> float:
        """When the last message arrived, on the clock of :func:`time.time`."""
        return time.time() - time.monotonic() + self.endpoint.last_message_at

    @property
    def closed_reason(self) -> str | None:
        """Why its connection has ended; ``None`` while it is open."""
        return None if self.endpoint.error is None else str(self.endpoint.error)

    async def execute(self, command: Callable[[int], Command], on_progress: OnProgress | None = None) -> Done:
        """Send a command, made from its ticket, and wait until it is completed, without a timeout.

        The command is cancelled with its caller; how much of it was done is not known then.

        Raises: MemberGone: the connection has ended. CommandFailed: the command was not executed.
        """
        call = self._call(command, on_progress)
        try:
            return await call.reply()
        except ChannelError as error:
            raise self._gone(error) from error
        finally:
            if not call.settled:
                with suppress(ChannelError):
                    self.endpoint.send(Cancel(call.ticket))

    async def responds(self, seconds: float) -> bool:
        """Ping the instance, and return whether any message arrives within ``seconds``."""
        pinged_at = time.monotonic()
        with suppress(ChannelError), anyio.move_on_after(seconds):
            ping = self.endpoint.ping()
            while not await ping.wait(CHECK_SECONDS) and self.endpoint.last_message_at <= pinged_at:
                pass
        return self.endpoint.last_message_at > pinged_at and not self.endpoint.closed

    def _call(self, build: Callable[[int], Command], on_progress: OnProgress | None) -> Call[Done]:
        if len(self.endpoint.calls) >= MAX_COMMANDS:
            raise CommandFailed(f"instance {self.id!r} is busy with {MAX_COMMANDS} commands already")
        command = msgspec.structs.replace(build(0), trace=current.get())
        if isinstance(command, Changing):
            command = msgspec.structs.replace(command, term=self._term())

        def settle(answer: Outcome) -> Done:
            if isinstance(answer, Failed):
                raise CommandFailed(f"{self.id}: {answer.reason[:MAX_REASON_CHARACTERS]}")
            assert isinstance(answer, Done)
            _check(answer, command)
            reason = None if answer.reason is None else answer.reason[:MAX_REASON_CHARACTERS]
            return msgspec.structs.replace(answer, reason=reason)

        try:
            return self.endpoint.call(
                lambda ticket: msgspec.structs.replace(command, ticket=ticket),
                Outcome,
                settle,
                on_interim=on_progress,
            )
        except ProtocolError as error:
            raise CommandFailed(f"{error}: request fewer chunks at once") from error
        except ChannelError as error:
            raise self._gone(error) from error

    def _gone(self, error: ChannelError) -> MemberGone:
        return MemberGone(f"instance {self.id!r} has disconnected: {self.endpoint.error or error}")


class TierRef(NamedTuple):
    """One tier of a connected instance."""

    member: Member
    tier: int

    @property
    def number(self) -> int:
        """Its number in :class:`~kvtier.fleet.controller.holders.Holders`."""
        return self.member.places[self.tier]

    @property
    def _description(self) -> TierDescription:
        return self.member.hello.tiers[self.tier]

    @property
    def position(self) -> Position:
        """Instance id and tier name."""
        return self.member.id, self._description.name

    @property
    def shared(self) -> bool:
        """Whether the tier is a pool that other instances write to as well."""
        return self._description.shared

    @property
    def is_peers(self) -> bool:
        """Whether the tier stands for the instance's peers, which have places of their own."""
        return self._description.type == PEERS


def _check(done: Done, command: Command) -> None:
    """Check an answer against its command. Raises :class:`ProtocolError`.

    What the answer confirms may be deleted elsewhere, so it must be part of the command.
    """
    keys = split_keys(done.keys)
    commanded = split_keys(command.keys) if isinstance(command, Fetch | Delete | Pin | Unpin) else ()
    if not set(commanded).issuperset(keys):
        raise ProtocolError("Done names chunks that the command did not")
    if done.tokens and not isinstance(command, Tokenize):
        raise ProtocolError("Done has tokens, but the command was not to tokenize")
