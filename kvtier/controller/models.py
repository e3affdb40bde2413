"""The models that instances have told of, and what a prompt is made of in one of them.

A model here is one *namespace*: a model in one layout. Engines that arrange their KV differently share no
chunks, so one name may stand for several of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.agent.protocol import Model
from kvtier.controller.checks import MOST_NAMES
from kvtier.controller.errors import AmbiguousModel, UnknownModel, WrongPrompt
from kvtier.header import object_bytes
from kvtier.keys import ChunkKey, chunk_keys, root_key

MOST_MODELS = 4096
"""Remembered. Beyond, the one is forgotten that was told of the longest ago."""


class Prompt(NamedTuple):
    """A prompt in chunks, in prefix order. The last of them may be shorter than the others."""

    keys: Sequence[ChunkKey]
    tokens: Sequence[int]
    """By chunk: how many."""
    lengths: Sequence[int]
    """By chunk: the bytes of its chunk object."""

    def leading_tokens(self, chunks: int) -> int:
        """How many tokens the first so many chunks are."""
        return sum(self.tokens[:chunks])


class Models:
    """By name and by namespace. A model stays known when no instance serves it any longer."""

    def __init__(self) -> None:
        self._models: dict[bytes, Model] = {}

    def add(self, models: Iterable[Model]) -> None:
        """An instance serves these."""
        for model in models:
            known = self._models.pop(model.namespace, None)
            if known is not None:
                names = list(dict.fromkeys([*model.names, *known.names]))[:MOST_NAMES]
                model = Model(names, model.namespace, model.layout, model.tokenizer)
            self._models[model.namespace] = model
            if len(self._models) > MOST_MODELS:
                del self._models[next(iter(self._models))]

    def all(self) -> list[Model]:
        """Every model that is known, one for each namespace."""
        return list(self._models.values())

    def find(self, name: str | None, among: Sequence[Model] | None = None) -> list[Model]:
        """The model of this name in every layout that there is, or the only one where no name is given.

        ``among`` leaves out all others. Raises :class:`UnknownModel` and :class:`AmbiguousModel`.
        """
        models = self.all() if among is None else among
        if name is not None:
            found = [model for model in models if name in model.names]
            if not found:
                raise UnknownModel(name, {known for model in models for known in model.names})
            return found
        names = {model.names[0] for model in models}
        if not names:
            raise UnknownModel(None, ())
        if len(names) > 1:
            raise AmbiguousModel(names)
        return list(models)

    def prompt(self, model: Model, tokens: Sequence[int], salt: str = "") -> Prompt:
        """What the tokens are made of in this model. Raises :class:`WrongPrompt`.

        About 15 ms for a million tokens.
        """
        layout = model.layout
        try:
            keys = chunk_keys(root_key(model.namespace, salt), tokens, layout.chunk_tokens, tail=True)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise WrongPrompt(f"token ids are whole numbers from 0 to 4294967295: {error}") from error
        full, rest = divmod(len(tokens), layout.chunk_tokens)
        lengths = [object_bytes(layout.payload_bytes(layout.chunk_tokens))] * full
        if rest:
            lengths.append(object_bytes(layout.payload_bytes(rest)))
        return Prompt(keys, [layout.chunk_tokens] * full + [rest] * bool(rest), lengths)
