"""From what somebody asks about, token ids or text, to the chunks of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

import anyio

from kvtier.agent.protocol import Model, Tokenize
from kvtier.controller.errors import CommandFailed, MemberGone, WrongRequest
from kvtier.controller.member import Member
from kvtier.controller.models import Prompt
from kvtier.controller.registry import Registry
from kvtier.threads import WorkerThreads

TOKENIZE_SECONDS = 30.0
MOST_TOKENIZERS = 3
"""Instances that are asked for the same prompt, one after the other."""
QUICK_TOKENS = 50_000
"""The keys of so many are computed where one stands; those of more in a thread."""


class Asked(NamedTuple):
    """What somebody asks about: either ``tokens`` or ``prompt``."""

    tokens: Sequence[int] | None
    prompt: str | None
    model: str | None
    salt: str = ""


class ModelPrompt(NamedTuple):
    """A prompt as one model in one layout has it."""

    model: Model
    prompt: Prompt

    def part(self, chosen: Sequence[bool]) -> ModelPrompt:
        """Only those chunks for which ``chosen`` is true."""
        keys, tokens, lengths = self.prompt
        part = Prompt(
            list(compress(keys, chosen)), list(compress(tokens, chosen)), list(compress(lengths, chosen))
        )
        return self._replace(prompt=part)

    def first(self, chunks: int) -> ModelPrompt:
        """Only so many leading chunks."""
        return self._replace(prompt=_slice(self.prompt, 0, chunks))

    def slices(self, most: int) -> Iterator[Prompt]:
        """The chunks, ``most`` at a time."""
        for start in range(0, len(self.prompt.keys), most):
            yield _slice(self.prompt, start, start + most)

    @property
    def num_tokens(self) -> int:
        """Of all its chunks."""
        return sum(self.prompt.tokens)


def _slice(prompt: Prompt, start: int, stop: int) -> Prompt:
    keys, tokens, lengths = prompt
    return Prompt(keys[start:stop], tokens[start:stop], lengths[start:stop])


class Prompts:
    """Finds models and chunks, with the help of the instances that tokenize."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._hop = WorkerThreads(1)

    def close(self) -> None:
        """End the threads."""
        self._hop.close()

    async def find(self, asked: Asked, named: Sequence[Member] = ()) -> list[ModelPrompt]:
        """The chunks of a prompt in every layout in which its model is known; never none.

        Of the model that the ``named`` instances serve where none is named. Raises ``UnknownModel``,
        ``AmbiguousModel``, ``WrongPrompt``, and ``WrongRequest`` where nobody can tokenize the prompt.
        """
        models = self._models(asked.model, named)
        tokens = asked.tokens
        if tokens is None:
            tokens = await self._tokenize(models, asked.prompt or "", named)
        return [ModelPrompt(model, await self._chunks(model, tokens, asked.salt)) for model in models]

    def _models(self, name: str | None, named: Sequence[Member]) -> list[Model]:
        models = self._registry.models
        served = {model.namespace: model for member in named for model in member.models}
        # What they serve decides only where they serve anything: chunks outlive engines.
        return models.find(name, list(served.values()) if name is None and served else None)

    async def _chunks(self, model: Model, tokens: Sequence[int], salt: str) -> Prompt:
        if len(tokens) <= QUICK_TOKENS:
            return self._registry.models.prompt(model, tokens, salt)
        chunks: list[Prompt] = []
        await self._hop(lambda: chunks.append(self._registry.models.prompt(model, tokens, salt)))
        return chunks[0]

    async def _tokenize(self, models: Sequence[Model], prompt: str, named: Sequence[Member]) -> Sequence[int]:
        failures = []
        for member, model in list(self._tokenizers(models, named))[:MOST_TOKENIZERS]:
            try:
                with anyio.fail_after(TOKENIZE_SECONDS):
                    done = await member.carry_out(partial(Tokenize, namespace=model.namespace, prompt=prompt))
                return done.tokens
            except (CommandFailed, MemberGone) as error:
                failures.append(f"{member.id}: {error}")
            except TimeoutError:
                failures.append(f"{member.id}: no answer within {TOKENIZE_SECONDS:g} s")
        why = "; ".join(failures) or "no instance that is connected has its tokenizer"
        raise WrongRequest(
            f"the prompt cannot be tokenized for model {models[0].names[0]!r} ({why}): send `tokens` instead"
        )

    def _tokenizers(self, models: Sequence[Model], named: Sequence[Member]) -> Iterator[tuple[Member, Model]]:
        """Who can, those first that were named."""
        namespaces = {model.namespace for model in models}
        others = [member for member in self._registry.members.values() if member not in named]
        for member in [*dict.fromkeys(named), *others]:
            for model in member.models:
                if model.tokenizer and model.namespace in namespaces:
                    yield member, model
                    break
