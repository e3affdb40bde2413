"""The timeline of a run: faults and requests, determined by the seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

HOSTS = 2
"""Number of instances, each with an engine, a cache process and a disk."""
USERS = 3
"""Number of simulated users per engine. Each waits for an answer before sending the next turn."""
FIRST_FAULT_SECONDS = 3.0
FAULT_INTERVAL_SECONDS = 2.5
"""Mean time between faults."""
CALM_SHARE = 0.2
MAX_CALM_SECONDS = 20.0
"""The last part of a phase, up to this long, has requests but no faults."""
GAP_SECONDS = 1.0
"""Minimum time between two faults of the same target."""

SYSTEM_PROMPTS = 6
ADAPTED_SHARE = 4
"""One conversation in this many uses the adapter."""
FAILED_LOADS = 4
"""The other connector beside kvtier's fails to load one prompt in this many; see :func:`fails_to_load`."""
HINTED_SHARE = 0.1
"""Share of requests that name an address to transfer KV to, which the cache process must not connect to."""
PROBE_TOKENS = 600
PROBES = 2
"""Number of probe prompts per host before the faults, and of others after them."""
TEXT_BYTES = 460_000
"""Size of the text for prompts; a token is a byte."""


def fails_to_load(prompt_tokens: int) -> bool:
    """Return whether :mod:`soak.failing` promises a prompt of this length, and fails to load it."""
    return prompt_tokens % FAILED_LOADS == 0


class Kind(NamedTuple):
    """One kind of fault."""

    target: str
    """``cache`` stands for ``cache-0`` and ``cache-1``."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """Range of the duration."""
    amount: tuple[int, int] = (0, 0)
    """Range of the amount: files, processes, MiB or seconds, depending on the kind."""
    transport: str | None = None
    """The only transport with such a target; ``None`` for all."""
    every: int = 1
    """It is in one pack of this many."""


KINDS: dict[str, Kind] = {
    "kill-cache": Kind("cache", (0.2, 3.0)),
    "stop-cache": Kind("cache", (0.5, 6.0)),
    "kill-engine": Kind("engine", (0.1, 1.0)),
    "stop-engine": Kind("engine", (0.5, 3.0)),
    "stop-engine-long": Kind("engine", (62.0, 75.0), (0, 1), every=4),
    "cut-scheduler": Kind("engine", (0.2, 2.0)),
    "cut-worker": Kind("engine", (0.2, 2.0)),
    "replace-adapter": Kind("engine", amount=(0, 1)),
    "kill-redis": Kind("redis", (0.2, 3.0)),
    "stop-redis": Kind("redis", (0.5, 6.0)),
    "flush-redis": Kind("redis"),
    "kill-controller": Kind("controller", (0.2, 3.0)),
    "stop-controller": Kind("controller", (0.5, 12.0)),
    "kill-nixl": Kind("nixl", amount=(1, 2), transport="nixl"),
    "stop-nixl": Kind("nixl", (0.5, 6.0), (1, 2), transport="nixl"),
    "flip-bits": Kind("disk", amount=(1, 8)),
    "truncate-files": Kind("disk", amount=(1, 8)),
    "garble-files": Kind("disk", amount=(1, 8)),
    "remove-files": Kind("disk", amount=(1, 8)),
    "plant-files": Kind("disk", (1.0, 8.0), (1, 8)),
    "hide-folders": Kind("disk", (1.0, 8.0), (1, 8)),
    "remove-folder": Kind("disk"),
    "fill-disk": Kind("disk", (2.0, 8.0)),
    "cut-link": Kind("link", (0.5, 4.0)),
    "hold-link": Kind("link", (0.2, 3.0)),
    "saturate-cpus": Kind("host", (2.0, 10.0), (2, 8)),
    "fill-memory": Kind("memory", (2.0, 6.0), (512, 2048)),
    "jump-clock": Kind("clock", (2.0, 8.0), (-40_000_000, 40_000_000)),
    "move-chunks": Kind("controller", amount=(0, 1 << 20)),
    "operate-chunks": Kind("controller"),
}
"""``replace-adapter`` with amount 1 restarts the engine.
``stop-engine-long``: while it holds leases, with amount 1 reservations, which are reclaimed after a minute.
``move-chunks`` and ``operate-chunks`` are no faults but commands to the controller: :mod:`soak.commands`."""
SINGLE = ("redis", "controller", "host", "memory")
"""Targets that exist once."""


class Fault(NamedTuple):
    """One fault."""

    at: float
    """Seconds since the start of the phase."""
    kind: str
    target: str
    seconds: float
    amount: int

    def __str__(self) -> str:
        amount = f" {self.amount}" if self.amount else ""
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.target}{amount}{lasting}"


class Piece(NamedTuple):
    """A range of the text."""

    start: int
    length: int


class Exchange(NamedTuple):
    """A user's addition to a conversation, and the number of tokens of the answer."""

    text: Piece
    new_tokens: int


class Conversation(NamedTuple):
    """A system prompt and the exchanges that follow."""

    system: Piece
    exchanges: tuple[Exchange, ...]
    adapted: bool = False
    """Whether its requests use the adapter."""


