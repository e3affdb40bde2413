"""The expected answers: those of the same vLLM without a connector, one prompt at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from soak import adapters
from soak.schedule import Conversation, Piece
from tests.rigs.vllm.engine import Engine, Engines
from tests.rigs.vllm.models import prompt

TIE_LOG_PROBABILITY = 1e-3
"""Two tokens closer than this are a tie: the winner may depend on the shape of the batch."""
LIKELIEST = 20
"""Number of log-probabilities to request."""


class Question(NamedTuple):
    """A prompt and its expected answer."""

    tokens: list[int]
    answer: list[int]
    version: int | None = None
    """The version of the adapter; ``None`` without an adapter."""


class Mismatch(NamedTuple):
    """The first difference between an answer and the expected one."""

    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return f"token {self.position} is {self.got} and should be {self.expected}"


def compare(expected: Sequence[int], got: Sequence[int]) -> Mismatch | None:
    """Return the first difference; ``None`` if there is no difference."""
    for position in range(max(len(expected), len(got))):
        right = expected[position] if position < len(expected) else None
        actual = got[position] if position < len(got) else None
        if right != actual:
            return Mismatch(position, right, actual)
    return None


class Oracle:
    """The expected answers. It runs an engine only when needed, so that it competes with no other."""

    def __init__(self, engines: Engines, model: Path, versions: Sequence[Path] = ()) -> None:
        """``versions``: the folders of the versions of the adapter."""
        self._engines = engines
        self._model = model
        self._versions = versions
        self.questions: dict[tuple[int, int, int | None], Question] = {}

    def prepare(self, conversations: Sequence[Conversation], progress: Callable[[], None]) -> None:
        """Compute the answers to all exchanges of all conversations in sequence. Blocks; 1 s each."""
        with self._engine() as engine:
            for number, conversation in enumerate(conversations):
                for version in range(len(self._versions)) if conversation.adapted else (None,):
                    self._ask_all(engine, number, conversation, version, progress)

    def _engine(self, **arguments: int) -> AbstractContextManager[Engine]:
        return self._engines.engine(
            self._model, None, enable_prefix_caching=False, **adapters.ENGINE, **arguments
        )

    def _lora(self, version: int | None) -> dict[str, Any] | None:
        if version is None:
            return None
        lora = adapters.request(self._versions[version])
        return {**lora, "lora_name": f"version-{version}", "lora_int_id": version + 1}

    def _ask_all(
        self,
        engine: Engine,
        number: int,
        conversation: Conversation,
        version: int | None,
        progress: Callable[[], None],
    ) -> None:
        tokens = text(conversation.system)
        for index, exchange in enumerate(conversation.exchanges):
            tokens = tokens + text(exchange.text)
            answer = engine.generate(tokens, exchange.new_tokens, lora=self._lora(version)).tokens
            self.questions[number, index, version] = Question(tokens, answer, version)
            tokens = tokens + answer
            progress()

    @property
    def conversations(self) -> int:
        """Number of prepared conversations."""
        return len({conversation for conversation, _, _ in self.questions})

    def question(self, conversation: int, exchange: int, version: int = 0) -> Question:
        """Return a prepared prompt with its answer, of this version if the conversation uses the adapter."""
        plain = self.questions.get((conversation, exchange, None))
        return plain or self.questions[conversation, exchange, version]

    def gaps(self, mismatches: Sequence[tuple[Question, Mismatch]]) -> list[float]:
        """Return how much lower each wrong token's log-probability is than the expected one's.

        Infinite if it is not among the ``LIKELIEST``, or if the answer's length is wrong. Starts an engine.
        """
        if not mismatches:
            return []
        with self._engine(max_logprobs=LIKELIEST) as engine:
            return [self._gap(engine, question, mismatch) for question, mismatch in mismatches]

    def _gap(self, engine: Engine, question: Question, mismatch: Mismatch) -> float:
        tokens = question.tokens + question.answer[: mismatch.position]
        answer = engine.generate(tokens, 1, logprobs=LIKELIEST, lora=self._lora(question.version))
        assert answer.logprobs is not None
        likeliest = answer.logprobs[0]
        got, expected = likeliest.get(str(mismatch.got)), likeliest.get(str(mismatch.expected))
        return math.inf if got is None or expected is None else expected - got


def text(piece: Piece) -> list[int]:
    """Return the tokens of a range of the text."""
    return prompt(piece.length, start=piece.start)
