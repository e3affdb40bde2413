"""Tokenize prompts in helper processes that start on demand and exit when idle."""

from __future__ import annotations

import logging
import math
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from anyio import CancelScope
from anyio.abc import Process, TaskGroup

from kvtier.concurrency.processes import python
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import ChannelClosed, ChannelError
from kvtier.fleet.member.served_models import ServedModels, TokenizerSource
from kvtier.fleet.member.tokenizer import Failed, Load, Parts, Prompt, Tokens, decode_answer
from kvtier.rpc.frames import FrameReader, Message, encode

logger = logging.getLogger("kvtier")

LOAD_SECONDS = 60.0
ANSWER_SECONDS = 20.0
"""Timeout for one prompt."""
IDLE_SECONDS = 300.0
"""Idle time after which a helper is stopped."""
MAX_HELPERS = 2
"""Maximum number of helpers, of about 100 MB each; the least recently used one is replaced."""
MAX_WAITING = 32
COMMAND = python("-m", "kvtier.fleet.member.tokenizer")


class Tokenizers:
    """One helper per requested model. Confined to one event loop; see :meth:`open`."""

    def __init__(self, served: ServedModels, *, idle: float = IDLE_SECONDS) -> None:
        self._served = served
        self._idle = idle
        self._helpers: dict[TokenizerSource, _Helper] = {}
        self._lock = anyio.Lock()
        self._waiting = 0
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Allow helpers to start within the block; stop all of them at its end."""
        async with open_tasks() as self._tasks:
            try:
                yield
            finally:
                self._tasks.cancel_scope.cancel()
                self._tasks = None

    @property
    def processes(self) -> list[int]:
        """Process ids of the helpers."""
        return [helper.process.pid for helper in self._helpers.values()]

    async def tokenize(self, namespace: bytes, prompt: str, *, chat: bool = False) -> list[int]:
        """Tokenize a prompt as the engine of a model does, with special tokens.

        With ``chat``, it is a JSON list of chat messages. Prompts are processed one at a time. Raises
        :class:`ChannelError` with a message for the requester.
        """
        return (await self._ask(namespace, Prompt(prompt, chat))).ids

    async def text(self, namespace: bytes, *parts: Sequence[int]) -> str:
        """Return the text of consecutive tokens, with a mark between the parts. Raises as above."""
        return (await self._ask(namespace, Parts([list(part) for part in parts]))).text

    async def _ask(self, namespace: bytes, request: Message) -> Tokens:
        source = self._served.tokenizer(namespace)
        if source is None:
            raise ChannelError(
                "no engine of this instance has reported the location of the model's tokenizer"
            )
        if not source.usable:
            raise ChannelError(
                f"this instance cannot load a tokenizer of mode {source.mode!r}, or transformers is not "
                "installed: send token ids instead"
            )
        if self._waiting >= MAX_WAITING:
            raise ChannelError(f"too many requests: {MAX_WAITING} prompts are already queued for tokenizing")
        self._waiting += 1
        try:
            # A helper answers one request at a time, and the number of helpers is limited.
            async with self._lock:
                helper = await self._helper(source)
                return await helper.ask(request, ANSWER_SECONDS)
        finally:
            self._waiting -= 1

    async def _helper(self, source: TokenizerSource) -> _Helper:
        # The first helper is the least recently used one.
        helper = self._helpers.pop(source, None)
        if helper is not None and not helper.ended:
            self._helpers[source] = helper
            return helper
        if self._tasks is None:
            raise ChannelClosed("this instance is shutting down")
        while len(self._helpers) >= MAX_HELPERS:
            self._helpers.pop(next(iter(self._helpers))).stop()
        with CancelScope(shield=True):  # Cancelling this would leak the process.
            process = await anyio.open_process(
                COMMAND,
                stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )
        helper = self._helpers[source] = _Helper(process, self._idle)
        self._tasks.start_soon(self._close_when_idle, source, helper)
        await helper.ask(Load(source), LOAD_SECONDS)
        return helper

    async def _close_when_idle(self, source: TokenizerSource, helper: _Helper) -> None:
        try:
            with helper.scope:
                await anyio.sleep_forever()
        finally:
            if self._helpers.get(source) is helper:
                del self._helpers[source]
            with CancelScope(shield=True):
                await helper.close()


class _Helper:
    """A process with one tokenizer. Any error, or a cancelled request, stops it."""

    def __init__(self, process: Process, idle: float) -> None:
        self.process = process
        self.scope = CancelScope()
        """Cancel scope of the task that closes the process. Its deadline is ``idle`` s after a request."""
        self._idle = idle
        self._reader = FrameReader()

    @property
    def ended(self) -> bool:
        """Whether the process has exited or is being stopped."""
        return self.scope.cancel_called or self.process.returncode is not None

    def stop(self) -> None:
        """Stop the helper asynchronously."""
        self.scope.cancel()

    async def ask(self, request: Message, seconds: float) -> Tokens:
        """Return the answer to a request; stop the helper without one. Raises :class:`ChannelError`."""
        self.scope.deadline = math.inf
        answer: Tokens | Failed | None = None
        try:
            with anyio.move_on_after(seconds):
                answer = await self._ask(request)
        finally:
            self.scope.deadline = anyio.current_time() + self._idle
            if answer is None or (isinstance(answer, Failed) and isinstance(request, Load)):
                self.stop()
        if answer is None:
            raise ChannelClosed(f"the tokenizer did not answer within {seconds:g} s")
        if isinstance(answer, Failed):
            raise ChannelError(f"the tokenizer failed: {answer.reason}")
        return answer

    async def _ask(self, request: Message) -> Tokens | Failed:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            await stdin.send(encode(request))
            while True:
                for body in self._reader.feed(await stdout.receive()):
                    return decode_answer(body)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError) as error:
            raise ChannelClosed("the tokenizer process has exited") from error

    async def close(self) -> None:
        """Kill the process, and wait until it has exited."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.aclose()
