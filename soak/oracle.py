"""The right answers: those of the same vLLM without a connector, prompt by prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from soak.schedule import Conversation, Piece
from tests.vllm.engine import Engine, Engines
from tests.vllm.models import prompt

TIE_LOG_PROBABILITY = 1e-3
"""Two tokens closer than this are a tie: which of them wins may depend on the shape of the batch."""
LIKELIEST = 20
"""Of so many tokens the log-probabilities are asked for."""


class Question(NamedTuple):
    """A prompt and what is right to answer."""

    tokens: list[int]
    answer: list[int]


class Mismatch(NamedTuple):
    """Where an answer leaves the right one."""

    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return f"token {self.position} is {self.got} and should be {self.expected}"


def compare(expected: Sequence[int], got: Sequence[int]) -> Mismatch | None:
    """Return the first difference, ``None`` where the two are equal."""
    for position in range(max(len(expected), len(got))):
        right = expected[position] if position < len(expected) else None
        answered = got[position] if position < len(got) else None
        if right != answered:
            return Mismatch(position, right, answered)
    return None


class Oracle:
    """Starts its engine when it is asked, and ends it: none runs beside those under test."""

    def __init__(self, engines: Engines, model: Path) -> None:
        self._engines = engines
        self._model = model
        self._questions: dict[tuple[int, int], Question] = {}

    def prepare(self, conversations: Sequence[Conversation], progress: Callable[[], None]) -> None:
        """Answer every exchange of every conversation, one after the other. Blocks; a second each."""
        with self._engines.engine(self._model, None, enable_prefix_caching=False) as engine:
            for number, conversation in enumerate(conversations):
                tokens = text(conversation.system)
                for index, exchange in enumerate(conversation.exchanges):
                    tokens = tokens + text(exchange.text)
                    answer = engine.generate(tokens, exchange.new_tokens).tokens
                    self._questions[number, index] = Question(tokens, answer)
                    tokens = tokens + answer
                    progress()

    @property
    def conversations(self) -> int:
        """How many were prepared."""
        return len({conversation for conversation, _ in self._questions})

    def question(self, conversation: int, exchange: int) -> Question:
        """Return a prompt that was prepared, with its answer."""
        return self._questions[conversation, exchange]

    def gaps(self, mismatches: Sequence[tuple[Question, Mismatch]]) -> list[float]:
        """Return by how much less likely each wrong token is than the right one, in log-probability.

        Infinite where it is not among the likeliest, or an answer has another length. Starts an engine.
        """
        if not mismatches:
            return []
        with self._engines.engine(
            self._model, None, enable_prefix_caching=False, max_logprobs=LIKELIEST
        ) as engine:
            return [_gap(engine, question, mismatch) for question, mismatch in mismatches]


def _gap(engine: Engine, question: Question, mismatch: Mismatch) -> float:
    tokens = question.tokens + question.answer[: mismatch.position]
    answer = engine.generate(tokens, 1, logprobs=LIKELIEST)
    assert answer.logprobs is not None
    likeliest = answer.logprobs[0]
    got, expected = likeliest.get(str(mismatch.got)), likeliest.get(str(mismatch.expected))
    return math.inf if got is None or expected is None else expected - got


def text(piece: Piece) -> list[int]:
    """Return the tokens of a stretch of the text."""
    return prompt(piece.length, start=piece.start)
