"""How long a prompt is and how it begins, told from the bytes of a request without tokenizing them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_128

BLOCK_BYTES = 1024
"""Of the prompt as it is written in the request: about 256 tokens of text."""
MOST_BLOCKS = 8192
"""What goes beyond is taken to be like what is before."""
TEXT_BYTES = 4
"""Bytes of English text in a token, about."""


class Prompt:
    """A prompt's estimated length in tokens, and a digest for each of its beginnings.

    Made of JSON as the client has written it: a list of token ids, a text, or a list of messages. Two
    prompts begin alike where they are written alike, which clients that append to a conversation do.
    """

    __slots__ = ("_bytes", "digests", "tokens")

    def __init__(self, written: bytes | memoryview, seed: bytes = b"") -> None:
        text = bytes(written).rstrip(b'"] \t\r\n}')
        self.tokens = _count(text)
        self.digests = _digests(text, seed)
        self._bytes = len(text)

    def held(self, count: int) -> int:
        """How many tokens the first ``count`` of its digests stand for."""
        if count >= len(self.digests):
            return self.tokens
        return self.tokens * count * BLOCK_BYTES // max(1, self._bytes)


def _count(text: bytes) -> int:
    start = text[:64].lstrip(b"[ \t\r\n")
    if text[:1] == b"[" and start[:1].isdigit():
        return text.count(b",") + 1
    return max(1, len(text) // TEXT_BYTES)


def _digests(text: bytes, seed: bytes) -> Sequence[bytes]:
    """Each is of all bytes so far; the last is of the whole prompt."""
    hasher = xxh3_128(seed)
    digests = []
    for start in range(0, min(len(text), BLOCK_BYTES * MOST_BLOCKS), BLOCK_BYTES):
        hasher.update(text[start : start + BLOCK_BYTES])
        digests.append(hasher.digest())
    return digests


class PrefixMemory:
    """What one engine is thought to hold, as it was asked to compute it. Bounded: the oldest is forgotten."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens * TEXT_BYTES // BLOCK_BYTES
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def held(self, prompt: Prompt) -> int:
        """How many of the prompt's leading tokens it is thought to hold."""
        count = 0
        for digest in prompt.digests:
            if digest not in self._digests:
                break
            count += 1
        return prompt.held(count) if count else 0

    def add(self, prompt: Prompt) -> None:
        """It holds this prompt now. Of one that is too long to be remembered, the beginning."""
        for digest in reversed(prompt.digests[: self._most]):  # The first is the last to be forgotten.
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > self._most:
            self._digests.popitem(last=False)

    def clear(self) -> None:
        """It has ended, and what it held may have gone with it."""
        self._digests.clear()
