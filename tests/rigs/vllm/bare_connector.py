"""A connector of given sides, without the configuration of an engine that vLLM creates it with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.integrations.vllm.connector import KVTierConnector


def bare_connector(
    *, scheduler: Any = None, worker: Any = None, model: Any = None, device: str = "cuda", spins: bool = False
) -> KVTierConnector:
    """Return the connector of a scheduler's or a worker's side, whose calls the test makes as vLLM does."""
    made: Any = object.__new__(KVTierConnector)
    made._scheduler, made._worker, made._model, made._spins = scheduler, worker, model, spins
    made._vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    made._log = SimpleNamespace(flush=lambda: None)
    connector: KVTierConnector = made
    return connector
