"""kvtier's connector with every hook timed: what the engines of a run load in its place."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm.connector import KVTierConnector
from soak.stalls import FOLDER, Stalls

SCHEDULING = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")
HOOKS = (
    *SCHEDULING,
    "on_new_request",
    "get_external_cache_hit_sources",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_kv_connector_stats",
)

_stalls: Stalls | None = None


def _of_this_process() -> Stalls:
    """Return the one of this process: scheduler and worker may share it, and then share its steps."""
    global _stalls
    if _stalls is None:
        _stalls = Stalls(Path(os.environ[FOLDER]) / f"hooks-{os.getpid()}.jsonl")
    return _stalls


def _timed(name: str) -> Any:  # noqa: ANN401 - as vLLM has it
    hook = getattr(KVTierConnector, name)

    @wraps(hook)
    def timed(self: TimedConnector, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        with _of_this_process().timed(
            name, schedules=name in SCHEDULING, scheduled=name == "build_connector_meta"
        ):
            return hook(self, *arguments, **named)

    return timed


class TimedConnector(KVTierConnector):
    """See the module."""

    def shutdown(self) -> None:
        """Judge the last step, and end."""
        _of_this_process().end_step()
        super().shutdown()


for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name))
