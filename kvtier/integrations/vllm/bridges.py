"""Open the bridges from an engine's scheduler and workers to the cache process of their host.

Their greeting also names the model that the engine serves, for clients of the controller.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from kvtier.bridge import protocol
from kvtier.bridge.client import SchedulerBridge, WorkerBridge
from kvtier.bridge.protocol import Hello, Role, Weights
from kvtier.bridge.spawn import CacheProcess, default_address
from kvtier.errors import ChannelError
from kvtier.fleet.member.chat_template import find_insertion
from kvtier.fleet.member.served_models import EngineModel, TokenizerSource
from kvtier.integrations.vllm.plain import commit_of, text
from kvtier.logs import Finding
from kvtier.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvtier.integrations.vllm.layout import ModelLayout

logger = logging.getLogger("vllm.kvtier")

IDLE_TIMEOUT_SECONDS = 10.0
"""Time with ``prefetch.policy: wait`` after which a cache process that does not answer is unresponsive."""

BridgeT = TypeVar("BridgeT", SchedulerBridge, WorkerBridge)


class Bridges(NamedTuple):
    """Opens the bridges of one engine. Each opening waits for the welcome."""

    settings: Settings
    engine: str
    """vLLM's id of the engine."""

    @property
    def waits(self) -> bool:
        """Whether requests wait for their chunks without a deadline."""
        return self.settings.prefetch.policy == "wait"

    def scheduler(
        self, model: ModelLayout, served: EngineModel, weights: Weights, *, to: str = ""
    ) -> SchedulerBridge:
        """Connect the scheduler to the cache process of a part: of this host, or at the address ``to``."""
        hello = msgspec.structs.replace(
            self._hello(model, "scheduler", 0), model=served, weights=weights, to=to
        )
        return self._open(SchedulerBridge, hello)

    def worker(self, model: ModelLayout, rank: int) -> WorkerBridge:
        """Connect a worker, by its rank within its part."""
        return self._open(WorkerBridge, self._hello(model, "worker", rank))

    def _hello(self, model: ModelLayout, role: Role, rank: int) -> Hello:
        engine = self.engine if model.parts == 1 else f"{self.engine}/{model.part}"
        return Hello(protocol.VERSION, engine, role, rank, model.layout, model.namespace)

    def _open(self, bridge_type: type[BridgeT], hello: Hello) -> BridgeT:
        """Connect to the cache process of ``settings.socket``, or start one if that is not set."""
        path = self.settings.socket or default_address(self.settings)
        starts = self.settings.socket is None and not hello.to
        process = CacheProcess(self.settings, path) if starts else None
        bridge = bridge_type(hello, path, process.start_in_background if process else None, logger)
        if self.waits:
            bridge.expect_answers_within(IDLE_TIMEOUT_SECONDS)
        if process is not None:
            process.start_and_wait(bridge.connect)
            return bridge
        try:
            bridge.connect()
        except ChannelError as error:
            command = f"KVTIER_SOCKET={path} kvtier serve"
            remedy = f"on the host of {hello.to}" if hello.to else f"start it: {command}"
            logger.warning("%s: continuing without a cache until it is reachable (%s)", error, remedy)
        return bridge


def engine_model(vllm_config: VllmConfig, facts: dict[str, str]) -> EngineModel:
    """Return an engine's model. vLLM only keeps the first served name here. ``facts``: about its KV."""
    model = vllm_config.model_config
    served = model.served_model_name
    names = [served] if isinstance(served, str) else list(served or ())
    unique, tokenizer = list(dict.fromkeys(map(text, [*names, model.model]))), _tokenizer(model)
    inserted = None if tokenizer is None else find_insertion(Path(tokenizer.path))
    template = f"the chat template of {unique[0]} {inserted}"
    findings = [] if inserted is None else [Finding(template, inserted.remedy)]
    return EngineModel(unique, tokenizer, facts, int(model.max_model_len), findings)


def _tokenizer(model: Any) -> TokenizerSource | None:
    """Return the tokenizer's location and mode, as vLLM resolves them; ``None`` if they are unknown."""
    if model.skip_tokenizer_init:
        return None
    try:
        from vllm.tokenizers.registry import (
            _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS,
            tokenizer_args_from_config,
        )

        if model.hf_config.model_type in _MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS:
            return None  # Loaded as its repository declares, it would not match vLLM's tokens.
        mode, path, _, _ = tokenizer_args_from_config(model)
    except Exception:  # Optional: clients of the controller can send token ids instead of text.
        logger.debug("cannot locate the tokenizer", exc_info=True)
        return None
    commit = commit_of(model.tokenizer_revision)
    folder = _downloaded(text(path), commit)
    return TokenizerSource(folder, text(mode), commit, bool(model.trust_remote_code))


def _downloaded(path: str, revision: str | None) -> str:
    """Return the folder of a hub's tokenizer, which vLLM has loaded; the path itself if it is one.

    vLLM resolves it itself from 0.32 on. A cache process may have no access to the hub.
    """
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception:  # Such as a download to another folder.
        logger.debug("the tokenizer %s is not in the folder of downloads", path, exc_info=True)
        return path
