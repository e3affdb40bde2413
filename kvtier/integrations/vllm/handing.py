"""The scheduler's side of hand-overs: which prompts are pushed to a peer, and which are awaited from one.

A hint that is wrong, or that this engine's role does not allow, costs nothing but a warning now and then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.backends.logs import RareWarning
from kvtier.bridge.client import SchedulerBridge
from kvtier.integrations.vllm.hints import NAME, NO_HINTS, Hints, has_hints, read_hints
from kvtier.integrations.vllm.request import RequestState
from kvtier.keys import ChunkKey
from kvtier.settings import Settings
from kvtier.settings_hand_over import Role

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtier.integrations.vllm.metrics import TransferStats

logger = logging.getLogger("vllm.kvtier")

MOST_CHARACTERS = 200
"""Of what a client has written, in a warning."""

ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def role_of(settings: Settings, kv_role: str | None) -> Role:
    """What this engine does: what its settings say or, where they say nothing, vLLM's ``kv_role``."""
    if settings.origin("role").kind != "default":
        return settings.role
    return ROLES.get(kv_role or "", settings.role)


class Expected(NamedTuple):
    """What a look-up is to wait for."""

    chunks: int
    seconds: float


NOTHING = Expected(0, 0.0)


class HandOvers:
    """Begins and ends hand-overs, and knows what to answer; one thread."""

    def __init__(
        self, settings: Settings, chunk_tokens: int, bridge: SchedulerBridge, stats: TransferStats
    ) -> None:
        self._role = settings.role
        self._patience = settings.hand_over.patience
        self._chunk_tokens = chunk_tokens
        self._bridge = bridge
        self._stats = stats
        self._warn = RareWarning(logger)
        self._finished: list[int] = []
        """Hand-overs that are to end as complete."""

    def hints(self, request: Request) -> Hints:
        """What a request has told and this engine does."""
        params, name = request.kv_transfer_params, request.request_id
        if not has_hints(params):
            return NO_HINTS
        try:
            hints = read_hints(params)
        except ValueError as error:
            said = "".join(one if one.isprintable() else "?" for one in str(error)[:MOST_CHARACTERS])
            self._warn(f'request %s: %s in its kv_transfer_params["{NAME}"], passed over', name, said)
            return NO_HINTS
        if hints.hand_over is not None and self._role == "decode":
            self._warn("request %s is to be handed over, and this engine's `role` is decode: it is not", name)
            hints = Hints(expect=hints.expect)
        if hints.expect is not None and self._role == "prefill":
            self._warn(
                "request %s expects a hand-over, and this engine's `role` is prefill: it waits for none", name
            )
            hints = Hints(hand_over=hints.hand_over)
        return hints

    def wants_tail(self, state: RequestState) -> bool:
        """Whether the partial chunk at the prompt's end is stored and looked up whatever the settings say."""
        # What prefillers push to a decoder is found there by requests that tell nothing, too.
        return state.hand_over is not None or self._expects_all(state) or self._role == "decode"

    def _expects_all(self, state: RequestState) -> bool:
        expect = state.hints.expect
        return expect is not None and expect.tokens >= state.request.num_prompt_tokens

    # At the prefiller.

    def begin(self, state: RequestState) -> None:
        """Have a prompt's chunks pushed from now on, where its request says so and it is not under way."""
        hint = state.hints.hand_over
        if hint is None or state.hand_over is not None or state.load_failed:
            return
        tokens = state.request.num_prompt_tokens
        keys: list[ChunkKey] = list(state.extend(tokens))
        if (tail := state.tail_key(tokens)) is not None:
            keys.append(tail)
        state.hand_over = self._bridge.hand_over(hint.to, state.root, keys, tokens)

    def note_preemption(self, state: RequestState) -> None:
        """Give up where it was preempted since: it may wait for long, and the decoder's room is wanted.

        It begins anew with its turn, be that in the very step in which the scheduler tells of it.
        """
        if state.request.num_preemptions != state.preemptions:
            state.preemptions = state.request.num_preemptions
            self.give_up(state)

    def give_up(self, state: RequestState) -> None:
        """Nothing more of it is pushed; what has arrived stays there."""
        if state.hand_over is not None:
            self._bridge.end_hand_over(state.hand_over, complete=False)
            state.hand_over = None

    def finish(self, state: RequestState) -> int:
        """How many leading tokens the decoder may expect. :meth:`end_finished` ends the hand-over."""
        ticket, state.hand_over = state.hand_over, None
        if ticket is None or state.hints.hand_over is None:
            return 0
        tokens = int(state.request.num_prompt_tokens)
        reason = ""
        try:
            told = self._bridge.handed_over(ticket)
        except KeyError:
            return 0
        self._finished.append(ticket)
        if told is not None:
            tokens, reason = min(tokens, told.tokens), told.reason
        self._stats.add("handed_over_tokens", tokens)
        logger.info(
            "request %s: %d of %d tokens handed over to %s%s",
            state.request.request_id,
            tokens,
            state.request.num_prompt_tokens,
            state.hints.hand_over.to,
            f": {reason}" if reason else "",
        )
        return tokens

    def end_finished(self) -> None:
        """End the hand-overs of finished requests, once room for all of their chunks was asked for."""
        while self._finished:
            self._bridge.end_hand_over(self._finished.pop(), complete=True)

    # At the decoder.

    def expected(self, state: RequestState, keys: Sequence[ChunkKey]) -> Expected:
        """What a look-up of ``keys`` is to wait for, as long as its request has left for that."""
        expect = state.hints.expect
        if expect is None:
            return NOTHING
        if state.expect_until is None:
            seconds = self._patience if expect.seconds is None else min(expect.seconds, self._patience)
            state.expect_until = time.monotonic() + seconds
        left = state.expect_until - time.monotonic()
        chunks = len(keys) if self._expects_all(state) else expect.tokens // self._chunk_tokens
        return Expected(min(chunks, len(keys)), left) if left > 0 and chunks else NOTHING

    # At either.

    def answer(self, request: Request, handed_over: int) -> dict[str, Any] | None:
        """What a request's answer carries in ``kv_transfer_params``; ``None`` where it has not asked."""
        if not has_hints(request.kv_transfer_params):
            return None
        peer = None if self._bridge.welcome is None else self._bridge.welcome.peer
        answer: dict[str, Any] = {"peer": peer}
        if handed_over:
            answer["handed_over"] = {"tokens": handed_over, "from": peer}
        return {NAME: answer}
