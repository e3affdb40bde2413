"""Scheduler side of KV transfers: which prompts to push to a peer, and which to await from one.

A hint that is invalid, or that this engine's role does not allow, only causes a rate-limited warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvtier.bridge.client import SchedulerBridge
from kvtier.integrations.vllm.hints import NAME, NO_HINTS, Hints, has_hints, read_hints
from kvtier.integrations.vllm.request import RequestState
from kvtier.logs import RateLimitedLog
from kvtier.memory.keys import ChunkKey
from kvtier.settings import Settings
from kvtier.settings.peer import Role

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtier.integrations.vllm.metrics import TransferStats
    from kvtier.memory.layout import ChunkLayout

logger = logging.getLogger("vllm.kvtier")

MAX_CHARACTERS = 200
"""Maximum length of client input quoted in a warning."""

RULED_OUT = (("kv_transfer", "decode", ("off", "read")), ("expect", "prefill", ("off", "write")))
"""Each hint, with the role of an engine and the modes of the hint ``cache`` that rule it out."""
ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def role_of(settings: Settings, kv_role: str | None) -> Role:
    """Return this engine's role: from the settings or, if not set there, from vLLM's ``kv_role``."""
    if settings.origin("role").kind != "default":
        return settings.role
    return ROLES.get(kv_role or "", settings.role)


class Expected(NamedTuple):
    """Pushed chunks that a lookup waits for, and for how long."""

    chunks: int
    seconds: float


NOTHING = Expected(0, 0.0)


class PromptTransfers:
    """Starts and ends KV transfers, and builds the answers to requests. Not thread-safe."""

    def __init__(
        self,
        settings: Settings,
        layout: ChunkLayout,
        bridge: SchedulerBridge,
        stats: TransferStats,
        *,
        parts: int = 1,
    ) -> None:
        self._role = settings.role
        self._pulls_only = layout.has_states or parts > 1
        """Whether chunks come from peers only when they are looked up. States and parts are not pushed."""
        self._timeout = settings.kv_transfer.timeout
        self._chunk_tokens = layout.chunk_tokens
        self._bridge = bridge
        self._stats = stats
        self._warn = RateLimitedLog(logger)
        self._finished: list[int] = []
        """Transfers to end as complete."""

    def hints(self, request: Request) -> Hints:
        """Return the hints of a request that this engine's role allows."""
        params, name = request.kv_transfer_params, request.request_id
        if not has_hints(params):
            return NO_HINTS
        try:
            hints = read_hints(params)
        except ValueError as error:
            detail = "".join(char if char.isprintable() else "?" for char in str(error)[:MAX_CHARACTERS])
            self._warn(f'request %s: ignoring kv_transfer_params["{NAME}"]: %s', name, detail)
            return NO_HINTS
        return self._without_useless(hints, name)

    def _without_useless(self, hints: Hints, name: str) -> Hints:
        """Return the hints without those that this engine, its role or the request rules out."""
        if self._pulls_only and (hints.kv_transfer is not None or hints.expect is not None):
            self._warn(
                "request %s: ignoring hints `kv_transfer` and `expect`: chunks of models with states, and of "
                "engines with pipeline stages or several hosts, are only read from peers",
                name,
            )
            hints = msgspec.structs.replace(hints, kv_transfer=None, expect=None)
        # A chunk is pushed from the memory that it is stored in, and loaded from where it arrives.
        for hint, role, modes in RULED_OUT:
            if getattr(hints, hint) is None or (self._role != role and hints.mode not in modes):
                continue
            reason = f"its hint `cache` is {hints.mode}"
            if self._role == role:
                reason = f"this engine's `role` is {role}"
            self._warn("request %s: ignoring hint `%s`, as %s", name, hint, reason)
            hints = msgspec.structs.replace(hints, **{hint: None})
        return hints

    def wants_tail(self, state: RequestState) -> bool:
        """Return whether to store and look up the prompt's partial last chunk regardless of the settings."""
        # Requests without hints also hit chunks that prefill instances have pushed to a decode instance.
        return state.transfer.ticket is not None or self._expects_all(state) or self._role == "decode"

    def _expects_all(self, state: RequestState) -> bool:
        expect = state.hints.expect
        return expect is not None and expect.tokens >= state.request.num_prompt_tokens

    # Prefill instance.

    def begin(self, state: RequestState) -> None:
        """Start to push a prompt's chunks if its request asks for that, unless it is being pushed already."""
        hint = state.hints.kv_transfer
        if hint is None or state.transfer.ticket is not None or state.lookup.load_failed:
            return
        tokens = state.request.num_prompt_tokens
        keys: list[ChunkKey] = list(state.extend(tokens))
        if (tail := state.tail_key(tokens)) is not None:
            keys.append(tail)
        else:
            tokens = len(keys) * self._chunk_tokens
        trace = state.trace.context
        state.transfer.ticket = self._bridge.transfer_kv(hint.to, state.root, keys, tokens, trace)

    def note_preemption(self, state: RequestState) -> None:
        """Stop the transfer of a preempted request, to free the room that the decode instance has reserved.

        It restarts when the request is scheduled again, possibly in the step that reports the preemption.
        """
        if state.request.num_preemptions != state.transfer.preemptions:
            state.transfer.preemptions = state.request.num_preemptions
            self.give_up(state)

    def give_up(self, state: RequestState) -> None:
        """Stop pushing a prompt. Chunks that have arrived stay at the peer."""
        if state.transfer.ticket is not None:
            self._bridge.end_kv_transfer(state.transfer.ticket, complete=False)
            state.transfer.ticket = None

    def finish(self, state: RequestState) -> int:
        """Return the number of leading tokens that the decode instance may expect.

        :meth:`end_finished` ends the transfer.
        """
        ticket, state.transfer.ticket = state.transfer.ticket, None
        if ticket is None or state.hints.kv_transfer is None:
            return 0
        tokens = int(state.request.num_prompt_tokens)
        reason = ""
        try:
            result = self._bridge.transferred(ticket)
        except KeyError:  # Its connection was lost, and with it what the cache process knew of it.
            return 0
        self._finished.append(ticket)
        if result is not None:
            tokens, reason = min(tokens, result.tokens), result.reason
        self._stats.add("transferred_tokens", tokens)
        logger.info(
            "request %s: %d of %d tokens transferred to %s%s",
            state.request.request_id,
            tokens,
            state.request.num_prompt_tokens,
            state.hints.kv_transfer.to,
            f": {reason}" if reason else "",
        )
        return tokens

    def end_finished(self) -> None:
        """End the transfers of finished requests. Call once room for all of their chunks was requested."""
        while self._finished:
            self._bridge.end_kv_transfer(self._finished.pop(), complete=True)

    # Decode instance.

    def expected(self, state: RequestState, keys: Sequence[ChunkKey]) -> Expected:
        """Return how many of ``keys`` a lookup should wait for, and the remaining time for that."""
        expect = state.hints.expect
        if expect is None:
            return NOTHING
        if state.transfer.expect_until is None:
            seconds = self._timeout if expect.seconds is None else min(expect.seconds, self._timeout)
            state.transfer.expect_until = time.monotonic() + seconds
        left = state.transfer.expect_until - time.monotonic()
        chunks = len(keys) if self._expects_all(state) else expect.tokens // self._chunk_tokens
        return Expected(min(chunks, len(keys)), left) if left > 0 and chunks else NOTHING

    # Both.

    def answer(
        self, request: Request, transferred: int, canary: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` of a request's answer; ``None`` for a request without hints.

        ``canary``: what to report to a canary. Call it once. Removes the hints: in vLLM's
        ``MultiConnector``, two answers under one name end the engine, so the first kvtier answers.
        """
        params = request.kv_transfer_params
        if not has_hints(params):
            return None
        request.kv_transfer_params = {name: value for name, value in params.items() if name != NAME}
        peer = None if self._bridge.welcome is None else self._bridge.welcome.peer
        answer: dict[str, Any] = {"peer": peer}
        if transferred:
            answer["transferred"] = {"tokens": transferred, "from": peer}
        if canary is not None:
            answer["canary"] = canary
        return {NAME: answer}
