"""Registry of this instance's engines and programs, their models and the location of their tokenizers."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from kvtier.concurrency.tasks import Changes
from kvtier.fleet.member.protocol import Model
from kvtier.memory.layout import ChunkLayout

MAX_MODELS = 64
MAX_NAMES = 16
"""Maximum number of names per model."""
MAX_CHARACTERS = 256
"""Maximum length of a name."""
MAX_ENGINES = 256
"""Maximum number of engines that are reported."""
PLAIN_MODES = ("hf", "cohere", "inkling", "kimi_k3")
"""vLLM's tokenizer modes that use a tokenizer of the transformers library."""


class TokenizerSource(msgspec.Struct, frozen=True, array_like=True):
    """Location of an engine's tokenizer."""

    path: str
    """Directory, or name of a repository."""
    mode: str = "hf"
    """The mode that vLLM has resolved, not ``auto``."""
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def usable(self) -> bool:
        """Whether a helper process can load it: its mode is supported, and transformers is installed."""
        return self.mode in PLAIN_MODES and find_spec("transformers") is not None


class EngineModel(msgspec.Struct, frozen=True, array_like=True):
    """The model that an engine serves, as reported by the engine."""

    names: list[str]
    """Names that clients use for it. The engine's own name is the first."""
    tokenizer: TokenizerSource | None = None


class _Served(msgspec.Struct):
    names: list[str]
    layout: ChunkLayout
    tokenizer: TokenizerSource | None


class ServedModels:
    """Connected engines, and the models that they or programs have used. Confined to one event loop."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[bytes, ChunkLayout]] = {}
        """The namespace and the layout of each connected engine, by name."""
        self._models: dict[bytes, _Served] = {}
        self.changes = Changes()
        """Of the models."""

    @property
    def engines(self) -> list[str]:
        """Names of the connected engines, :data:`MAX_ENGINES` at most."""
        return [printable for name in list(self._engines)[:MAX_ENGINES] if (printable := _printable(name))]

    @property
    def models(self) -> list[Model]:
        """All models, as reported to the controller."""
        return [
            Model(
                list(model.names),
                namespace,
                model.layout,
                model.tokenizer is not None and model.tokenizer.usable,
            )
            for namespace, model in self._models.items()
        ]

    def add(self, engine: str, namespace: bytes, layout: ChunkLayout, model: EngineModel | None) -> None:
        """Add an engine, or the model that it serves. Ignores names that are too long or not printable."""
        self._engines[engine] = namespace, layout
        if model is not None:
            self.add_model(namespace, layout, model)

    def add_model(self, namespace: bytes, layout: ChunkLayout, model: EngineModel) -> None:
        """Add a model, whether or not an engine serves it. Ignores names as :meth:`add` does."""
        names = [name for name in map(_printable, model.names) if name]
        if not names:
            return
        # The last one is the one that was reported last, see _forget_oldest.
        known = self._models.pop(namespace, None)
        if known is not None:
            names = [*known.names, *names]
        names = list(dict.fromkeys(names))[:MAX_NAMES]
        served = self._models[namespace] = _Served(names, layout, model.tokenizer)
        if served == known:
            return
        self._forget_oldest()
        self.changes.notify()

    def remove(self, engine: str) -> None:
        """Remove a disconnected engine. Keep its model, whose chunks are still cached."""
        self._engines.pop(engine, None)

    def refusal(self, namespace: bytes) -> str:
        """Return why the connected engines cannot use chunks of a model; empty if they can."""
        known = {*self._models, *(used for used, _ in self._engines.values())}
        if not self._engines or namespace in known:
            return ""
        layouts = sorted({str(layout) for _, layout in self._engines.values()})[:MAX_MODELS]
        return f"the engines there have another model, other weights or another layout: {'; '.join(layouts)}"

    def tokenizer(self, namespace: bytes) -> TokenizerSource | None:
        """Return the location of a model's tokenizer; ``None`` if it is unknown."""
        model = self._models.get(namespace)
        return None if model is None else model.tokenizer

    def _forget_oldest(self) -> None:
        connected = {namespace for namespace, _ in self._engines.values()}
        idle = [namespace for namespace in self._models if namespace not in connected]
        for namespace in [*idle, *self._models][: max(0, len(self._models) - MAX_MODELS)]:
            del self._models[namespace]


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= MAX_CHARACTERS else ""
