"""Methods of vLLM that the connector wraps, for what no hook of vLLM's interface reports or decides.

Adapters wrap one more, in workers: :func:`~kvtier.integrations.vllm.adapters.follow_loads`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm.compat import connectors

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

FINISH_SECONDS = 1.0
"""How long a reset waits for saves of requests that have finished."""


def recompute_failed_loads() -> None:
    """Have vLLM's scheduler recompute the requests whose load kvtier reports as failed. Idempotent.

    Whatever ``kv_load_failure_policy`` is. That is the engine's: under vLLM's ``MultiConnector`` a connector
    cannot set it, and it also applies to the loads of other connectors, of which the user decides.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._handle_failed_recving
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def handle_failed_recving(scheduler: Scheduler, request_ids: Iterable[str]) -> set[str]:
        ours = [each for each in connectors(scheduler) if hasattr(each, "loads_request")]
        own = {name for name in request_ids if any(each.loads_request(name) for each in ours)}
        policy, scheduler.recompute_kv_load_failures = scheduler.recompute_kv_load_failures, True
        try:
            failed: set[str] = original(scheduler, own)
        finally:
            scheduler.recompute_kv_load_failures = policy
        failed |= original(scheduler, set(request_ids) - own)
        return failed

    Scheduler._handle_failed_recving = handle_failed_recving


def follow_engine() -> None:
    """Have vLLM's engine core call its connectors when it gets other weights or adapters. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    for method, hook, first in (
        ("set_weight_version", "set_weight_version", False),
        ("add_lora", "adapter_loads", True),
        ("remove_lora", "adapter_removed", False),
    ):
        original = getattr(EngineCore, method)
        if not hasattr(original, "__wrapped__"):
            setattr(EngineCore, method, _followed(original, hook, first=first))


def _followed(original: Callable[..., Any], hook: str, *, first: bool) -> Callable[..., Any]:
    """Return a method of the engine core that also calls a method of its connectors, before or after."""

    @functools.wraps(original)
    def method(core: EngineCore, argument: Any) -> Any:
        result = None if first else original(core, argument)
        for each in connectors(core.scheduler):
            if hasattr(each, hook):
                getattr(each, hook)(argument)
        return original(core, argument) if first else result

    return method


def finish_before_resets() -> None:
    """Have an engine without a loop of its own take the steps that free blocks before a reset. Idempotent.

    Such an engine (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) takes no step after the last token of an answer. The
    blocks that the connector saves would still be used, and ``reset_prefix_cache`` and ``sleep`` would fail.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    original = EngineCore.reset_prefix_cache
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def reset_prefix_cache(core: EngineCore, *arguments: bool, **options: bool) -> bool:
        deadline = time.monotonic() + FINISH_SECONDS
        scheduler = core.scheduler
        if not isinstance(core, EngineCoreProc) and not scheduler.has_unfinished_requests():
            while scheduler.has_finished_requests() and time.monotonic() < deadline:
                core.step_fn()
        return bool(original(core, *arguments, **options))

    EngineCore.reset_prefix_cache = reset_prefix_cache
