"""Identity of a model's weights: by the content of its files, or by its commit on a hub."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.integrations.vllm.plain import commit_of
from kvtier.memory.fingerprint import Signature, fingerprint, signature

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvtier")

LOCAL_FORMATS = frozenset(
    (
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache"),
        *("pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
    )
)
"""vLLM's load formats that read the files of the model's folder."""

_WEIGHTS = (".bin", ".ckpt", ".gguf", ".pt", ".pth", ".safetensors")
_OTHERS = (".json", ".py", ".yaml", ".yml")
_IRRELEVANT = re.compile(
    "tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config"
    "|trainer_state|training_args|optimizer|scheduler|rng_state"
)
"""Files that change no KV of given tokens: keys are made of token ids. Training writes others as well."""
_ADAPTER = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin|pt)")
_COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})")
"""The folder of a commit in the cache of Hugging Face's hub."""


class Identity(NamedTuple):
    """What distinguishes the weights of one model from all others."""

    key: tuple[str, ...] = ()
    """Empty if only the model's name does."""
    reason: str = ""
    """Why the key is empty."""
    files: Signature = ()
    """Empty if the key is not that of files."""
    path: Path = Path()

    def is_current(self) -> bool:
        """Return whether the files are still those that were read. Blocks for some milliseconds."""
        try:
            return not self.files or signature(self.path, decides_kv) == self.files
        except OSError:
            return False

    def __str__(self) -> str:
        """Return what to compare between engines, for the log."""
        match self.key:
            case ("files", digest):
                return f"files {digest[:16]}"
            case ("hub", name, commit):
                return f"hub {name} @ {commit[:12]}"
        return "their name only"


class Identities(NamedTuple):
    """The weights that an engine has started with."""

    model: Identity = Identity()
    drafter: Identity = Identity()

    @classmethod
    def of(cls, vllm_config: VllmConfig, weights_id: str) -> Identities:
        """Read the files of an engine's models; not those of weights that the setting ``weights_id`` names.

        Blocks for up to 0.1 s for each model, longer on a slow disk or network.
        """
        model, drafter = vllm_config.model_config, draft_model(vllm_config)
        target = Identity() if weights_id else identify(vllm_config, model)
        if drafter is None or drafter.model == model.model:  # MTP modules are in the model's own files.
            return cls(target, target)
        return cls(target, identify(vllm_config, drafter))

    def log(self, vllm_config: VllmConfig, weights_id: str) -> None:
        """Log what identifies the weights: which by their name alone, and the remedy."""
        drafter = "" if self.drafter in (self.model, Identity()) else f"; of the drafter: {self.drafter}"
        logger.info("weights: %s%s", f"weights_id {weights_id}" if weights_id else self.model, drafter)
        if self.were_replaced():
            logger.warning(
                "the files of %s have changed since vLLM started to load them, so its weights are unknown "
                "and share no chunk with other engines: start it again",
                vllm_config.model_config.model,
            )
        if self.model.reason:
            logger.warning(
                "the weights of %s cannot be identified (%s), so chunks of others with this name are hits: "
                "set `weights_id` to another text whenever they change, such as KVTIER_WEIGHTS_ID=step-1200",
                vllm_config.model_config.model,
                self.model.reason,
            )
        if self.drafter.reason and self.drafter is not self.model:
            logger.warning(
                "the weights of the drafter %s cannot be identified (%s): use another name if they change",
                vllm_config.speculative_config.draft_model_config.model,
                self.drafter.reason,
            )

    def are_current(self) -> bool:
        """Return whether all files are still those that vLLM has loaded. Blocks for some milliseconds."""
        return not self.were_replaced() and self.model.is_current() and self.drafter.is_current()

    def were_replaced(self) -> bool:
        """Return whether a file has changed since vLLM started this process, to load the model.

        ``False`` in a process that is not vLLM's own, which may have written the files itself.
        """
        from vllm import envs

        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING or multiprocessing.parent_process() is None:
            return False
        started = time.time_ns() - _age_of_process()
        return any(file.changed > started for each in self for file in each.files)


NAMES_ONLY = Identities()
"""Of weights that only their names identify."""


def draft_model(vllm_config: VllmConfig) -> Any:
    """Return vLLM's configuration of the model that drafts, if it has KV of its own; otherwise ``None``.

    Such drafters (EAGLE, MTP, draft models) add layers to vLLM's KV-cache groups, stored like any others.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    return speculative.draft_model_config


def decides_kv(name: str) -> bool:
    """Return whether a model's file may change the KV of given tokens, by its name.

    Not those of tokenizers. Those of image processors do: a request has only the hash of an image.
    """
    return name.endswith((*_WEIGHTS, *_OTHERS)) and not _IRRELEVANT.match(name)


def is_adapter(name: str) -> bool:
    """Return whether vLLM reads a file of an adapter's folder."""
    return _ADAPTER.fullmatch(name) is not None


def identify(vllm_config: VllmConfig, model: Any) -> Identity:
    """Return the identity of vLLM's ``ModelConfig`` of a model or drafter. Blocks for up to 0.1 s."""
    load_format = getattr(vllm_config.load_config, "load_format", "auto")
    load_format = str(getattr(load_format, "value", load_format))
    if load_format not in LOCAL_FORMATS:
        return Identity(reason=f"load_format is {load_format}")
    if getattr(model, "model_weights", ""):
        return Identity(reason="they are in an object storage")
    path = Path(str(model.model))
    if not path.exists():
        commit = _commit(vllm_config, model)
        if commit is None:
            return Identity(reason="they are not in a local folder, and their commit is unknown")
        return Identity(("hub", str(model.model), commit))
    try:
        files = signature(path, decides_kv)
        # Nothing writes to the files of the hub's cache: the folder of a commit has only links to them.
        found = _SNAPSHOT.search(str(path))
        if found and all((path / file.name).is_symlink() for file in files):
            return Identity(("hub", found[1].replace("--", "/"), found[2]))
        return Identity(("files", fingerprint(path, files)), files=files, path=path)
    except OSError as error:
        return Identity(reason=str(error))


def _commit(vllm_config: VllmConfig, model: Any) -> str | None:
    """Return the commit of a model of a hub, which vLLM has loaded before."""
    revision = commit_of(model.revision) or "main"
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import try_to_load_from_cache

    for folder in (None, getattr(vllm_config.load_config, "download_dir", None)):
        try:
            file = try_to_load_from_cache(str(model.model), "config.json", folder, revision)
        except ValueError:  # It is not the name of a model.
            return None
        if isinstance(file, str) and (found := _SNAPSHOT.search(file)):
            return found[2]
    return None


def _age_of_process() -> int:
    """Return for how many nanoseconds this process has run (proc(5), ``starttime``)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    started = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started
