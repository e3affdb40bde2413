"""Resolution of prompts, given as token ids or text, into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import anyio
import msgspec
from anyio import to_thread

from kvtier.fleet.controller.bodies import PromptBody
from kvtier.fleet.controller.errors import CommandFailed, MemberGone, WrongPrompt, WrongRequest
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import Model, Tokenize
from kvtier.memory.header import object_bytes
from kvtier.memory.keys import ChunkKey, chunk_key, chunk_keys, encode_tokens, root_key

TOKENIZE_SECONDS = 30.0
MAX_TOKENIZERS = 3
"""Instances to try for one prompt, one after the other."""
INLINE_TOKENS = 50_000
"""Up to this length, keys are computed in the event loop; beyond, in a worker thread."""


class PromptChunks(NamedTuple):
    """Chunks of a prompt in prefix order, for one model in one layout. The last one may be partial."""

    model: Model
    keys: Sequence[ChunkKey]
    tokens: Sequence[int]
    """Number of tokens of each chunk."""
    lengths: Sequence[int]
    """Size of each chunk object in bytes."""
    prompt_tokens: int = 0
    """Length of the whole prompt, of which its chunks may hold less."""

    @classmethod
    def of(cls, model: Model, tokens: Sequence[int], salt: str = "") -> PromptChunks:
        """Return the chunks of a prompt with its last whole block. Takes about 15 ms for a million tokens.

        Raises: WrongPrompt.
        """
        layout, prompt_tokens = model.layout, len(tokens)
        tokens = tokens[: layout.stored_tokens(prompt_tokens)]
        try:
            keys = chunk_keys(root_key(model.namespace, salt), tokens, layout.chunk_tokens, tail=True)
        except (OverflowError, TypeError, UnicodeEncodeError) as error:
            raise WrongPrompt(f"token ids must be integers from 0 to 4294967295: {error}") from error
        full, rest = divmod(len(tokens), layout.chunk_tokens)
        counts = [layout.chunk_tokens] * full + [rest] * bool(rest)
        size = object_bytes(layout.payload_bytes(layout.chunk_tokens))
        lengths = [size] * full + [object_bytes(layout.payload_bytes(rest)) for _ in counts[full:]]
        return cls(model, keys, counts, lengths, prompt_tokens)

    def to_its_end(self, tokens: Sequence[int], salt: str = "") -> PromptChunks:
        """Return the same with the chunk that ends where the prompt does, not with its last whole block.

        Engines store that while there is room, and whatever there is for decode instances.
        """
        layout = self.model.layout
        whole, rest = divmod(len(tokens), layout.chunk_tokens)
        parent = self.keys[whole - 1] if whole else root_key(self.model.namespace, salt)
        before, size = self.first(whole), object_bytes(layout.payload_bytes(rest))
        keys = [*before.keys, chunk_key(parent, encode_tokens(tokens[-rest:]))]
        return before._replace(keys=keys, tokens=[*before.tokens, rest], lengths=[*before.lengths, size])

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in its chunks."""
        return sum(self.tokens)

    def leading_tokens(self, chunks: int) -> int:
        """Return the number of tokens in the first ``chunks`` chunks."""
        return sum(self.tokens[:chunks])

    def selected(self, mask: Sequence[bool]) -> PromptChunks:
        """Return only the chunks for which ``mask`` is true."""
        return self._each(lambda column: list(compress(column, mask)))

    def first(self, chunks: int) -> PromptChunks:
        """Return only the first ``chunks`` chunks."""
        return self._each(itemgetter(slice(chunks)))

    def slices(self, size: int) -> Iterator[PromptChunks]:
        """Yield the chunks, ``size`` at a time."""
        for start in range(0, len(self.keys), size):
            yield self._each(itemgetter(slice(start, start + size)))

    def _each(self, choose: Callable[[Any], Any]) -> PromptChunks:
        columns = choose(self.keys), choose(self.tokens), choose(self.lengths)
        return PromptChunks(self.model, *columns, self.prompt_tokens)


