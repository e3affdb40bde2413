"""State of one request in the scheduler's connector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.misses import MissReason
from kvtier.integrations.vllm.hints import NO_HINTS, Hints
from kvtier.integrations.vllm.plain import plain, text
from kvtier.integrations.vllm.traces import UNTRACED, Trace
from kvtier.memory.keys import (
    BLOCK_HASH_BYTES,
    TOKEN_BYTES,
    ChunkKey,
    ExtraKeys,
    block_hashes,
    chunk_key,
    chunk_keys,
    encode_extra,
    encode_tokens,
    extend_block_hash,
    root_key,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtier.integrations.vllm.adapters import Adapter
    from kvtier.memory.layout import ChunkLayout


class Hit(NamedTuple):
    """The leading tokens of a prompt that can be loaded."""

    tokens: int
    chunks: int
    """The number of chunks that contain them. The last one may be used in part."""
    last_tokens: int = 0
    """How many tokens the last chunk holds, if it is not the prompt's own."""

    def up_to(self, tokens: int, chunk_tokens: int) -> Hit:
        """Return its leading chunks that contain ``tokens`` tokens, or all of them."""
        chunks = -(-tokens // chunk_tokens)
        return self if chunks >= self.chunks else Hit(chunks * chunk_tokens, chunks)

    def stored_tokens(self, index: int, chunk_tokens: int) -> int:
        """Return the number of tokens that a chunk holds."""
        if self.last_tokens and index == self.chunks - 1:
            return self.last_tokens
        return min(chunk_tokens, self.tokens - index * chunk_tokens)


NO_HIT = Hit(0, 0)


@dataclass(slots=True)
class LookupProgress:
    """The state of a prompt's lookup. Written by ``lookups.py`` only."""

    ticket: int | None = None
    """Ticket of a lookup whose result has not been used yet."""
    renewal: int | None = None
    """Ticket of a later one that takes its place once it is answered."""
    covered: int = 0
    """The leading tokens that were last looked up."""
    asked_at: float = 0.0
    """When it was last looked up (:func:`time.monotonic`); 0 before that."""
    waited: bool = False
    """Whether the scheduler has already waited for the lookup's answer once."""
    timeout: float = 0.0
    """Seconds that the lookup may take without progress."""
    local_tokens: int = 0
    """Tokens that vLLM's own cache held at the last query."""
    hit: Hit = NO_HIT
    """What was reported to vLLM at the last query. It computes these tokens only if their load fails."""
    hit_chunks: int = 0
    """Chunks that were not computed, but found in vLLM's own cache or in a tier."""
    hits_by_tier: dict[tuple[str, str], int] = field(default_factory=dict)
    """The tokens of the last hit, by the name and the type of their tier."""
    branch: int = 0
    """With states: chunks that other prompts have stored as well, up to where no state was stored."""
    located: int = 0
    """The most chunks that a lookup has located."""
    loaded: dict[str, int] = field(default_factory=dict)
    """The tokens that were loaded, by the name of their tier."""
    load_failed: bool = False
    """Whether a load has failed: the request is then computed without further attempts."""
    connecting_since: float = 0.0
    """Since when it waits for the connection to the cache process; 0 before that."""
    asked: int = 0
    """The number of its first lookup, for :class:`Outcome`; 0 before that."""
    unanswered: MissReason | None = None
    """Why its last lookup ended without an answer in time."""
    reported: bool = False
    """Whether what became of the request was reported."""
    computing_since: float | None = None
    """When it was first scheduled (:func:`time.monotonic`); 0 once its prompt has been computed."""
    computed_before: int = 0
    """How many of its tokens needed no computation."""

    @property
    def hits(self) -> dict[str, int]:
        """The tokens of the last hit, by the name of their tier."""
        return {tier: tokens for (tier, _), tokens in self.hits_by_tier.items()}


@dataclass(slots=True)
class SaveProgress:
    """What of a request is held, saved or being saved. Written by ``saves.py`` only."""

    settled: int | None = None
    """Tokens that had been computed before the last step in which the request was scheduled."""
    computed: int = 0
    """Tokens whose KV is final after the last step in which the request was scheduled."""
    next_chunk: int = 0
    """The first chunk that is neither held nor saved."""
    tail_end: int = 0
    """The tokens before the end of the last partial chunk that is held or saved."""
    tail_planned: bool = False
    held_blocks: tuple[Sequence[int], ...] | None = None
    """Block table of a finished request, if vLLM keeps the blocks until they are saved."""
    stored: int = 0
    """The leading tokens that there was room for, if a prompt can be continued there."""
    copied: bool = False
    """Whether workers were given its blocks to copy, and may still be copying."""


@dataclass(slots=True)
class EarlyProgress:
    """What room in advance is for, or was for. Written by ``early.py`` only."""

    room_until: float = 0.0
    """Until when the request waits for room in advance (:func:`time.monotonic`)."""
    saved_states: set[int] = field(default_factory=set)
    """The numbers of chunks at whose end a state was planned to be stored."""


@dataclass(slots=True)
class TransferProgress:
    """The KV transfer of a prompt to or from a peer. Written by ``prompt_transfers.py`` only."""

    ticket: int | None = None
    """Ticket of the running KV transfer to a peer."""
    preemptions: int = 0
    """The request's preemption count when it was last checked."""
    expect_until: float | None = None
    """Deadline for chunks that a peer pushes here (:func:`time.monotonic`)."""


@dataclass(slots=True)
class VerifyProgress:
    """The verification of what is stored of a prompt. Written by ``verification.py`` only."""

    counted: bool = False
    """Whether the request has counted as a load."""
    ticket: int | None = None
    """Ticket of the lookup that keeps the stored chunks."""
    dtype: str = ""
    """Type of the values of the KV cache, if the prompt is computed to verify what is stored."""


@dataclass(slots=True)
class RequestState:
    """One request from its arrival to its end: its keys, and the progress of each module with it."""

    request: Request
    root: ChunkKey
    chunk_tokens: int
    lookahead: int = 0
    """On how many tokens after it the KV of a token depends: see ``lookahead_tokens`` in ``compat.py``."""
    granularity: int = 0
    """The number of tokens of a block hash: see :attr:`ChunkLayout.granularity`."""
    keys: list[ChunkKey] = field(default_factory=list)
    """Keys of the whole chunks whose tokens are known, in prefix order."""
    hashes: bytearray = field(default_factory=bytearray)
    """The block hashes of the tokens that are known so far."""
    whole_blocks: bool = False
    """Whether the prompt is stored and looked up to its last whole block, because room is short."""
    hints: Hints = NO_HINTS
    adapter: Adapter | None = None
    trace: Trace = UNTRACED
    loads: bool = field(init=False)
    """Whether the request may load from the cache."""
    stores: bool = field(init=False)
    """Whether the request may store in the cache."""
    lookup: LookupProgress = field(default_factory=LookupProgress)
    saving: SaveProgress = field(default_factory=SaveProgress)
    early: EarlyProgress = field(default_factory=EarlyProgress)
    transfer: TransferProgress = field(default_factory=TransferProgress)
    verify: VerifyProgress = field(default_factory=VerifyProgress)
    prompt_tokens: int = 0
    """Length of the prompt when it was last checked."""
    chunk_hints: ChunkHints | None = field(init=False)
    """The hints to store with the prompt's chunks."""

    def __post_init__(self) -> None:
        salt = text(self.request.cache_salt) if self.hints.canary is None else ""  # No tenant for each.
        self.chunk_hints = self.hints.for_chunks(salt)
        self.loads, self.stores = self.hints.mode != "write", self.hints.mode != "read"
        self.prompt_tokens = self.request.num_prompt_tokens

    def follow_prompt(self) -> bool:
        """Forget the keys of tokens that vLLM has replaced, if a session was continued with further input.

        It then drops the tokens that it has not computed, of which a lookup may have hashed some. Call it
        before anything is computed from the new prompt. Return whether there is one.
        """
        if self.request.num_prompt_tokens == self.prompt_tokens:
            return False
        self.prompt_tokens = self.request.num_prompt_tokens
        kept = self.request.num_computed_tokens
        del self.keys[max(0, kept - self.lookahead) // self.chunk_tokens :]
        if self.granularity:
            del self.hashes[kept // self.granularity * BLOCK_HASH_BYTES :]
        return True

    def computed_at_end(self) -> int:
        """Return how many tokens of a finished request have KV: the last one of an answer has none.

        That of a prompt has, for which there is no answer if it was pooled.
        """
        request = self.request
        return int(min(request.num_computed_tokens, max(request.num_tokens - 1, request.num_prompt_tokens)))

    def final_tokens(self, computed: int, *, answer: bool) -> int:
        """Return how many of the ``computed`` leading tokens are known and have final KV.

        Drafts do not count: vLLM's ``num_tokens`` includes a token only once it is accepted. Tokens of the
        answer count only with ``answer``.
        """
        computed = min(computed, self.request.num_tokens - self.lookahead)
        return int(computed if answer else min(computed, self.request.num_prompt_tokens))

    @property
    def is_mixed(self) -> bool:
        """Whether its adapter was loaded again since, perhaps with other content."""
        return self.adapter is not None and self.adapter.replaced

    def extend(self, tokens: int, first: int = 0) -> list[ChunkKey]:
        """Return the keys of whole chunks from index ``first`` to ``tokens`` tokens. Hashes no key twice.

        A chunk has no key until the tokens after it that its KV depends on are known.
        """
        whole = self._whole_chunks(tokens)
        if whole > len(self.keys):
            self._hash(tokens)
        return self.keys[first:whole]

    def block_hashes(self, start: int, stop: int) -> bytes:
        """Return the joined hashes of the whole blocks from one token to another. Hashes no block twice."""
        step = self.granularity
        if not step:
            return b""
        if stop // step > len(self.hashes) // BLOCK_HASH_BYTES:
            self._hash(stop)
        return bytes(self.hashes[start // step * BLOCK_HASH_BYTES : stop // step * BLOCK_HASH_BYTES])

    def _whole_chunks(self, tokens: int) -> int:
        if self.lookahead:
            tokens = min(tokens, len(self.request.all_token_ids) - self.lookahead)
        return tokens // self.chunk_tokens

    def _hash(self, tokens: int) -> None:
        """Hash the chunks and blocks of the first ``tokens`` tokens that are not hashed yet."""
        known, whole, step = len(self.keys), self._whole_chunks(tokens), self.granularity
        blocks = len(self.hashes) // BLOCK_HASH_BYTES
        first = min(known * self.chunk_tokens, blocks * step) if step else known * self.chunk_tokens
        encoded = encode_tokens(token_list(self.request), first, tokens)
        if whole > known:
            start, stop = known * self.chunk_tokens, whole * self.chunk_tokens
            fresh = encoded[(start - first) * TOKEN_BYTES : (stop - first) * TOKEN_BYTES]
            extra = self._extra_from(start) if self.lookahead or self.request.mm_features else None
            self.keys += chunk_keys(self.parent(known), fresh, self.chunk_tokens, extra=extra)
        if step:
            fresh = encoded[(blocks * step - first) * TOKEN_BYTES :]
            hashes = bytearray(block_hashes(fresh, step))
            stop = blocks + len(hashes) // BLOCK_HASH_BYTES
            for block, extras in _block_extras(self.request, step, blocks, stop):
                at = slice((block - blocks) * BLOCK_HASH_BYTES, (block + 1 - blocks) * BLOCK_HASH_BYTES)
                hashes[at] = extend_block_hash(bytes(hashes[at]), extras)
            self.hashes += hashes

    def _extra_from(self, base: int) -> ExtraKeys:
        return lambda start, stop: _extra(self.request, base + start, base + stop, self.lookahead)

    def tail_key(self, tokens: int) -> ChunkKey | None:
        """Return the key of the partial chunk at the end of the first ``tokens`` tokens, if any.

        At the end of a prompt, the tokens after it are not known yet. vLLM computes its last token again, but
        none before: with a longer lookahead, the KV of those depends on the answer that comes.
        """
        whole = tokens // self.chunk_tokens
        start = whole * self.chunk_tokens
        lookahead = 0 if tokens == self.request.num_prompt_tokens else self.lookahead
        if start >= tokens or (not lookahead and self.lookahead > 1):
            return None
        self.extend(tokens, whole)
        if len(self.keys) < whole:  # The lookahead is longer than the tail.
            return None
        rest = encode_tokens(token_list(self.request), start, tokens)
        return chunk_key(self.parent(whole), rest, _extra(self.request, start, tokens, lookahead))

    def stored_prompt(self, layout: ChunkLayout) -> int:
        """Return how many leading tokens of the prompt are stored and looked up, with partial chunks."""
        prompt = int(self.request.num_prompt_tokens)
        return layout.stored_tokens(prompt) if self.whole_blocks else prompt

    def parent(self, index: int) -> ChunkKey:
        """Return the key before the chunk at ``index``."""
        return self.keys[index - 1] if index else self.root


def token_list(request: Request) -> Sequence[int]:
    """Return the tokens of a request as the list itself: vLLM's view of it creates a list for each slice."""
    tokens: Sequence[int] = getattr(request, "_all_token_ids", request.all_token_ids)
    return tokens


def cacheable(request: Request, *, numbered: bool = False) -> bool:
    """Return whether the request's KV is determined by token ids and known extra keys.

    ``numbered``: whether the identifiers of images and other inputs are no hashes: see ``numbers_inputs``.
    """
    if numbered and request.mm_features:
        return False
    return request.prompt_embeds is None and request.prompt_token_ids is not None


def request_root(namespace: bytes, request: Request, adapter: str = "", canary: str = "") -> ChunkKey:
    """Return the root key of a request's chunks: that of its tenant (``cache_salt``) and LoRA adapter.

    ``adapter``: the identity of the adapter. ``canary``: replaces the salt. So requests of a canary share
    their chunks here, but nothing in vLLM's own cache, which knows their salts.
    """
    extra = encode_extra(("lora", adapter)) if adapter else b""
    if canary:
        return root_key(namespace, "", encode_extra(("canary", canary, adapter)))
    return root_key(namespace, text(request.cache_salt), extra)


def _block_extras(request: Request, step: int, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks whose KV depends on a multimodal input, and on which part of it."""
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        for block in range(max(first, offset // step), min(stop, -(-(offset + length) // step))):
            yield block, encode_extra(plain([("mm", feature.identifier, offset - block * step)]))


def _extra(request: Request, start: int, stop: int, lookahead: int = 0) -> bytes:
    """Return the extra key of a chunk: its KV depends on multimodal inputs and lookahead."""
    parts: list[object] = []
    if lookahead:
        parts.append(("lookahead", *request.all_token_ids[stop : stop + lookahead]))
        stop += lookahead
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < stop and start < offset + length:
            parts.append(("mm", feature.identifier, offset - start))
    return encode_extra(plain(parts))
