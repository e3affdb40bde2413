"""Run the helper process with a fake tokenizer: the token of a word is its length."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from kvtier.fleet.member import tokenizer
from kvtier.fleet.member.served_models import TokenizerSource


def word_lengths(text: str, **_: Any) -> SimpleNamespace:
    if text.startswith("print"):
        print("This is printed where answers are expected.", flush=True)
    if text == "slow":
        time.sleep(0.2)
    count = 5_000_000 if text == "many" else 1
    return SimpleNamespace(input_ids=[len(word) for word in text.split()] * count)


def load(source: TokenizerSource) -> Any:
    if source.path.endswith("nowhere"):
        raise FileNotFoundError(source.path)
    return word_lengths


if __name__ == "__main__":
    tokenizer.load = load
    tokenizer.main()
