"""Estimate a prompt's length and digest its prefixes, from the bytes of a request and without tokenizing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_128

BLOCK_BYTES = 1024
"""Prompt bytes, as written in the request, per digest: about 256 tokens of text."""
MAX_BLOCKS = 8192
"""Digests per prompt; the rest of a longer prompt is not compared."""
TEXT_BYTES = 4
"""Approximate bytes per token of English text."""


class Prompt:
    """A prompt's estimated length in tokens, and one digest per prefix.

    Computed from JSON as the client wrote it: a list of token ids, a string, or a list of messages. Two
    prompts share a prefix if their bytes do, which holds for clients that append to a conversation.
    """

    __slots__ = ("_bytes", "digests", "tokens")

    def __init__(self, written: bytes, seed: bytes = b"") -> None:
        text = written.rstrip(b'"] \t\r\n}')
        self.tokens = _count(text)
        self.digests = _digests(text, seed)
        self._bytes = len(text)

    def held(self, count: int) -> int:
        """Return how many tokens the first ``count`` digests cover."""
        if count >= len(self.digests):
            return self.tokens
        return self.tokens * count * BLOCK_BYTES // max(1, self._bytes)


def _count(text: bytes) -> int:
    start = text[:64].lstrip(b"[ \t\r\n")
    if text[:1] == b"[" and start[:1].isdigit():
        return text.count(b",") + 1
    return max(1, len(text) // TEXT_BYTES)


def _digests(text: bytes, seed: bytes) -> Sequence[bytes]:
    """Return one digest per block, each over all bytes up to the block's end."""
    hasher = xxh3_128(seed)
    digests = []
    for start in range(0, min(len(text), BLOCK_BYTES * MAX_BLOCKS), BLOCK_BYTES):
        hasher.update(text[start : start + BLOCK_BYTES])
        digests.append(hasher.digest())
    return digests


class PrefixMemory:
    """Prefixes that one engine probably caches, because it computed them. Bounded, with LRU eviction."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens * TEXT_BYTES // BLOCK_BYTES
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def held(self, prompt: Prompt) -> int:
        """Return how many leading tokens of the prompt the engine probably caches."""
        count = 0
        for digest in prompt.digests:
            if digest not in self._digests:
                break
            count += 1
        return prompt.held(count) if count else 0

    def add(self, prompt: Prompt) -> None:
        """Record that the engine computed this prompt. A prompt over the limit is truncated."""
        for digest in reversed(prompt.digests[: self._max_blocks]):  # So that the first is evicted last.
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._max_blocks:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, because the engine may have restarted with an empty cache."""
        self._digests.clear()
