"""The connector of the engines in a run: kvtier's, with every hook timed, and every connection noted."""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvtier.bridge import client
from kvtier.bridge.protocol import Hello, Welcome
from kvtier.integrations.vllm.connector import KVTierConnector
from kvtier.rpc.client import UnixConnection
from soak import links
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
_open_connection = client.open_connection


def _open_noted(path: Path, hello: Hello) -> UnixConnection[Welcome]:
    connection = _open_connection(path, hello)
    links.record(Path(os.environ[FOLDER]), hello.role, path, connection._frames.socket)
    return connection


client.open_connection = _open_noted


def _of_this_process() -> Stalls:
    """Return this process's instance. Scheduler and worker in one process share it, and its steps."""
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
    """kvtier's connector with timed hooks."""

    def shutdown(self) -> None:
        """Finish the last step, and shut down."""
        _of_this_process().end_step()
        super().shutdown()


for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name))

# MultiConnector finds the class of its children's statistics by name.
KVConnectorFactory.register_connector(TimedConnector.__name__, __name__, TimedConnector.__name__)
