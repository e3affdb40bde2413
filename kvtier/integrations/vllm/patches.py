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


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Have calls of a method call ``around`` with it and their arguments. Idempotent."""
    original = getattr(owner, name)
    if hasattr(original, "__wrapped__"):  # An earlier engine of this process has wrapped it.
        return

    @functools.wraps(original)
    def method(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, method)


def recompute_failed_loads() -> None:
    """Have vLLM's scheduler recompute the requests whose load kvtier reports as failed. Idempotent.

    Whatever ``kv_load_failure_policy`` is. That is the engine's: under vLLM's ``MultiConnector`` a connector
    cannot set it, and it also applies to the loads of other connectors, of which the user decides.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def handle(
        original: Callable[..., set[str]], scheduler: Scheduler, request_ids: Iterable[str]
    ) -> set[str]:
        ours = [each for each in connectors(scheduler) if hasattr(each, "loads_request")]
        own = {name for name in request_ids if any(each.loads_request(name) for each in ours)}
        policy, scheduler.recompute_kv_load_failures = scheduler.recompute_kv_load_failures, True
        try:
            failed = original(scheduler, own)
        finally:
            scheduler.recompute_kv_load_failures = policy
        failed |= original(scheduler, set(request_ids) - own)
        return failed

    wrap(Scheduler, "_handle_failed_recving", handle)


def follow_engine() -> None:
    """Have vLLM's engine core call its connectors when it gets other weights or adapters. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    def notify(original: Callable[..., Any], core: EngineCore, argument: Any, *, hook: str) -> Any:
        # Of an adapter, before: if its files change until the workers read them, the next check finds that.
        result = None if hook == "adapter_loads" else original(core, argument)
        for each in connectors(core.scheduler):
            if hasattr(each, hook):
                getattr(each, hook)(argument)
        return original(core, argument) if hook == "adapter_loads" else result

    hooks = {
        "set_weight_version": "set_weight_version",
        "add_lora": "adapter_loads",
        "remove_lora": "adapter_removed",
    }
    for method, hook in hooks.items():
        wrap(EngineCore, method, functools.partial(notify, hook=hook))


def finish_before_resets() -> None:
    """Have an engine without a loop of its own take the steps that free blocks before a reset. Idempotent.

    Such an engine (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) takes no step after the last token of an answer. The
    blocks that the connector saves would still be used, and ``reset_prefix_cache`` and ``sleep`` would fail.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    def reset(original: Callable[..., bool], core: EngineCore, *arguments: bool, **options: bool) -> bool:
        deadline = time.monotonic() + FINISH_SECONDS
        scheduler = core.scheduler
        if not isinstance(core, EngineCoreProc) and not scheduler.has_unfinished_requests():
            while scheduler.has_finished_requests() and time.monotonic() < deadline:
                core.step_fn()
        return bool(original(core, *arguments, **options))

    wrap(EngineCore, "reset_prefix_cache", reset)
