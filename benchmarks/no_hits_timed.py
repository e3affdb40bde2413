"""The connector with a clock around each hook, for benchmarks/no_hits.py."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter

from kvtier.integrations.vllm.connector import KVTierConnector

HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "take_events"),
    *("start_load_kv", "wait_for_save", "get_transfer_results", "get_kv_connector_stats"),
)
WALL = Counter("no_hits_hooks", "seconds in hooks")
CPU = Counter("no_hits_hooks_cpu", "CPU seconds in hooks")


def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Count the seconds of a hook, of scheduler and worker together: both run in the engine's process."""

    @functools.wraps(hook)
    def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - any hook's
        started, cpu = time.perf_counter(), time.thread_time()
        try:
            return hook(*arguments, **options)
        finally:
            CPU.inc(time.thread_time() - cpu)
            WALL.inc(time.perf_counter() - started)

    return run


Timed = type("Timed", (KVTierConnector,), {name: timed(getattr(KVTierConnector, name)) for name in HOOKS})
