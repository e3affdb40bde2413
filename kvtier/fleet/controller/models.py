"""The models that instances have reported, and the chunk keys of prompts for a model.

A model here is one *namespace*: a model in one KV layout. Engines with different layouts share no chunks, so
one name may refer to several namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.fleet.controller.checks import MAX_NAMES
from kvtier.fleet.controller.errors import AmbiguousModel, UnknownModel, WrongPrompt
from kvtier.fleet.member.protocol import Model
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import ChunkKey, chunk_keys, root_key

MAX_MODELS = 4096
"""Known models. Beyond this, the least recently reported one is dropped."""


class Prompt(NamedTuple):
    """A prompt in chunks, in prefix order. The last chunk may be partial."""

    keys: Sequence[ChunkKey]
    tokens: Sequence[int]
    """Number of tokens of each chunk."""
    lengths: Sequence[int]
    """Size of each chunk object in bytes."""

    def leading_tokens(self, chunks: int) -> int:
        """Return the number of tokens in the first ``chunks`` chunks."""
        return sum(self.tokens[:chunks])


class Models:
    """Known models by name and namespace. A model stays known after all its instances have disconnected."""

    def __init__(self) -> None:
        self._models: dict[bytes, Model] = {}

    def add(self, models: Iterable[Model]) -> None:
        """Add the models that an instance serves."""
        for model in models:
            known = self._models.pop(model.namespace, None)
            if known is not None:
                names = list(dict.fromkeys([*model.names, *known.names]))[:MAX_NAMES]
                model = Model(names, model.namespace, model.layout, model.tokenizer)
            self._models[model.namespace] = model
            if len(self._models) > MAX_MODELS:
                del self._models[next(iter(self._models))]

    def all(self) -> list[Model]:
        """Return all known models, one per namespace."""
        return list(self._models.values())

    def find(self, name: str | None, among: Sequence[Model] | None = None) -> list[Model]:
        """Return the model with this name in all known layouts. Without a name, the only known model.

        ``among`` restricts the search to these models. Raises: UnknownModel, AmbiguousModel.
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
        """Return the chunks of a prompt for a model. Takes about 15 ms for a million tokens.

        Raises: WrongPrompt.
        """
        layout = model.layout
        try:
            keys = chunk_keys(root_key(model.namespace, salt), tokens, layout.chunk_tokens, tail=True)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise WrongPrompt(f"token ids must be integers from 0 to 4294967295: {error}") from error
        full, rest = divmod(len(tokens), layout.chunk_tokens)
        lengths = [object_bytes(layout.payload_bytes(layout.chunk_tokens))] * full
        if rest:
            lengths.append(object_bytes(layout.payload_bytes(rest)))
        return Prompt(keys, [layout.chunk_tokens] * full + [rest] * bool(rest), lengths)
