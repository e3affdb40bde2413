"""Layout of a chunk's payload, and its fingerprint.

The payload is ``[share][group][layer][block]``: for each share, KV cache group and layer, the engine's pages
of the chunk's blocks as opaque bytes. A share is what one rank holds, or several ranks in common.

The layers of a state-space model have no KV per token, but one state after each token, which replaces the one
before. Such a *state* is an object of its own beside the chunks: everything that a prefix which ends at its
token needs of these layers. It counts as a chunk of :data:`STATE_TOKENS` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec
from blake3 import blake3

from kvtier.errors import LayoutError
from kvtier.memory.keys import MAX_BLOCK_HASHES

CHUNK_TOKENS = 256
"""The size of a chunk with ``chunk_tokens: auto``, as far as the block sizes allow."""
STATE_TOKENS = 0
"""The length of a state, in the place of that of a chunk."""
MAX_RANKS = 4096
"""More than any engine has. What is computed for each rank is bounded by it."""
LAYERS = "layers"
"""The field of a layout that follows from others, unless it alone differs."""
PLATFORM_FIELDS = "kind of device|VLLM_KV_CACHE_LAYOUT|--kv-cache-dtype|--dtype|--attention-backend"
"""The parts of the platform of a vLLM engine, by what to set. On CPUs, the instruction set follows."""
WEIGHTS_BYTES = 8
"""How much of a namespace identifies the weights."""


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """One KV cache group: layers that share a block table.

    ``page_bytes`` holds, per layer, the bytes of one block on one rank. ``window`` is the attention window in
    tokens, or 0 for full attention. With a window, only blocks visible to a query after the chunk's last
    whole block are stored: a prompt that differs in the tokens after it can use the chunk as well.
    With ``state``, a block holds the state after its last token, and ``page_bytes`` the bytes of states.
    ``shards`` has a number for each rank: ranks with the same number hold the same bytes. Without ``shards``,
    no two ranks do. With context parallelism, a block of ``block_tokens`` tokens is divided between ranks.
    """

    block_tokens: int
    page_bytes: tuple[int, ...]
    window: int = 0
    state: bool = False
    shards: tuple[int, ...] = ()

    def blocks(self, tokens: int) -> range:
        """Return the indexes of the stored blocks of a chunk of ``tokens`` tokens."""
        if self.state:
            return range(tokens == STATE_TOKENS)
        stop = -(-tokens // self.block_tokens)
        whole = tokens // self.block_tokens * self.block_tokens
        return range(min(self.first_visible(whole), stop), stop)

    def first_visible(self, tokens: int) -> int:
        """Return the index of the first block that attention needs to continue after ``tokens`` tokens."""
        return max(0, tokens - self.window + 1) // self.block_tokens if self.window else 0

    def shard(self, rank: int) -> int:
        """Return the number of what a rank holds."""
        return self.shards[rank] if self.shards else rank


class Span(NamedTuple):
    """Position of one layer of one chunk in the payload: its blocks as consecutive pages."""

    group: int
    layer: int
    offset: int
    pages: int
    page_bytes: int


class GroupValues(msgspec.Struct, frozen=True, array_like=True):
    """The values in the pages of one group, for codecs with loss.

    A page has blocks of ``rows`` rows of ``row`` values, ``width`` of which belong together, such as those of
    a head; without ``rows``, their order is unknown. Without ``dtype``, they must not be changed: states, and
    values that are quantized already.
    """

    dtype: str = ""
    rows: int = 0
    row: int = 0
    width: int = 0


class ChunkLayout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The layout of a model's chunks on one platform.

    ``platform`` covers everything that determines the bytes inside a block (device, layout name, instruction
    set, dtype). Two engines share chunks only if it is equal. ``values`` describes each group if the engine
    accepts KV that was stored with loss; otherwise it is empty.
    """

    chunk_tokens: int
    groups: tuple[GroupLayout, ...]
    ranks: int = 1
    platform: str = ""
    values: tuple[GroupValues, ...] = ()

    def __post_init__(self) -> None:
        self._check()
        unit = self.unit_tokens
        if self.chunk_tokens % unit:
            nearest = max(1, round(self.chunk_tokens / unit)) * unit
            raise LayoutError(
                f"chunk_tokens is {self.chunk_tokens}, not a multiple of the engine's block size "
                f"{self._blocks}: use `auto`, {nearest} or another multiple of {unit}"
            )

    def _check(self) -> None:
        """Raise :class:`LayoutError` for what no engine has: layouts also come from other hosts."""
        if not 1 <= self.ranks <= MAX_RANKS:
            raise LayoutError(f"{self.ranks} ranks, not 1 to {MAX_RANKS:,}")
        if any(len(group.shards) not in (0, self.ranks) for group in self.groups):
            raise LayoutError(f"a group has shards of another number of ranks than {self.ranks}")
        if min((self.chunk_tokens, *(group.block_tokens for group in self.groups))) < 1:
            raise LayoutError("blocks and chunks have at least one token")
        if len(self.values) not in (0, len(self.groups)):
            raise LayoutError("the values of some groups are described, and of others not")
        if any(min(each.rows, each.row, each.width) < 0 for each in self.values):
            raise LayoutError("values have fewer rows than none")

    def __str__(self) -> str:
        """Summarize the configured properties, to distinguish layouts in messages."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        sizes = f"chunks of {self.chunk_tokens} tokens in blocks of {self._blocks}"
        return f"{sizes}, {ranks}, {self.platform or 'any'}"

    @property
    def accepts_loss(self) -> bool:
        """Whether the engine accepts KV that was stored with loss."""
        return bool(self.values)

    @property
    def unit_tokens(self) -> int:
        """The smallest number of tokens that is a multiple of all block sizes."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property  # Each step asks for it, once or more for each request.
    def granularity(self) -> int:
        """Hits end after a multiple of this many tokens: the smallest with :data:`MAX_BLOCK_HASHES` a chunk.

        Usually the block size. 0 if hits end after whole chunks only, because there must be a state.
        """
        if self.has_states:
            return 0
        blocks = self.chunk_tokens // self.unit_tokens
        return self.unit_tokens * next(
            step for step in range(1, blocks + 1) if not blocks % step and blocks // step <= MAX_BLOCK_HASHES
        )

    def fields(self) -> dict[str, str]:
        """Return what the layout depends on, by what to set."""
        cpu = "|kind of CPU" if self.platform.startswith("cpu|") else ""
        names = f"{PLATFORM_FIELDS}{cpu}|pipeline and context parallelism"
        return {
            "chunk_tokens": str(self.chunk_tokens),
            "--block-size": self._blocks,
            "--tensor-parallel-size": str(self.ranks),
            **dict(zip(names.split("|"), self.platform.split("|"), strict=False)),
            "accept_lossy": str(self.accepts_loss).lower(),
            LAYERS: blake3(msgspec.msgpack.encode(self.groups)).hexdigest(4),
        }

    @property
    def _blocks(self) -> str:
        return " and ".join(str(tokens) for tokens in sorted({group.block_tokens for group in self.groups}))

    @property
    def shortest_hit(self) -> int:
        """The fewest tokens that two prompts must have in common."""
        return self.granularity or self.chunk_tokens

    def stored_tokens(self, prompt: int) -> int:
        """Return how many leading tokens of a prompt are stored where room is short: its whole blocks.

        The rest would take the room of a block, and another prompt cannot be continued there. But a prompt
        of less than a block is stored as it is, for requests with the same one.
        """
        return prompt if prompt < self.shortest_hit else prompt - prompt % self.shortest_hit

    def usable(self, stored: int, tokens: int) -> int:
        """Return how many leading tokens of a chunk of ``stored`` tokens can be used, up to ``tokens``.

        A prompt can be continued where all blocks that attention needs from there on are stored.
        """
        step = self.granularity
        ends = range(tokens // step * step, 0, -step)
        return next((end for end in ends if self.continues(stored, end)), 0)

    def continues(self, stored: int, tokens: int) -> bool:
        """Whether a prompt can be continued after the first ``tokens`` tokens of a chunk of ``stored``."""
        return all(group.first_visible(tokens) >= group.blocks(stored).start for group in self.groups)

    @property
    def has_windows(self) -> bool:
        """Whether some layers see only the last tokens."""
        return any(group.window for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether a prefix can only be used where a state is stored."""
        return any(group.state for group in self.groups)

    def shares(self, tokens: int) -> tuple[int, ...]:
        """Return for each rank the number of the share that it holds of a chunk of ``tokens`` tokens."""
        return _shares(self, tokens)

    def share(self, tokens: int, rank: int) -> int:
        """Return the offset of what a rank holds in the payload of a chunk of ``tokens`` tokens."""
        return self.shares(tokens)[rank] * self.rank_bytes(tokens)

    def writes(self, tokens: int, rank: int, number: int) -> bool:
        """Whether a rank writes its share of a chunk. Ranks with the same share alternate, by ``number``."""
        shares = self.shares(tokens)
        holders = [other for other, share in enumerate(shares) if share == shares[rank]]
        return holders[number % len(holders)] == rank

    def rank_bytes(self, tokens: int) -> int:
        """Return the payload bytes of one rank for a chunk of ``tokens`` tokens."""
        return sum(len(group.blocks(tokens)) * sum(group.page_bytes) for group in self.groups)

    def payload_bytes(self, tokens: int) -> int:
        """Return the payload bytes of all ranks for a chunk of ``tokens`` tokens."""
        return (1 + max(self.shares(tokens))) * self.rank_bytes(tokens)

    def spans(self, tokens: int, rank: int) -> Iterator[Span]:
        """Yield the position of each layer of ``rank`` in the payload of a chunk of ``tokens`` tokens."""
        offset = self.share(tokens, rank)
        for group_index, group in enumerate(self.groups):
            pages = len(group.blocks(tokens))
            for layer, page_bytes in enumerate(group.page_bytes):
                yield Span(group_index, layer, offset, pages, page_bytes)
                offset += pages * page_bytes

    def fingerprint(self) -> bytes:
        """Return 32 bytes that differ whenever a chunk's bytes have another meaning."""
        # Without values, that of earlier versions, so that what they have stored is found.
        parts = self if self.values else msgspec.structs.astuple(self)[:-1]
        return blake3(msgspec.msgpack.encode(parts), derive_key_context="kvtier layout v2").digest()


@lru_cache(maxsize=64)
def _shares(layout: ChunkLayout, tokens: int) -> tuple[int, ...]:
    groups = [group for group in layout.groups if group.blocks(tokens)]
    numbers: dict[tuple[int, ...], int] = {}
    held = [tuple(group.shard(rank) for group in groups) for rank in range(layout.ranks)]
    return tuple(numbers.setdefault(shards, len(numbers)) for shards in held)


def namespace(model: str, layout: ChunkLayout, weights_id: str = "") -> bytes:
    """Return 32 bytes that identify one model in one layout, with the weights that an id names.

    The last :data:`WEIGHTS_BYTES` depend on the id alone, so that the chunks of some weights can be found in
    any tier, also after a restart.
    """
    weights = _weights_hash(weights_id)
    parts = model.encode() + layout.fingerprint() + weights
    digest = blake3(parts, derive_key_context="kvtier namespace v2").digest()
    return digest[:-WEIGHTS_BYTES] + weights[:WEIGHTS_BYTES]


def has_weights(space: bytes, weights_id: str) -> bool:
    """Return whether a namespace is one of the weights that an id names."""
    return space[-WEIGHTS_BYTES:] == _weights_hash(weights_id)[:WEIGHTS_BYTES]


def _weights_hash(weights_id: str) -> bytes:
    return blake3(weights_id.encode(), derive_key_context="kvtier weights v1").digest()