def without_repeats(prompts: Sequence[PromptChunks]) -> Iterator[PromptChunks]:
    """Yield each without the chunks that one before it has."""
    seen = set[ChunkKey]()
    for chunks in prompts:
        yield chunks.selected([key not in seen for key in chunks.keys])
        seen.update(chunks.keys)


class Prompts:
    """Resolves prompts to models and chunks. Text is tokenized by instances."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._limiter = anyio.CapacityLimiter(1)

    async def find(self, body: PromptBody, preferred: Sequence[Member] = ()) -> list[PromptChunks]:
        """Return the chunks of a prompt in every known layout of its model, at least one.

        With more than whole blocks, if an instance holds that: then two have the same chunks but the last.

        Without a model name, the model is the one that the ``preferred`` instances serve.

        Raises: UnknownModel, AmbiguousModel, WrongPrompt, WrongRequest: no instance can tokenize the prompt.
        """
        models, tokens = await self.tokens(body, preferred)
        salt, holders = body.salt or "", self._registry.holders
        found = [await self._chunks(model, tokens, salt) for model in models]
        ends = [chunks.to_its_end(tokens, salt) for chunks in found if chunks.num_tokens < len(tokens)]
        return found + [chunks for chunks in ends if holders.prefixes(chunks.keys[-1:])]

    async def tokens(
        self, body: PromptBody, preferred: Sequence[Member] = ()
    ) -> tuple[list[Model], Sequence[int]]:
        """Return a prompt's model in every known layout, and its tokens. Raises: as :meth:`find`."""
        models = self._models(body.model, preferred)
        if body.tokens is not None:
            return models, body.tokens
        chat = None if body.messages is None else msgspec.json.encode(body.messages).decode()
        return models, await self._tokenize(models, chat or body.prompt or "", preferred, chat=bool(chat))

    def _models(self, name: str | None, preferred: Sequence[Member]) -> list[Model]:
        models = self._registry.models
        served = {model.namespace: model for member in preferred for model in member.models}
        # Restrict the search only if they serve any model: chunks outlive engines.
        return models.find(name, list(served.values()) if name is None and served else None)

    async def _chunks(self, model: Model, tokens: Sequence[int], salt: str) -> PromptChunks:
        if len(tokens) <= INLINE_TOKENS:
            return PromptChunks.of(model, tokens, salt)
        # In one thread only, because computing keys takes the interpreter from the event loop. A thread that
        # is abandoned would not count.
        return await to_thread.run_sync(PromptChunks.of, model, tokens, salt, limiter=self._limiter)

    async def _tokenize(
        self, models: Sequence[Model], prompt: str, preferred: Sequence[Member], *, chat: bool
    ) -> Sequence[int]:
        failures = []
        for member, model in list(self._tokenizers(models, preferred, chat=chat))[:MAX_TOKENIZERS]:
            command = partial(Tokenize, namespace=model.namespace, prompt=prompt, chat=chat)
            try:
                with anyio.fail_after(TOKENIZE_SECONDS):
                    return (await member.execute(command)).tokens
            except (CommandFailed, MemberGone) as error:
                failures.append(f"{member.id}: {error}")
            except TimeoutError:
                failures.append(f"{member.id}: no answer within {TOKENIZE_SECONDS:g} s")
        why = "; ".join(failures) or "no connected instance has its tokenizer"
        raise WrongRequest(
            f"the prompt cannot be tokenized for model {models[0].names[0]!r} ({why}): send `tokens` instead"
        )

    def _tokenizers(
        self, models: Sequence[Model], preferred: Sequence[Member], *, chat: bool
    ) -> Iterator[tuple[Member, Model]]:
        """Yield the instances that can tokenize for these models, the preferred ones first."""
        namespaces = {model.namespace for model in models}
        others = [member for member in self._registry.members.values() if member not in preferred]
        for member in [*dict.fromkeys(preferred), *others]:
            if chat and not member.explains:
                continue  # It would take the messages for a text.
            for model in member.models:
                if model.tokenizer and model.namespace in namespaces:
                    yield member, model
                    break
