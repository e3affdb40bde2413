"""An engine and its simulated users: send the scheduled requests, and check every answer."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from soak.adapters import Adapter
from soak.findings import Record
from soak.oracle import TIE_LOG_PROBABILITY, Mismatch, Oracle, Question, compare
from soak.schedule import HOSTS, Turn, fails_to_load
from tests.rigs.vllm.engine import Answer, Engine, EngineDied

POLL_SECONDS = 0.005
STUCK_SECONDS = 60.0
"""A request that takes longer, without the time in which the engine was stopped, counts as stuck."""


@dataclass
class Request:
    """A pending request."""

    turn: Turn
    number: int
    """The engine's number of the request."""
    question: Question
    sent: float
    abort_at: float | None
    aborted: bool = False
    is_stuck: bool = False


@dataclass
class Suspect:
    """A wrong answer."""

    question: Question
    mismatch: Mismatch
    what: str
    at: float
    notes: list[str]


class Lane:
    """An engine and the requests of its users. Only the lane's thread uses the engine."""

    def __init__(
        self,
        number: int,
        start: Callable[[], AbstractContextManager[Engine]],
        turns: Sequence[Turn],
        oracle: Oracle,
        record: Record,
        adapter: Adapter | None = None,
        unlisted: str = "",
    ) -> None:
        """``unlisted``: an address that some requests name as the target of a KV transfer."""
        self.number = number
        self.adapter = adapter
        self._unlisted = unlisted
        self._start = start
        self._oracle = oracle
        self._record = record
        self._waiting: dict[int, deque[Turn]] = {}
        for turn in turns:
            self._waiting.setdefault(turn.user, deque()).append(turn)
        self._pending: dict[int, Request] = {}
        """By user."""
        self._stack = ExitStack()
        self.suspects: list[Suspect] = []
        """Wrong answers, which may be ties; see :meth:`judge`."""
        self.pauses: list[tuple[float, float]] = []
        """When the engine was stopped: start and end in ``time.monotonic``."""
        self._stopped_at = math.inf
        """When it was stopped, if it still is."""
        self._kill_seconds: float | None = None
        self._killed = threading.Event()
        self._replacement: Callable[[], None] | None = None
        self._replaced = threading.Event()
        self.is_running = False
        self.pids: list[int] = []
        """The process ids of the current engine and the previous ones."""
        self.engine: Engine

    def open(self) -> None:
        """Start the engine. Blocks for seconds."""
        self.engine = self._stack.enter_context(self._start())
        self.pids.append(self.engine.pid)

    def close(self) -> None:
        """Shut the engine down cleanly."""
        self._stack.close()

    def kill(self) -> None:
        """Kill the engine. Idempotent."""
        if hasattr(self, "engine"):
            self.engine.kill()

    def kill_and_restart(self, seconds: float) -> None:
        """Kill the engine, and wait until it is restarted ``seconds`` later. Call from another thread."""
        self._killed.clear()
        self._kill_seconds = seconds
        while self.is_running and not self._killed.wait(0.1):
            pass

    def replace_adapter(self, *, restart: bool) -> None:
        """Replace the adapter once no request is pending, and wait for that. Call from another thread.

        vLLM loads it again in place or, with ``restart``, in a new engine.
        """
        self._replaced.clear()
        self._replacement = self._restart if restart else self._reload_adapter
        while self.is_running and not self._replaced.wait(0.1):
            pass

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the engine with SIGSTOP within the block. Call from another thread."""
        self._stopped_at, pid = time.monotonic(), self.engine.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            # The interrupted hook returns a moment later.
            self.pauses.append((self._stopped_at, time.monotonic() + 0.1))
            self._stopped_at = math.inf

    def run(self, stopped: threading.Event, until: float) -> None:
        """Send requests and check answers until all requests sent before ``until`` are answered."""
        self.is_running = True
        try:
            while not stopped.is_set() and (self._pending or self._record.now < until):
                try:
                    self._step(until)
                except EngineDied as error:
                    self._record.find("dead engine", f"engine {self.number} exited:\n{error}")
                    self._restart()
        except Exception as error:
            self._record.find("dead engine", f"engine {self.number} failed: {error!r}")
        finally:
            self.is_running = False

    def _step(self, until: float) -> None:
        if self._kill_seconds is not None:
            self._restart(self._kill_seconds)
            self._kill_seconds = None
            self._killed.set()
        self.collect_answers()
        now = self._record.now
        self._abort_due(now)
        if self._replacement is not None:
            if not self._pending:
                self._replace_adapter(self._replacement)
        elif now < until:
            self._send_due(now)
        self.engine.connection.poll(POLL_SECONDS)

    def _replace_adapter(self, load: Callable[[], None]) -> None:
        assert self.adapter is not None
        self.adapter.replace()
        load()
        self._record.count("adapters replaced")
        self._replacement = None
        self._replaced.set()

    def _reload_adapter(self) -> None:
        assert self.adapter is not None
        self.engine.load_adapter({**self.adapter.request, "load_inplace": True})
        self.engine.reset_prefix_cache()  # vLLM's own, which it keeps

    def _restart(self, seconds: float = 0.0) -> None:
        self.engine.kill()
        self._stack.close()
        time.sleep(seconds)
        self.open()
        self._record.count("engines restarted")
        for request in list(self._pending.values()):
            self.send(request.turn._replace(abort_after=None))

    def _send_due(self, now: float) -> None:
        idle = [turns for user, turns in self._waiting.items() if user not in self._pending and turns]
        for waiting in sorted(idle, key=lambda turns: turns[0].at):
            if waiting[0].at > now or not self._fits(waiting[0]):
                return
            self.send(waiting.popleft())

    def _fits(self, turn: Turn) -> bool:
        """Return whether a request may run with the pending ones.

        All or none of them use the adapter: in a mixed batch on a CPU, vLLM 0.32 gives wrong tokens to the
        others without any connector. See also :meth:`_runs_alone`.
        """
        pending = [request.question for request in self._pending.values()]
        question = self._question(turn)
        adapted = question.version is not None
        if any((other.version is not None) is not adapted for other in pending):
            return False
        return not pending or not any(map(self._runs_alone, (question, *pending)))

    def _runs_alone(self, question: Question) -> bool:
        """Return whether another connector's load will fail, so that the request must run alone, to its end.

        Until vLLM 0.32 has computed its blocks again, it takes them for computed when another request begins
        like it, and so for good if it is aborted: without kvtier, too, the tokens are wrong.
        """
        return self.number == HOSTS - 1 and fails_to_load(len(question.tokens))

    def _question(self, turn: Turn) -> Question:
        return self._oracle.question(turn.conversation, turn.exchange, self._version)

    def send(self, turn: Turn) -> None:
        """Send the request of a turn to the engine."""
        question = self._question(turn)
        params = {"kvtier": {"kv_transfer": {"to": self._unlisted}}} if turn.hinted else None
        number = self.engine.submit(
            question.tokens, len(question.answer), lora=self._lora(question), params=params
        )
        now = time.monotonic()
        after = None if self._runs_alone(question) else turn.abort_after
        abort_at = None if after is None else now + after
        self._pending[turn.user] = Request(turn, number, question, now, abort_at)
        self._record.count("requests")
        self._record.count("requests that name an unlisted address", int(turn.hinted))

    @property
    def _version(self) -> int:
        return 0 if self.adapter is None else self.adapter.version

    def _lora(self, question: Question) -> dict[str, Any] | None:
        return None if question.version is None or self.adapter is None else self.adapter.request

    def _abort_due(self, now: float) -> None:
        for request in list(self._pending.values()):
            if request.abort_at is not None and not request.aborted and time.monotonic() >= request.abort_at:
                request.aborted = True
                self.engine.abort(request.number)
                self._record.count("aborted")

    def collect_answers(self) -> None:
        """Check the answers that have ended, and report requests that are stuck."""
        for user, request in list(self._pending.items()):
            if self.engine.finished(request.number):
                del self._pending[user]
                self._check(request)
            elif not request.is_stuck and self._running_seconds(request) > STUCK_SECONDS:
                request.is_stuck = True
                self._record.find("stuck request", f"engine {self.number} does not answer {request.turn}")

    def _running_seconds(self, request: Request) -> float:
        now = time.monotonic()
        pauses = [*self.pauses, (self._stopped_at, now)]
        stopped = sum(max(min(end, now) - max(start, request.sent), 0.0) for start, end in pauses)
        return now - request.sent - stopped

    def _check(self, request: Request) -> None:
        turn = request.turn
        try:
            answer = self.engine.answer(request.number)
        except RuntimeError as error:
            self._record.find("failed request", f"engine {self.number}, {turn}: {error}")
            return
        if answer.reason == "abort":
            self.send(turn._replace(abort_after=None))
            return
        self.check(request.question, answer, str(turn))

    def check(self, question: Question, answer: Answer, what: str) -> None:
        """Compare an answer with the expected one, and count it."""
        self._record.count("answers")
        self._record.count("cached tokens", answer.cached)
        self._record.count("prompt tokens", len(question.tokens))
        mismatch = compare(question.answer, answer.tokens)
        if mismatch is not None:
            version = "" if question.version is None else f", version {question.version} of the adapter"
            cached = f"{answer.cached} of {len(question.tokens)} tokens cached{version}"
            what = f"engine {self.number}, {what}: {mismatch}; {cached}"
            notes = [f"answer {answer.tokens}", f"expected {question.answer}"]
            self.suspects.append(Suspect(question, mismatch, what, self._record.now, notes))

    def retry(self, suspect: Suspect) -> None:
        """Send the prompt of a wrong answer again, and add the result to its notes."""
        question = suspect.question
        if question.version not in (None, self._version):
            return  # Its adapter is not loaded any more.
        self.engine.reset_prefix_cache()
        answer = self.engine.generate(question.tokens, len(question.answer), lora=self._lora(question))
        mismatch = compare(question.answer, answer.tokens)
        suspect.notes.append(
            f"retried on engine {self.number}: {mismatch or 'correct'}, {answer.cached} tokens cached"
        )

    def judge(self) -> None:
        """Report wrong answers, except ties of two equally likely tokens. Starts an engine."""
        suspects, self.suspects = self.suspects, []
        gaps = self._oracle.gaps([(suspect.question, suspect.mismatch) for suspect in suspects])
        for suspect, gap in zip(suspects, gaps, strict=True):
            if abs(gap) < TIE_LOG_PROBABILITY:
                self._record.count("ties")
            else:
                lines = [suspect.what, f"its log-probability is {gap:.4f} lower", *suspect.notes]
                self._record.find("wrong token", "\n".join(lines), suspect.at)
