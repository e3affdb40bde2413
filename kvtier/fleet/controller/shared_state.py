"""The state of several controllers, in Redis or Valkey: which of them leads, and what it writes.

The leader holds a *lease*: a key that expires, and that it renews with each write. Each lease has a *term*, a
number that grows. A script writes only for the one who holds the lease, so a leader that was paused, or cut
off, changes nothing any more; instances refuse its commands by their term.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, get_args

import anyio
import msgspec
from anyio import CancelScope
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError

from kvtier.concurrency.tasks import Changes, open_background_tasks, open_tasks
from kvtier.errors import ControllerError
from kvtier.fleet.controller.history import Kind
from kvtier.fleet.controller.state import EVENTS, OPERATIONS, PINS, Row, State, Table, Value
from kvtier.logs import ChangedWarnings

logger = logging.getLogger("kvtier.controller")

LEASE_SECONDS = 2.0
"""How long a leader that was killed keeps others from leading."""
TURN_SECONDS = 0.5
"""Interval of renewals, and of attempts to lead."""
UNREADY_SECONDS = 2.0
"""How long a controller that does not know all instances yet leaves the lease to others."""
CALL_SECONDS = 1.0
SAVE_SECONDS = 2.0
"""How long a request waits until its operation is stored, before it is refused."""
BATCH_BYTES = 1 << 20
"""Written in one call. Others of the server wait for it."""
MAX_UNSAVED_BYTES = 256 << 20
"""Beyond it a leader gives up its lease, to load what is stored."""
PREFIX = "{kvtier:controller}:"
"""In braces, so that all keys are in one slot of a cluster's."""
LEASE = PREFIX + "lease"

# Return whether the lease is mine now, its term, and the address of the one who leads. It is taken with an
# address only.
_ACQUIRE = """
local held = redis.call('HMGET', KEYS[1], 'term', 'url')
if held[1] then return {0, held[1], held[2]} end
if ARGV[1] == '' then return {0, '0', ''} end
local now = redis.call('TIME')
local term = string.format('%.0f', now[1] * 1000000 + now[2])
redis.call('HSET', KEYS[1], 'term', term, 'url', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {1, term, ARGV[1]}
"""
# Renew the lease of a term, and write, if it still is the leader's. Commands are numbered: a call that was
# given up, and has been repeated, may arrive after later ones, and must not undo them.
_WRITE = """
if redis.call('HGET', KEYS[1], 'term') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local number, stored = tonumber(ARGV[3]), tonumber(redis.call('HGET', KEYS[1], 'stored') or 0)
local at = 4
while at < #ARGV do
  local arguments = tonumber(ARGV[at])
  number = number + 1
  if number > stored then redis.call(unpack(ARGV, at + 1, at + arguments)) end
  at = at + arguments + 1
end
if number > stored then redis.call('HSET', KEYS[1], 'stored', number) end
return 1
"""
_RELEASE = "if redis.call('HGET', KEYS[1], 'term') == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Lease(NamedTuple):
    """Who leads."""

    term: int
    url: str
    mine: bool


