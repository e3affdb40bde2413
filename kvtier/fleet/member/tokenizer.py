"""Helper process that tokenizes prompts, so that the cache process need not import a tokenizer.

It reads the tokenizer's location from standard input, then one request after another, and writes the answers
to standard output. It exits at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvtier.fleet.member.served_models import TokenizerSource
from kvtier.rpc.frames import FrameReader, Message, decoder, encode

READ_BYTES = 1 << 18
MAX_REASON_CHARACTERS = 500
MARK = "▸"


class Load(Message, frozen=True, array_like=True, tag=10):
    """First request: load a tokenizer."""

    source: TokenizerSource


class Prompt(Message, frozen=True, array_like=True, tag=11):
    """Request to tokenize a prompt."""

    text: str
    chat: bool = False
    """Whether it is a JSON list of chat messages, to which the chat template is applied."""


class Parts(Message, frozen=True, array_like=True, tag=14):
    """Request for the text of consecutive tokens, with :data:`MARK` between the parts."""

    parts: list[list[int]]


class Tokens(Message, frozen=True, array_like=True, tag=12):
    """Answer to all requests."""

    ids: list[int]
    text: str = ""


class Failed(Message, frozen=True, array_like=True, tag=13):
    """Error answer to a request. Others may follow."""

    reason: str


decode_request: Callable[[bytes], Load | Prompt | Parts] = decoder(
    Load | Prompt | Parts, "a request for tokens"
)
decode_answer: Callable[[bytes], Tokens | Failed] = decoder(Tokens | Failed, "an answer of a tokenizer")


def main() -> None:
    """Answer requests until the end of standard input."""
    # Redirect stdout to stderr, so that output of libraries does not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tokenizer: Any = None
    for body in _requests():
        try:
            request = decode_request(body)
            match request:
                case Load(source):
                    tokenizer, answer = load(source), Tokens([])
                case Prompt(text, chat):
                    answer = Tokens(token_ids(tokenizer, text, chat=chat))
                case Parts(parts):
                    answer = Tokens([], MARK.join(tokenizer.decode(part) for part in parts))
            encoded = encode(answer)
        except Exception as error:  # A third-party tokenizer may raise anything.
            encoded = encode(Failed(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]))
        answers.write(encoded)
        answers.flush()


def load(source: TokenizerSource) -> Any:  # noqa: ANN401 - a type of transformers
    """Load the tokenizer that vLLM uses for this source. Raises the errors of transformers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not source.trust_remote_code:
        # Keep transformers from importing torch: 10 s and 300 MB that none of its own tokenizers needs.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        source.path,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
    )


def token_ids(tokenizer: Any, text: str, *, chat: bool = False) -> list[int]:  # noqa: ANN401 - a type of transformers
    """Tokenize a prompt as vLLM does, with special tokens; with ``chat``, a JSON list of chat messages."""
    if chat:
        text = tokenizer.apply_chat_template(json.loads(text), add_generation_prompt=True, tokenize=False)
    return [int(token) for token in tokenizer(text, add_special_tokens=not chat, truncation=False).input_ids]


def _requests() -> Iterator[bytes]:
    reader = FrameReader()
    while data := os.read(0, READ_BYTES):
        yield from reader.feed(data)


if __name__ == "__main__":
    main()
