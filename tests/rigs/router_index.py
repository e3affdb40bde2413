"""An index of blocks like those of routers, filled from what vLLM's publisher sends.

It follows the rules of llm-d's ``pkg/kvevents/pool.go`` and ``pkg/kvcache/kvblock/in_memory.go``
(llm-d-kv-cache 0.8.1): a block is known by the last 64 bits of its hash, and is stored under a key that the
index derives from the tokens and its parent's key. An event whose parent is unknown is ignored. A block is
removed from one medium and group, and ``AllBlocksCleared`` drops those of all media. Dynamo reads the same
fields (1.6.1, ``lib/kv-router/src/zmq_wire``), and ignores media that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

MEDIA = ("GPU", "CPU", "STORAGE")
Prefix = tuple[tuple[Any, ...], ...]
"""What identifies a block: LoRA adapter, tokens and extra keys of it and of all blocks before it."""


class RouterIndex:
    """Which blocks an engine holds, by medium."""

    def __init__(self) -> None:
        self._prefixes: dict[int, Prefix] = {}
        self._entries: dict[int, set[tuple[str, int | None]]] = {}
        self.ignored: list[dict[str, Any]] = []
        """Events that a router cannot use."""
        self.resets = 0

    def apply(self, payload: bytes) -> None:
        """Apply a batch as ``ZmqEventPublisher`` sends it."""
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self._remove(event)
                case "AllBlocksCleared":
                    self._entries.clear()
                    self.resets += 1
                case other:
                    raise ValueError(other)

    def _store(self, event: dict[str, Any]) -> None:
        hashes, size, tokens = event["block_hashes"], event["block_size"], event["token_ids"]
        parent = event["parent_block_hash"]
        known = parent is None or _short(parent) in self._prefixes
        if not known or event["medium"] not in MEDIA or len(tokens) != size * len(hashes):
            self.ignored.append(event)
            return
        prefix = () if parent is None else self._prefixes[_short(parent)]
        extra = event.get("extra_keys") or [None] * len(hashes)
        for at, block in enumerate(hashes):
            block_tokens = tuple(tokens[at * size : (at + 1) * size])
            prefix = (*prefix, (event["lora_name"], block_tokens, repr(extra[at])))
            self._prefixes[_short(block)] = prefix
            self._entries.setdefault(_short(block), set()).add((event["medium"], event.get("group_idx")))

    def _remove(self, event: dict[str, Any]) -> None:
        for block in event["block_hashes"]:
            entries = self._entries.get(_short(block), set())
            entries.discard((event["medium"], event.get("group_idx")))
            if not entries:
                self._entries.pop(_short(block), None)

    def held(self, medium: str) -> set[int]:
        """Return the blocks in a medium."""
        return {
            block for block, entries in self._entries.items() if any(medium == each for each, _ in entries)
        }

    def prompts(self, medium: str) -> set[tuple[int, ...]]:
        """Return the blocks in a medium, each as the tokens up to its end."""
        prefixes = (self._prefixes[block] for block in self.held(medium))
        return {tuple(token for _, tokens, _ in prefix for token in tokens) for prefix in prefixes}

    def matched(self, tokens: Sequence[int], block_size: int, *media: str) -> int:
        """Return how many leading tokens of a prompt are held in one of ``media``."""
        held = {self._prefixes[block] for medium in media for block in self.held(medium)}
        prefix: Prefix = ()
        for start in range(0, len(tokens) - block_size + 1, block_size):
            prefix = (*prefix, (None, tuple(tokens[start : start + block_size]), "None"))
            if prefix not in held:
                return start
        return len(tokens) - len(tokens) % block_size


def _short(block: bytes | int) -> int:
    return int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block
