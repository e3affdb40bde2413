"""Which weights this engine has, and how kvtier is notified of their changes.

vLLM names weights with its ``weight_version``, set by ``finish_weight_update`` and ``update_weight_version``.
It does not pass that to connectors. Each set of weights has a namespace of its own, so no chunk is found that
other weights have computed, in whatever tier, pool or peer it is, or whenever it arrives there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kvtier.bridge.protocol import Weights
from kvtier.concurrency.threads import run_in_background
from kvtier.integrations.vllm.compat import is_empty

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger("vllm.kvtier")

STARTUP_VERSION = "default"
"""vLLM's ``weight_version`` of the weights that an engine has started with."""

CHECK_SECONDS = 1.0
"""How long the engine waits for the comparison of the model's files with those at startup."""


def _unknown_id() -> str:
    return f"unknown-{secrets.token_hex(8)}"


class EngineWeights:
    """The weights of one engine: named by an id, or unknown since a reset. Not thread-safe."""

    def __init__(
        self,
        startup_id: str,
        namespace_of: Callable[[str], bytes],
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        """``startup_id``: the setting ``weights_id``. ``namespace_of``: returns the namespace of an id.

        ``is_current``: returns whether the model's files are still those of the weights at startup. If they
        are not now, these weights are unknown.
        """
        self._startup_id = startup_id
        self._is_current = is_current
        self._namespace_of = namespace_of
        self._pool: BlockPool | None = None
        self._mixed = self._expects_reset = False
        current_id = startup_id or ("" if is_current() else _unknown_id())
        self.current = Weights(namespace_of(current_id), current_id)
        self.named = bool(startup_id)
        """Whether an id names the weights, so that their chunks stay valid when the engine gets others."""

    def bind(self, pool: BlockPool) -> None:
        """Set vLLM's block pool, to know whether it has blocks that earlier weights have computed."""
        self._pool = pool

    def is_mixed(self) -> bool:
        """Return whether vLLM may have blocks that earlier weights have computed: neither load nor store.

        After it was reset once, it has none until the next change.
        """
        if self._mixed and self._pool_is_empty:
            self._mixed = self._expects_reset = False
        return self._mixed

    def is_reset_of_last_change(self) -> bool:
        """Return whether a reset completes the last change: its id was set before, so the id stays valid."""
        expected = self._expects_reset
        self.is_mixed()  # If vLLM's own reset was successful, the next one belongs to another change.
        return expected

    @property
    def _pool_is_empty(self) -> bool:
        return self._pool is not None and is_empty(self._pool)

    def log(self, version: str) -> None:
        """Log that the weights which a ``weight_version`` names are used from now on."""
        logger.info("weights %r: their chunks are used from now on", self.current.id or version)
        if self.is_mixed():
            logger.warning(
                "weights %r: vLLM still has KV of earlier weights. Nothing is loaded or stored until "
                "reset_prefix_cache, which should be called first, with reset_running_requests",
                version,
            )

    def name(self, version: str) -> bool:
        """Use the weights that a ``weight_version`` names. Return whether these are others than before."""
        weights_id = self._startup_id if version == STARTUP_VERSION else version
        if weights_id == self.current.id:
            return False
        if not weights_id and not (is_current := self._is_current_in_time()):
            # Loaded again, or not: which files these weights are from is unknown.
            logger.warning(
                "weight_version %r: the model's files %s, so its weights are unknown and share no chunk with "
                "other engines; give them another name",
                version,
                "have changed since the start"
                if is_current is not None
                else f"could not be compared with those at the start in {CHECK_SECONDS:g} s",
            )
            self.forget()
            return True
        self._use(weights_id)
        self.named = bool(weights_id)
        self._expects_reset = self._mixed
        return True

    def _is_current_in_time(self) -> bool | None:
        """Return whether the files are those at startup; ``None`` after :data:`CHECK_SECONDS`.

        On a file system that does not answer, the engine would block here for as long.
        """
        found: SimpleQueue[bool] = SimpleQueue()
        try:
            run_in_background(lambda: found.put(self._is_current()))
            return found.get(timeout=CHECK_SECONDS)
        except (Empty, RuntimeError):
            return None

    def forget(self) -> None:
        """Use a namespace that no other engine has: these weights may be any."""
        self._use(_unknown_id())
        self.named = self._expects_reset = False

    def _use(self, weights_id: str) -> None:
        self.current = Weights(self._namespace_of(weights_id), weights_id)
        self._mixed = not self._pool_is_empty
