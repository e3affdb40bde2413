"""Token ids of prompts, from helper processes that start when they are needed and end when they are not."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
from anyio import CancelScope
from anyio.abc import Process, TaskGroup

from kvtier.agent.served import Served, TokenizerSource
from kvtier.agent.tokenizer import Load, Prompt, Refused, Tokens, decode_answer
from kvtier.errors import ChannelClosed, ChannelError
from kvtier.sockets.frames import FrameReader, Message, encode
from kvtier.tasks import open_tasks

logger = logging.getLogger("kvtier")

LOAD_SECONDS = 60.0
ANSWER_SECONDS = 20.0
"""How long the longest prompt may take."""
IDLE_SECONDS = 300.0
"""How long a helper that has nothing to do stays."""
MOST_HELPERS = 2
"""At once, some 100 MB each; the one that was used least recently makes room for another."""
MOST_WAITING = 32
COMMAND = (sys.executable, "-m", "kvtier.agent.tokenizer")


class Tokenizers:
    """One helper for each model that is asked about. Belongs to one event loop; see :meth:`open`."""

    def __init__(self, served: Served, *, idle: float = IDLE_SECONDS) -> None:
        self._served = served
        self._idle = idle
        self._helpers: dict[TokenizerSource, _Helper] = {}
        self._turn = anyio.Lock()
        self._waiting = 0
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Let helpers be started until the block is left; none of them outlives it."""
        async with open_tasks() as self._tasks:
            try:
                yield
            finally:
                self._tasks.cancel_scope.cancel()
                self._tasks = None

    @property
    def processes(self) -> list[int]:
        """The numbers of the helpers' processes."""
        return [helper.process.pid for helper in self._helpers.values()]

    async def tokenize(self, namespace: bytes, prompt: str) -> list[int]:
        """What the engine that serves a model makes of a prompt, special tokens included.

        One at a time. Raises :class:`ChannelError` where this cannot be: in words, for whoever has asked.
        """
        source = self._served.tokenizer(namespace)
        if source is None:
            raise ChannelError("no engine of this instance has said where the model's tokenizer is")
        if not source.usable:
            raise ChannelError(
                f"this instance cannot load a tokenizer of mode {source.mode!r}, or transformers is not "
                "installed beside it: ask with token ids"
            )
        if self._waiting >= MOST_WAITING:
            raise ChannelError(f"{MOST_WAITING} prompts wait to be turned into token ids already")
        self._waiting += 1
        try:
            async with self._turn:
                helper = await self._helper(source)
                return await helper.ask(Prompt(prompt), ANSWER_SECONDS)
        finally:
            self._waiting -= 1

    async def _helper(self, source: TokenizerSource) -> _Helper:
        helper = self._helpers.get(source)
        if helper is not None and not helper.over:
            return helper
        if self._tasks is None:
            raise ChannelClosed("this instance is about to end")
        while len(self._helpers) >= MOST_HELPERS:
            least = min(self._helpers, key=lambda source: self._helpers[source].used_at)
            self._helpers.pop(least).end()
        with CancelScope(shield=True):  # Else nobody might know of the process.
            process = await anyio.open_process(
                COMMAND,
                stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )
        helper = self._helpers[source] = _Helper(process)
        self._tasks.start_soon(self._look_after, source, helper)
        await helper.ask(Load(source), LOAD_SECONDS)
        return helper

    async def _look_after(self, source: TokenizerSource, helper: _Helper) -> None:
        try:
            with helper.scope:
                await helper.idle(self._idle)
        finally:
            if self._helpers.get(source) is helper:
                del self._helpers[source]
            with CancelScope(shield=True):
                await helper.close()


class _Helper:
    """A process with one tokenizer. Whatever goes wrong with it, be it a cancelled question, ends it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.scope = CancelScope()
        """Of the task that looks after it."""
        self.used_at = time.monotonic()
        self._busy = False
        self._reader = FrameReader()

    @property
    def idle_seconds(self) -> float:
        """How long it has had nothing to do."""
        return 0.0 if self._busy else time.monotonic() - self.used_at

    @property
    def over(self) -> bool:
        """Whether it is of no use any more."""
        return self.scope.cancel_called or self.process.returncode is not None

    async def idle(self, seconds: float) -> None:
        """Wait until it has had nothing to do for so long."""
        left = seconds
        while left > 0:
            await anyio.sleep(left)
            left = seconds - self.idle_seconds

    def end(self) -> None:
        """Let it be ended, soon."""
        self.scope.cancel()

    async def ask(self, request: Message, seconds: float) -> list[int]:
        """Its answer. Raises :class:`ChannelError`. Where there is no answer it is ended."""
        self._busy = True
        answer: Tokens | Refused | None = None
        try:
            with anyio.move_on_after(seconds):
                answer = await self._ask(request)
        finally:
            self._busy = False
            self.used_at = time.monotonic()
            if answer is None or (isinstance(answer, Refused) and isinstance(request, Load)):
                self.end()
        if answer is None:
            raise ChannelClosed(f"the tokenizer has not answered within {seconds:g} s")
        if isinstance(answer, Refused):
            raise ChannelError(f"the tokenizer fails: {answer.reason}")
        return answer.ids

    async def _ask(self, request: Message) -> Tokens | Refused:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            await stdin.send(encode(request))
            while True:
                for body in self._reader.feed(await stdout.receive()):
                    return decode_answer(body)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError) as error:
            raise ChannelClosed("the tokenizer's process has ended") from error

    async def close(self) -> None:
        """End it, and wait until it has ended."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.aclose()
