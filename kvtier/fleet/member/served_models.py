"""Registry of this instance's engines and programs, their models and the location of their tokenizers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import msgspec

from kvtier.concurrency.tasks import Changes
from kvtier.fleet.member.protocol import Model
from kvtier.logs import Finding
from kvtier.memory.layout import LAYERS, ChunkLayout

MAX_MODELS = 64
MAX_NAMES = 16
"""Maximum number of names per model."""
MAX_CHARACTERS = 256
"""Maximum length of a name."""
MAX_ENGINES = 256
"""Maximum number of engines that are reported."""
MAX_LISTED = 4
MODEL = "config.json, drafter, --hf-overrides and options of inputs"
"""The fact that covers all others of a model, and is named if it alone differs."""
_PART = re.compile(r"part \d+ of \d+")
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
    facts: dict[str, str] = msgspec.field(default_factory=dict)
    """What distinguishes its KV from that of others in the same layout, by what to set."""
    max_tokens: int = 0
    """The longest prompt with its answer; 0 if that is unknown."""
    findings: list[Finding] = msgspec.field(default_factory=list)
    """What the engine has found about it."""


class Described(NamedTuple):
    """Who serves a model, and what distinguishes its KV."""

    where: str
    names: Sequence[str]
    namespace: bytes
    layout: ChunkLayout
    facts: Mapping[str, str]


def disagreements(served: Iterable[Described]) -> Iterator[Finding]:
    """Yield how some of those that serve a model under the same name have other KV than most.

    The parts of an engine have different layers, and are compared with the same part of others.
    """
    groups: dict[tuple[str, str], dict[bytes, list[Described]]] = {}
    for each in served:
        part = _PART.search(each.layout.platform)
        for name in each.names if each.facts else ():
            group = groups.setdefault((name, part[0] if part else ""), {})
            group.setdefault(each.namespace, []).append(each)
    compared: set[tuple[bytes, bytes]] = set()
    for (name, _), by_namespace in groups.items():
        most, *others = sorted(by_namespace.values(), key=len, reverse=True)
        for other in others:
            pair = most[0].namespace, other[0].namespace
            if pair in compared:
                continue
            compared.add(pair)
            one, two = ({**each[0].layout.fields(), **each[0].facts} for each in (other, most))
            fields = [field for field in {**one, **two} if one.get(field) != two.get(field)]
            fields = [field for field in fields if field not in (LAYERS, MODEL)] or fields or ["weights_id"]
            values = ", ".join(
                f"{field} {one.get(field) or '-'} instead of {two.get(field) or '-'}" for field in fields
            )
            wheres = (listed([each.where for each in group]) for group in (other, most))
            who = " and ".join(dict.fromkeys(wheres))
            yield Finding(
                f"{who} share no chunk of {name}: {values}",
                f"start all of them with the same {', '.join(fields)}",
            )


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


class ServedModels:
    """Connected engines, and the models that they or programs have used. Confined to one event loop."""

    def __init__(self) -> None:
        self._engines: dict[str, Described] = {}
        """The connected engines, by name."""
        self._models: dict[bytes, tuple[ChunkLayout, EngineModel]] = {}
        self.changes = Changes()
        """Of the models."""

    @property
    def engines(self) -> list[str]:
        """Names of the connected engines, :data:`MAX_ENGINES` at most."""
        return [printable for name in list(self._engines)[:MAX_ENGINES] if (printable := _printable(name))]

    @property
    def models(self) -> list[Model]:
        """All models, as reported to the controller."""
        connected = self._connected
        return [
            Model(
                list(model.names),
                namespace,
                layout,
                model.tokenizer is not None and model.tokenizer.usable,
                model.facts if namespace in connected else {},
            )
            for namespace, (layout, model) in self._models.items()
        ]

    @property
    def _connected(self) -> set[bytes]:
        return {engine.namespace for engine in self._engines.values()}

    def add(self, engine: str, namespace: bytes, layout: ChunkLayout, model: EngineModel | None) -> None:
        """Add an engine, or the model that it serves. Ignores names that are too long or not printable."""
        known, described = self._engines.get(engine), model or EngineModel([])
        if known is None or known.namespace != namespace:
            self.changes.notify()
        self._engines[engine] = Described(
            f"engine {engine}", described.names, namespace, layout, described.facts
        )
        self.add_model(namespace, layout, described)

    def disagreements(self) -> Iterator[Finding]:
        """Yield how connected engines that serve the same model differ."""
        return disagreements(self._engines.values())

    def add_model(self, namespace: bytes, layout: ChunkLayout, model: EngineModel) -> None:
        """Add a model, whether or not an engine serves it. Ignores names as :meth:`add` does."""
        names = [name for name in map(_printable, model.names) if name]
        if not names:
            return
        # The last one is the one that was reported last, see _forget_oldest.
        known = self._models.pop(namespace, None)
        if known is not None:
            names = [*known[1].names, *names]
        names = list(dict.fromkeys(names))[:MAX_NAMES]
        served = self._models[namespace] = layout, msgspec.structs.replace(model, names=names)
        if served == known:
            return
        self._forget_oldest()
        self.changes.notify()

    def remove(self, engine: str) -> None:
        """Remove a disconnected engine. Keep its model, whose chunks are still cached."""
        if self._engines.pop(engine, None) is not None:
            self.changes.notify()

    def refusal(self, namespace: bytes) -> str:
        """Return why the connected engines cannot use chunks of a model; empty if they can."""
        known = {*self._models, *self._connected}
        if not self._engines or namespace in known:
            return ""
        layouts = sorted({str(engine.layout) for engine in self._engines.values()})[:MAX_MODELS]
        return f"the engines there have another model, other weights or another layout: {'; '.join(layouts)}"

    def tokenizer(self, namespace: bytes) -> TokenizerSource | None:
        """Return the location of a model's tokenizer; ``None`` if it is unknown."""
        model = self._models.get(namespace)
        return None if model is None else model[1].tokenizer

    def _forget_oldest(self) -> None:
        connected = self._connected
        idle = [namespace for namespace in self._models if namespace not in connected]
        for namespace in [*idle, *self._models][: max(0, len(self._models) - MAX_MODELS)]:
            del self._models[namespace]


def _printable(name: str) -> str:
    return name if name.isprintable() and len(name) <= MAX_CHARACTERS else ""
