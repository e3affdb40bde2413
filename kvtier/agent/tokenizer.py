"""The helper process that turns prompts into token ids, so that the cache process imports no tokenizer.

It is told on its standard input where the tokenizer is, then one prompt after another; what it answers goes
to its standard output. It ends with its input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvtier.agent.served import TokenizerSource
from kvtier.sockets.frames import FrameReader, Message, decoder, encode

READ_BYTES = 1 << 18
LONGEST_REASON = 500


class Load(Message, frozen=True, array_like=True, tag=1):
    """First message to it."""

    source: TokenizerSource


class Prompt(Message, frozen=True, array_like=True, tag=2):
    """To be turned into token ids."""

    text: str


class Tokens(Message, frozen=True, array_like=True, tag=3):
    """Answer to :class:`Prompt`; to :class:`Load`, without any."""

    ids: list[int]


class Refused(Message, frozen=True, array_like=True, tag=4):
    """Answer where that cannot be, in words."""

    reason: str


decode_request: Callable[[bytes], Load | Prompt] = decoder(Load | Prompt, "a request for tokens")
decode_answer: Callable[[bytes], Tokens | Refused] = decoder(Tokens | Refused, "an answer of a tokenizer")


def main() -> None:
    """Answer until standard input ends."""
    # What a library prints must not come between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    tokenizer: Any = None
    for body in _requests():
        try:
            request = decode_request(body)
            if isinstance(request, Load):
                tokenizer = load(request.source)
                answer: Message = Tokens([])
            else:
                answer = Tokens(token_ids(tokenizer, request.text))
            encoded = encode(answer)
        except Exception as error:  # Whatever a tokenizer that was made by others may raise.
            encoded = encode(Refused(f"{type(error).__name__}: {error}"[:LONGEST_REASON]))
        _write(answers, encoded)


def load(source: TokenizerSource) -> Any:  # noqa: ANN401 - a type of transformers
    """The tokenizer that vLLM uses for a model of this source. Raises what transformers raises."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not source.trust_remote_code:
        # Which transformers imports where it can: ten seconds and 300 MB that no tokenizer of its own needs.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        source.path,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )


def token_ids(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401 - a type of transformers
    """What vLLM makes of a prompt, special tokens included."""
    return [int(token) for token in tokenizer(text, add_special_tokens=True, truncation=False).input_ids]


def _requests() -> Iterator[bytes]:
    reader = FrameReader()
    while data := os.read(0, READ_BYTES):
        yield from reader.feed(data)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