class SharedState(State):
    """A connection to the server. Only while it leads does this controller have rows, and write."""

    def __init__(self, server: Redis, name: str) -> None:
        self._server = server
        self.name = name
        self.lease: Lease | None = None
        """Of the one who leads, as far as is known; ``None`` if none does, or the server does not answer."""
        self.has_asked = False
        """Whether it has asked the server for the lease, so that ``lease`` says more than that it is new."""
        self.changes = Changes()
        """Of the lease."""
        self._leads = False
        self._writes = False
        """Whether it leads, or stores the last that it has written as a leader."""
        self._until = 0.0
        self._scope = CancelScope()
        self._rows: dict[str, list[Row]] = {}
        self._unsaved: deque[tuple[bytes | str | int, ...]] = deque()
        self._unsaved_bytes = 0
        self._stored = 0
        """How many commands the server has executed for this leader."""
        self._to_write, self._written = anyio.Event(), Changes()
        self._warnings = ChangedWarnings("%s: %s")

    @classmethod
    @asynccontextmanager
    async def open(cls, address: str, password: str | None) -> AsyncIterator[SharedState]:
        """Connect to the server at ``address`` within the block.

        Raises: ControllerError: it cannot be used. A server that does not answer yet is waited for.
        """
        scheme, _, rest = address.partition("://")
        server = Redis.from_url(
            f"{scheme.replace('valkey', 'redis')}://{rest}",
            password=password,
            socket_timeout=CALL_SECONDS,
            socket_connect_timeout=CALL_SECONDS,
        )
        try:
            state = cls(server, address)
            await state._check()
            yield state
        finally:
            with CancelScope(shield=True), anyio.move_on_after(CALL_SECONDS):
                await server.aclose()

    async def _check(self) -> None:
        try:
            policy = await self._server.config_get("maxmemory-policy")
        except AuthenticationError as error:
            raise ControllerError(
                f"{self.name} refuses the password: set --state-password-file to a file that contains it"
            ) from error
        except RedisError as error:  # Also where this command is not allowed.
            logger.debug("%s: its settings are not known: %s", self.name, error)
            return
        if str(policy.get("maxmemory-policy", "noeviction")).startswith("allkeys"):
            logger.warning(
                "%s evicts any key when its memory is full, also operations and pins: set its "
                "maxmemory-policy to noeviction, or use another server for --state than for a pool",
                self.name,
            )

    # Who leads.

    async def acquire(self, url: str, is_ready: Callable[[], bool] = lambda: True) -> int:
        """Wait until this controller, which others reach at ``url``, leads. Return its term.

        One that is not ready leads only if no other one does for some time. Must be followed by
        :meth:`leading`.
        """
        free_since = time.monotonic()
        while True:
            began = time.monotonic()
            candidate = url if is_ready() or began > free_since + UNREADY_SECONDS else ""
            answer = await self._call(_ACQUIRE, candidate, round(1000 * LEASE_SECONDS))
            self.has_asked = True
            mine, term, leader = answer or (0, 0, b"")
            # Also until the lease expires of one at the same address that was killed: nobody answers for it.
            is_led = leader and (mine or leader.decode() != url)
            self._set_lease(Lease(int(term), leader.decode(), bool(mine)) if is_led else None)
            if mine:
                self._until = began + LEASE_SECONDS
                return int(term)
            if leader:
                free_since = began
            await anyio.sleep(TURN_SECONDS)

    @asynccontextmanager
    async def leading(self, term: int) -> AsyncIterator[None]:
        """Load all rows, and write within the block, which is cancelled when the lease is lost.

        The lease is released at its end. Raises: ControllerError: the rows could not be loaded.
        """
        self._unsaved.clear()
        self._unsaved_bytes = self._stored = 0
        async with open_tasks() as tasks:
            self._scope = tasks.cancel_scope
            self._extend(self._until)
            try:
                async with open_background_tasks() as writer:
                    writer.start_soon(self._write, term)
                    await self._load()
                    self._leads = self._writes = True
                    try:
                        yield
                    finally:
                        self._leads, self._rows = False, {}
            finally:
                with CancelScope(shield=True):
                    # Such as the end of an operation that the next leader would else repeat.
                    while self._unsaved and await self._flush(term):
                        pass
                    self._writes = False
                    self._written.notify()
                    await self._call(_RELEASE, term)
                self._set_lease(None)

    def _extend(self, until: float) -> None:
        """Note until when this controller leads, on the clock of ``time.monotonic()``."""
        self._until = until
        # Not only when a renewal fails: a server that hangs may have given the lease to another one.
        self._scope.deadline = anyio.current_time() + until - time.monotonic()

    def _set_lease(self, lease: Lease | None) -> None:
        if lease != self.lease:
            self.lease = lease
            self.changes.notify()

    async def _load(self) -> None:
        for table in (EVENTS, OPERATIONS, PINS):
            try:
                stored = await self._server.hgetall(PREFIX + table.name)
            except (RedisError, OSError) as error:
                raise ControllerError(f"{self.name} does not answer: {error}") from error
            self._rows[table.name] = self.decoded(stored.items(), _decode_row)

    async def _write(self, term: int) -> None:
        """Write, and renew the lease, until it is lost."""
        while await self._flush(term) and self._unsaved_bytes < MAX_UNSAVED_BYTES:
            if not self._unsaved:
                self._to_write = anyio.Event()
                with anyio.move_on_after(TURN_SECONDS):
                    await self._to_write.wait()
        logger.warning("this controller does not lead any more")
        self._scope.cancel()

    async def _flush(self, term: int) -> bool:
        """Write what is not stored yet, up to a limit. Return whether the lease was this controller's."""
        arguments: list[bytes | str | int] = []
        size = count = 0
        for command in self._unsaved:
            if size > BATCH_BYTES:
                break
            arguments += (len(command), *command)
            size += _size(command)
            count += 1
        began = time.monotonic()
        answer = await self._call(_WRITE, term, round(1000 * LEASE_SECONDS), self._stored, *arguments)
        if answer is None:
            await anyio.sleep(TURN_SECONDS / 5)
            return time.monotonic() < self._until
        if not answer:
            return False
        self._extend(began + LEASE_SECONDS)
        for _ in range(count):
            self._unsaved_bytes -= _size(self._unsaved.popleft())
        self._stored += count
        self._written.notify()
        return True

    async def _call(self, script: str, *arguments: bytes | str | int) -> Any:  # noqa: ANN401 - as Redis
        """Run a script on the lease. Return ``None`` if the server does not answer."""
        try:
            answer = await self._server.eval(script, 1, LEASE, *arguments)
        except (RedisError, OSError) as error:
            self._warnings.note(self.name, str(error))
            return None
        self._warnings.note(self.name, "")
        return answer

    # What a leader writes.

    def rows(self, table: Table) -> list[Row]:
        """Return the rows as this controller has found them when it began to lead."""
        return self._rows.get(table.name, [])

    def put(self, table: Table, row: Sequence[Value]) -> None:
        """Write a row, soon. Without effect if this controller does not lead."""
        count = len(table.key)
        key, rest = (msgspec.msgpack.encode(list(part)) for part in (row[:count], row[count:]))
        self._add("HSET", PREFIX + table.name, key, rest)

    def delete(self, table: Table, keys: Iterable[Sequence[Value]]) -> None:
        """Delete rows, soon. Without effect if this controller does not lead."""
        for key in keys:
            self._add("HDEL", PREFIX + table.name, msgspec.msgpack.encode(list(key)))

    async def saved(self) -> None:
        """Wait until the server has all that was written. Raises: ControllerError: it does not answer."""
        upto = self._stored + len(self._unsaved)
        with anyio.move_on_after(SAVE_SECONDS):
            while self._writes and self._stored < upto:
                await self._written.after(self._written.count)
        if self._stored < upto:
            raise ControllerError(f"{self.name} does not answer, so the request cannot be stored: retry")

    def add_samples(self, level: int, at: int, oldest: int, samples: Iterable[tuple[str, bytes]]) -> None:
        """Write samples, soon. The server deletes them when they are as old as ``oldest`` is now."""
        names = set()
        for series, sample in samples:
            name = _history(level, at, series.partition(":")[0])
            names.add(name)
            self._add("HSET", name, series, sample)
        for name in names:
            self._add("EXPIREAT", name, 2 * at - oldest)

    async def samples(
        self, level: int, times: Sequence[int], kind: str = "", name: str | None = None
    ) -> list[Row]:
        """Return samples, in one call. Raises: ControllerError."""
        pipeline = self._server.pipeline(transaction=False)
        series = f"{kind}:{name}"
        asked = [(at, each) for at in times for each in ([kind] if kind else get_args(Kind))]
        for at, each in asked:
            key = _history(level, at, each)
            pipeline.hgetall(key) if name is None else pipeline.hget(key, series)
        try:
            answers = await pipeline.execute()
        except (RedisError, OSError) as error:
            raise ControllerError(f"{self.name} does not answer, so there is no history: {error}") from error
        rows: list[Row] = []
        for (at, _), answer in zip(asked, answers, strict=True):
            found = answer.items() if name is None else [(series.encode(), answer)]
            rows += ((series.decode(), at, sample) for series, sample in found if sample is not None)
        return rows

    def _add(self, *command: bytes | str | int) -> None:
        if self._leads:
            self._unsaved.append(command)
            self._unsaved_bytes += _size(command)
            self._to_write.set()


def _decode_row(stored: tuple[bytes, bytes]) -> Row:
    key, rest = (msgspec.msgpack.decode(part, type=list) for part in stored)
    return [*key, *rest]


def _history(level: int, at: int, kind: str) -> str:
    return f"{PREFIX}history:{level}:{at}:{kind}"


def _size(command: Iterable[bytes | str | int]) -> int:
    return sum(len(part) if isinstance(part, bytes | str) else 8 for part in command)
