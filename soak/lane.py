"""One engine and its users: the requests of the schedule, and a check of every answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass

from soak.findings import Record
from soak.oracle import TIE_LOG_PROBABILITY, Mismatch, Oracle, Question, compare
from soak.schedule import Turn
from tests.vllm.engine import Answer, Engine, EngineDied

POLL_SECONDS = 0.005
STUCK_SECONDS = 60.0
"""A request may take as long on a busy machine, the engine's stops not counted; none takes longer."""


@dataclass
class Asked:
    """A request that was sent."""

    turn: Turn
    number: int
    """The engine's for it."""
    sent: float
    abort_at: float | None
    aborted: bool = False
    is_stuck: bool = False


@dataclass
class Suspect:
    """An answer that is not the right one."""

    question: Question
    mismatch: Mismatch
    what: str
    at: float
    notes: list[str]


class Lane:
    """Runs an engine and sends it the turns of its users. The engine belongs to the lane's thread."""

    def __init__(
        self,
        number: int,
        start: Callable[[], AbstractContextManager[Engine]],
        turns: Sequence[Turn],
        oracle: Oracle,
        record: Record,
    ) -> None:
        self.number = number
        self._start = start
        self._oracle = oracle
        self._record = record
        self._waiting: dict[int, deque[Turn]] = {}
        for turn in turns:
            self._waiting.setdefault(turn.user, deque()).append(turn)
        self._asked: dict[int, Asked] = {}
        """By user."""
        self._stack = ExitStack()
        self.suspects: list[Suspect] = []
        """Wrong answers, which may be ties: :meth:`judge` tells."""
        self.pauses: list[tuple[float, float]] = []
        """When the engine was stopped, in times of ``time.monotonic``."""
        self._kill_seconds: float | None = None
        self._killed = threading.Event()
        self.is_running = False
        self.pids: list[int] = []
        """Of the engine, and of those before it."""
        self.engine: Engine

    def open(self) -> None:
        """Start the engine. Blocks; seconds."""
        self.engine = self._stack.enter_context(self._start())
        self.pids.append(self.engine.pid)

    def close(self) -> None:
        """End the engine in good order."""
        self._stack.close()

    def kill(self) -> None:
        """End it at once; harmless when repeated."""
        if hasattr(self, "engine"):
            self.engine.kill()

    def kill_and_restart(self, seconds: float) -> None:
        """Have the engine killed, and started again ``seconds`` later; wait for that. From another thread."""
        self._killed.clear()
        self._kill_seconds = seconds
        while self.is_running and not self._killed.wait(0.1):
            pass

    def stop_for(self, wait: Callable[[], object]) -> None:
        """SIGSTOP the engine while ``wait`` runs. From another thread."""
        began, pid = time.monotonic(), self.engine.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            wait()
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            # What it was in the middle of ends a moment later.
            self.pauses.append((began, time.monotonic() + 0.1))

    def run(self, stopped: threading.Event, until: float) -> None:
        """Send what is due and check what comes, until all is answered that was sent before ``until``."""
        self.is_running = True
        try:
            while not stopped.is_set() and (self._asked or self._record.now < until):
                try:
                    self._turn_over(until)
                except EngineDied as error:
                    self._record.find("dead engine", f"engine {self.number} has ended:\n{error}")
                    self._restart()
        except Exception as error:
            self._record.find("dead engine", f"engine {self.number} cannot be used any more: {error!r}")
        finally:
            self.is_running = False

    def _turn_over(self, until: float) -> None:
        if self._kill_seconds is not None:
            self._restart(self._kill_seconds)
            self._kill_seconds = None
            self._killed.set()
        self._take_answers()
        now = self._record.now
        self._abort_due(now)
        if now < until:
            self._send_due(now)
        self.engine.connection.poll(POLL_SECONDS)

    def _restart(self, seconds: float = 0.0) -> None:
        self.engine.kill()
        self._stack.close()
        time.sleep(seconds)
        self.open()
        self._record.count("engines restarted")
        for asked in list(self._asked.values()):
            self._send(asked.turn._replace(abort_after=None))

    def _send_due(self, now: float) -> None:
        for user, waiting in self._waiting.items():
            if user not in self._asked and waiting and waiting[0].at <= now:
                self._send(waiting.popleft())

    def _send(self, turn: Turn) -> None:
        question = self._oracle.question(turn.conversation, turn.exchange)
        number = self.engine.submit(question.tokens, len(question.answer))
        now = time.monotonic()
        abort_at = None if turn.abort_after is None else now + turn.abort_after
        self._asked[turn.user] = Asked(turn, number, now, abort_at)
        self._record.count("requests")

    def _abort_due(self, now: float) -> None:
        for asked in list(self._asked.values()):
            if asked.abort_at is not None and not asked.aborted and time.monotonic() >= asked.abort_at:
                asked.aborted = True
                self.engine.abort(asked.number)
                self._record.count("aborted")

    def _take_answers(self) -> None:
        for user, asked in list(self._asked.items()):
            if self.engine.finished(asked.number):
                del self._asked[user]
                self._check(asked)
            elif not asked.is_stuck and self._running_seconds(asked) > STUCK_SECONDS:
                asked.is_stuck = True
                self._record.find("stuck request", f"engine {self.number} does not answer {asked.turn}")

    def _running_seconds(self, asked: Asked) -> float:
        stopped = sum(end - start for start, end in self.pauses if start > asked.sent)
        return time.monotonic() - asked.sent - stopped

    def _check(self, asked: Asked) -> None:
        turn = asked.turn
        try:
            answer = self.engine.answer(asked.number)
        except RuntimeError as error:
            self._record.find("failed request", f"engine {self.number}, {turn}: {error}")
            return
        if answer.reason == "abort":
            self._send(turn._replace(abort_after=None))
            return
        question = self._oracle.question(turn.conversation, turn.exchange)
        self.check(question, answer, str(turn))

    def check(self, question: Question, answer: Answer, what: str) -> None:
        """Compare an answer with the right one, and count it."""
        self._record.count("answers")
        self._record.count("cached tokens", answer.cached)
        self._record.count("prompt tokens", len(question.tokens))
        mismatch = compare(question.answer, answer.tokens)
        if mismatch is not None:
            cached = f"{answer.cached} of {len(question.tokens)} tokens cached"
            what = f"engine {self.number}, {what}: {mismatch}; {cached}"
            notes = [f"answered {answer.tokens}", f"right is {question.answer}"]
            self.suspects.append(Suspect(question, mismatch, what, self._record.now, notes))

    def ask_again(self, suspect: Suspect) -> None:
        """Note whether a prompt that was answered wrongly still is, with what is cached of it now."""
        question = suspect.question
        self.engine.reset_prefix_cache()
        answer = self.engine.generate(question.tokens, len(question.answer))
        mismatch = compare(question.answer, answer.tokens)
        suspect.notes.append(
            f"asked again, engine {self.number}: {mismatch or 'right'}, {answer.cached} tokens cached"
        )

    def judge(self) -> None:
        """Report wrong answers, but for ties of two equally likely tokens. Starts an engine."""
        suspects, self.suspects = self.suspects, []
        gaps = self._oracle.gaps([(suspect.question, suspect.mismatch) for suspect in suspects])
        for suspect, gap in zip(suspects, gaps, strict=True):
            if abs(gap) < TIE_LOG_PROBABILITY:
                self._record.count("ties")
            else:
                lines = [suspect.what, f"its log-probability is {gap:.4f} less", *suspect.notes]
                self._record.find("wrong token", "\n".join(lines), suspect.at)
