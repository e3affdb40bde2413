"""A failed load of kvtier's is recomputed, whatever vLLM's ``kv_load_failure_policy`` is.

The policy is the engine's: under vLLM's ``MultiConnector`` a connector cannot set it, and it also applies to
the loads of other connectors, of which the user decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from kvtier.integrations.vllm.compat import connectors


def recompute_failed_loads() -> None:
    """Have vLLM's scheduler recompute the requests whose load kvtier reports as failed. Idempotent."""
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