class Turn(NamedTuple):
    """One request: a conversation up to one of its exchanges."""

    at: float
    """Earliest time to send it. Later if the answer to the user's previous request was late."""
    host: int
    user: int
    conversation: int
    exchange: int
    abort_after: float | None
    """Seconds after which the request is aborted and sent again; ``None`` for most."""
    hinted: bool = False
    """Whether it names an address to transfer KV to that neither the settings nor the controller name."""


@dataclass(frozen=True)
class Phase:
    """A part of the run with its own processes, over one transport."""

    transport: str
    seconds: float
    faults: tuple[Fault, ...]
    turns: tuple[Turn, ...]
    """In order of time."""
    probes: tuple[tuple[int, ...], tuple[int, ...]]
    """Conversations that no user has, to send before and after the faults."""


@dataclass(frozen=True)
class Schedule:
    """The timeline of a run."""

    seed: int
    conversations: tuple[Conversation, ...]
    phases: tuple[Phase, ...] = field(default=())


def make(seed: int, seconds: float, transports: Sequence[str]) -> Schedule:
    """Return the schedule of a run of ``seconds``, divided equally among ``transports``."""
    generator = random.Random(f"conversations {seed}")  # noqa: S311 - not for secrets
    # Few enough that they recur, and too many for memory, regardless of the duration.
    count = min(max(24, round(seconds / 30)), 240)
    systems = [_piece(generator, 200, 640) for _ in range(SYSTEM_PROMPTS)]
    conversations = tuple(
        _conversation(generator, systems)._replace(adapted=number % ADAPTED_SHARE == 0)
        for number in range(count)
    )
    share = seconds / len(transports)
    phases = []
    for transport in transports:
        numbers = [*range(count, count + 2 * PROBES * HOSTS)]
        count = numbers[-1] + 1
        probes = (tuple(numbers[: PROBES * HOSTS]), tuple(numbers[PROBES * HOSTS :]))
        phases.append(_phase(seed, transport, share, conversations, probes))
    pieces = [_piece(generator, PROBE_TOKENS, PROBE_TOKENS) for _ in range(count - len(conversations))]
    probed = tuple(Conversation(Piece(0, 0), (Exchange(piece, 8),)) for piece in pieces)
    return Schedule(seed, conversations + probed, tuple(phases))


def last_fault_seconds(seconds: float) -> float:
    """Return when the faults of a phase of ``seconds`` end."""
    return seconds - min(MAX_CALM_SECONDS, CALM_SHARE * seconds)


def _piece(generator: random.Random, minimum: int, maximum: int) -> Piece:
    length = generator.randint(minimum, maximum)
    return Piece(generator.randrange(TEXT_BYTES - length), length)


def _conversation(generator: random.Random, systems: Sequence[Piece]) -> Conversation:
    exchanges = [
        Exchange(_piece(generator, 24, 220), generator.randint(6, 20)) for _ in range(generator.randint(2, 5))
    ]
    return Conversation(generator.choice(systems), tuple(exchanges))


def _phase(
    seed: int,
    transport: str,
    seconds: float,
    conversations: Sequence[Conversation],
    probes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Phase:
    drawn = _faults(random.Random(f"faults {transport} {seed}"), transport, seconds)  # noqa: S311
    # One that waits for its target must not delay those of others.
    faults = tuple(sorted(drawn, key=lambda fault: fault.at))
    turns = [
        turn
        for user in range(HOSTS * USERS)
        for turn in _turns(
            random.Random(f"user {user} {transport} {seed}"),  # noqa: S311
            user,
            seconds,
            conversations,
        )
    ]
    return Phase(transport, seconds, faults, tuple(sorted(turns, key=lambda turn: turn.at)), probes)


def _turns(
    generator: random.Random, user: int, seconds: float, conversations: Sequence[Conversation]
) -> Iterator[Turn]:
    at = generator.uniform(0.0, 1.0)
    while True:
        number = generator.randrange(len(conversations))
        for exchange in range(len(conversations[number].exchanges)):
            if at >= seconds:
                return
            abort = generator.uniform(0.0, 0.3) if generator.random() < 0.08 else None
            hinted = generator.random() < HINTED_SHARE
            yield Turn(at, user % HOSTS, user // HOSTS, number, exchange, abort, hinted)
            at += 0.2 + generator.expovariate(1.5)


def _faults(generator: random.Random, transport: str, seconds: float) -> Iterator[Fault]:
    """Draw the kinds like cards from a pack, so that all are equally frequent."""
    pack: list[str] = []
    packs = itertools.count()
    free_at: dict[str, float] = {}
    at = FIRST_FAULT_SECONDS
    end = last_fault_seconds(seconds)
    while at < end:
        if not pack:
            number = next(packs)
            pack = [
                name
                for name, kind in KINDS.items()
                if kind.transport in (None, transport) and number % kind.every == 0
            ]
            generator.shuffle(pack)
        name = pack.pop()
        kind = KINDS[name]
        lasting = generator.uniform(*kind.seconds)
        amount = generator.randint(*kind.amount)
        target = kind.target if kind.target in SINGLE else f"{kind.target}-{generator.randrange(HOSTS)}"
        start = max(at, free_at.get(target, 0.0))
        if start + lasting < end:
            free_at[target] = start + lasting + GAP_SECONDS
            yield Fault(round(start, 3), name, target, round(lasting, 3), amount)
        at += generator.expovariate(1 / FAULT_INTERVAL_SECONDS)
