"""The code of an engine's process: a real vLLM, driven by JSON messages over a connection.

Like vLLM's own engine core, the loop steps while the scheduler has requests, and polls for messages between
steps. So requests can be added, aborted and counted while others run.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CONNECTOR = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.integrations.vllm.connector",
    "kv_role": "kv_both",
}


def serve(connection: Connection, log: str) -> None:
    """Answer messages until the connection closes or ``close`` arrives. The process's main function."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    host = _Host(connection)
    try:
        host.run()
    except EOFError:
        host.close()


LABELS = ("source", "tier", "reason")


class _Host:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._llm: Any = None
        self._running = True
        self._held = False
        """Whether the engine steps only on request."""
        self._calls: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "generate": self._generate,
            "abort": self._abort,
            "allow": self._allow,
            "reset": self._reset,
            "load_weights": self._load_weights,
            "name_weights": self._name_weights,
            "load_adapter": self._load_adapter,
            "metrics": self._metrics,
            "close": self._close,
        }
        self._pending: dict[str, int] = {}

    def run(self) -> None:
        while self._running:
            stepping = self._llm is not None and not self._held and self._core.scheduler.has_requests()
            if not stepping or self._connection.poll(0):
                self._answer(json.loads(self._connection.recv_bytes()))
            else:
                self._step()
                if not self._core.scheduler.running:
                    # As in vLLM's EngineCoreProc._process_engine_step, when nothing could be computed.
                    time.sleep(0.001)

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    def _answer(self, message: dict[str, Any]) -> None:
        number = message.pop("number")
        try:
            answer = self._calls[message.pop("call")](number, **message)
        except Exception as error:  # reported to the caller
            traceback.print_exc()
            self._send(number, error=f"{type(error).__name__}: {error}")
        else:
            if answer is not None:
                self._send(number, result=answer)

    def _send(self, number: int, **answer: Any) -> None:
        self._connection.send_bytes(json.dumps({"number": number, **answer}).encode())

    def _open(
        self,
        number: int,
        arguments: dict[str, Any],
        connector: dict[str, Any] | None,
        hub: dict[str, str] | None,
    ) -> int:
        os.environ.update(arguments.pop("environment", {}))
        if hub is not None:
            _use_hub(hub)
        from vllm import LLM
        from vllm.config import KVEventsConfig

        if arguments.pop("stages_on_cpu", False):
            from kvtier.integrations.vllm import staging

            staging.ON_DEVICES.add("cpu")
        if connector is not None:
            connector = {**CONNECTOR, **connector}
            arguments = {**arguments, "kv_transfer_config": connector}
        if "kv_events_config" in arguments:
            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        _reconnect_soon()
        if not arguments.pop("spawned_ranks", False) and arguments.get("tensor_parallel_size", 1) > 1:
            _fork_workers()
        self._llm = LLM(**arguments)
        return int(self._core.scheduler.block_size)

    def _generate(
        self,
        number: int,
        request: str,
        tokens: list[int] | str,
        sampling: dict[str, Any],
        salt: str | None,
        lora: dict[str, Any] | None,
        trace: str | None,
    ) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompt: dict[str, Any] = {"prompt" if isinstance(tokens, str) else "prompt_token_ids": tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        self._pending[request] = number
        self._llm.llm_engine.add_request(
            request,
            prompt,
            SamplingParams(**sampling),
            lora_request=LoRARequest(**lora) if lora else None,
            trace_headers={"traceparent": trace} if trace else None,
        )

    def _allow(self, number: int, steps: int | None) -> bool:
        self._held = steps is not None
        if steps and self._core.scheduler.has_requests():
            self._step()
        return True

    def _step(self) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished and output.request_id in self._pending:
                completion = output.outputs[0]
                self._send(
                    self._pending.pop(output.request_id),
                    result={
                        "tokens": list(completion.token_ids),
                        "cached": output.num_cached_tokens or 0,
                        "reason": completion.finish_reason,
                        "params": output.kv_transfer_params,
                        "logprobs": _logprobs(completion),
                    },
                )

    def _abort(self, number: int, requests: list[str]) -> bool:
        self._llm.llm_engine.abort_request(requests)
        for request in requests:
            if (waiting := self._pending.pop(request, None)) is not None:
                self._send(waiting, result={"tokens": [], "cached": 0, "reason": "abort"})
        return True

    def _reset(self, number: int, external: bool, running: bool = False) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=external))

    def _load_weights(self, number: int, path: str) -> bool:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return True

    def _name_weights(self, number: int, version: str) -> bool:
        self._llm.update_weight_version(version)
        return True

    def _load_adapter(self, number: int, lora: dict[str, Any]) -> bool:
        from vllm.lora.request import LoRARequest

        return bool(self._llm.llm_engine.add_lora(LoRARequest(**lora)))

    def _metrics(self, number: int) -> dict[str, float]:
        """Return every counter and gauge: ``name``, or ``name{label}`` if it has one of :data:`LABELS`."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                label = next((sample.labels[name] for name in LABELS if name in sample.labels), None)
                name = f"{sample.name}{{{label}}}" if label else sample.name
                found[name] = found.get(name, 0) + sample.value
        pool = self._core.scheduler.kv_cache_manager.block_pool
        found["free_blocks"] = pool.get_num_free_blocks()
        found["blocks"] = pool.num_gpu_blocks
        from kvtier.integrations.vllm.compat import connectors

        ours = [each for each in connectors(self._core.scheduler) if hasattr(each, "loads_request")]
        found["waited"] = sum(each._scheduler.first._bridge.waited for each in ours)
        return found

    def _close(self, number: int) -> bool:
        self.close()
        self._running = False
        return True

    def close(self) -> None:
        """Shut the engine down as a server does on exit."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()


def _reconnect_soon() -> None:
    """Let the bridges look for a restarted cache process within a second, where they back off up to 30."""
    from kvtier.rpc import client

    client.MIN_RETRY_SECONDS, client.MAX_RETRY_SECONDS = 0.1, 1.0


def _use_hub(variables: dict[str, str]) -> None:
    """Let huggingface_hub read these variables again: the parent has imported it for use without a hub."""
    from huggingface_hub import constants, hf_api

    os.environ.update(variables)
    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT


def _fork_workers() -> None:
    """Fork the workers of this engine, which has imported everything that they need.

    vLLM spawns them on CPUs, whatever its environment requests, and each imports vLLM for itself: that takes
    ten times as long as the rest of a test.
    """
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def _logprobs(completion: Any) -> list[dict[str, float]] | None:
    if completion.logprobs is None:
        return None
    return [
        {str(token): entry.logprob for token, entry in position.items()} for position in completion.logprobs
    ]
