"""Which models the engines of this instance serve, and where their tokenizers are."""

from __future__ import annotations

from importlib.util import find_spec

import anyio
import msgspec

from kvtier.agent.protocol import Model
from kvtier.layout import ChunkLayout

MOST_MODELS = 64
MOST_NAMES = 16
"""Of one model."""
MOST_CHARACTERS = 256
"""In one name."""
MOST_ENGINES = 256
"""That are told of."""
PLAIN_MODES = ("hf", "cohere", "inkling", "kimi_k3")
"""vLLM's tokenizer modes in which the tokenizer is one of the library transformers."""


class TokenizerSource(msgspec.Struct, frozen=True, array_like=True):
    """What an engine loads its tokenizer from."""

    path: str
    """A directory or the name of a repository."""
    mode: str = "hf"
    """As vLLM has resolved it: not ``auto``."""
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def usable(self) -> bool:
        """Whether a helper process of this one can load it: by its kind, and as transformers is installed."""
        return self.mode in PLAIN_MODES and find_spec("transformers") is not None


class EngineModel(msgspec.Struct, frozen=True, array_like=True):
    """What an engine says of the model that it serves."""

    names: list[str]
    """What clients call it, the engine's own name for it first."""
    tokenizer: TokenizerSource | None = None


class _Served(msgspec.Struct):
    names: list[str]
    layout: ChunkLayout
    tokenizer: TokenizerSource | None


class Served:
    """Engines that are here, and models that they serve or have served. Belongs to one event loop."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[bytes, ChunkLayout]] = {}
        """By name, the namespace and the layout of each that is here."""
        self._models: dict[bytes, _Served] = {}
        self.version = 0
        """Another one whenever the models are others."""
        self._changed = anyio.Event()

    @property
    def engines(self) -> list[str]:
        """The engines that are here; a bounded number of them."""
        return [printable for name in list(self._engines)[:MOST_ENGINES] if (printable := _printable(name))]

    @property
    def models(self) -> list[Model]:
        """Every model, as the controller is told of it."""
        return [
            Model(
                list(model.names),
                namespace,
                model.layout,
                model.tokenizer is not None and model.tokenizer.usable,
            )
            for namespace, model in self._models.items()
        ]

    def came(self, engine: str, namespace: bytes, layout: ChunkLayout, model: EngineModel | None) -> None:
        """An engine has come, or has said which model it serves. Names that cannot be told are left out."""
        self._engines[engine] = namespace, layout
        names = [name for name in map(_printable, model.names if model else ()) if name]
        if model is None or not names:
            return
        known = self._models.pop(namespace, None)
        if known is not None:
            names = [*known.names, *names]
        names = list(dict.fromkeys(names))[:MOST_NAMES]
        self._models[namespace] = _Served(names, layout, model.tokenizer)
        self._forget_oldest()
        self.version += 1
        self._changed.set()
        self._changed = anyio.Event()

    def left(self, engine: str) -> None:
        """An engine has left. Its model is remembered: its chunks are still here."""
        self._engines.pop(engine, None)

    def refusal(self, namespace: bytes) -> str:
        """Why chunks of a model are of no use to the engines that are here; empty where they may be."""
        known = {*self._models, *(mine for mine, _ in self._engines.values())}
        if not self._engines or namespace in known:
            return ""
        layouts = sorted({str(layout) for _, layout in self._engines.values()})[:MOST_MODELS]
        return f"the engines there serve another model, or have another layout: {'; '.join(layouts)}"

    def tokenizer(self, namespace: bytes) -> TokenizerSource | None:
        """Where the tokenizer of a model is; ``None`` where that is not known."""
        model = self._models.get(namespace)
        return None if model is None else model.tokenizer

    async def changed(self, version: int) -> None:
        """Wait until the models are others than they were in a version."""
        while self.version == version:
            await self._changed.wait()

    def _forget_oldest(self) -> None:
        here = {namespace for namespace, _ in self._engines.values()}
        idle = [namespace for namespace in self._models if namespace not in here]
        for namespace in [*idle, *self._models][: max(0, len(self._models) - MOST_MODELS)]:
            del self._models[namespace]


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= MOST_CHARACTERS else ""
