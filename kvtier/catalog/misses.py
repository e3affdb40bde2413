"""Why tokens of a prompt were not a hit: the reasons, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec


class MissReason(StrEnum):
    """Why tokens of a prompt were not a hit. :data:`ADVICE` and docs/why.md tell what each means."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"
    CLEARED = "cleared"
    REPLACED = "replaced"
    EXPIRED = "expired"
    MOVED = "moved"
    LOST = "lost"
    UNREADABLE = "unreadable"
    DECLINED = "declined"
    STORE_FAILED = "store_failed"
    OTHER_SALT = "other_salt"
    OTHER_MODEL_OR_LAYOUT = "other_model_or_layout"
    OTHER_WEIGHTS = "other_weights"
    OTHER_ADAPTER_OR_IMAGE = "other_adapter_or_image"
    DIVERGES = "diverges"
    BEING_STORED = "being_stored"
    NO_STATE = "no_state"
    NO_ROOM = "no_room"
    TIER_UNAVAILABLE = "tier_unavailable"
    TOO_LATE = "too_late"
    LOAD_FAILED = "load_failed"
    RECOMPUTE_WAS_FASTER = "recompute_was_faster"
    VERIFIED = "verified"
    QUARANTINED = "quarantined"
    DISABLED_BY_REQUEST = "disabled_by_request"
    SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
    NOT_LOOKED_UP = "not_looked_up"
    UNKNOWN = "unknown"


ADVICE: Mapping[str, str] = {
    MissReason.NEVER_STORED: "these tokens were never stored behind those before them: normal for new text.",
    MissReason.EVICTED: "the tier had no room for them: `kvtier whatif` shows what more would bring.",
    MissReason.CLEARED: "they were cleared, by a command or because the weights have changed.",
    MissReason.REPLACED: "a longer chunk with the same beginning has replaced them, and is gone as well.",
    MissReason.EXPIRED: "their time to live has passed: raise the tier's `ttl`.",
    MissReason.MOVED: "they were moved to another host: send such requests there, or copy instead.",
    MissReason.LOST: "the tier's medium has lost or damaged them: see the log, and `kvtier doctor`.",
    MissReason.UNREADABLE: "the tier has no key or codec for them now: see `encrypt.key_file`, and the log.",
    MissReason.DECLINED: "the policy kept what it expects to be used sooner: see `kvtier whatif`.",
    MissReason.STORE_FAILED: "memory or the tier did not take them: see the log of the cache process.",
    MissReason.BEING_STORED: "another request was just computing them: send equal prompts one by one.",
    MissReason.OTHER_SALT: "they are held for another `cache_salt`: requests that may share need the same.",
    MissReason.OTHER_MODEL_OR_LAYOUT: "they are held for an engine with other settings: make these equal.",
    MissReason.OTHER_WEIGHTS: "they are held for other weights: see `weights_id`.",
    MissReason.OTHER_ADAPTER_OR_IMAGE: "they are held for another adapter, or behind another image.",
    MissReason.DIVERGES: "what is before is held, with other tokens behind: keep what changes at the end.",
    MissReason.NO_STATE: "they are held without a state at their end, which is stored at the end of prompts.",
    MissReason.NO_ROOM: "a lower tier holds them, memory had no room: raise the first tier's capacity.",
    MissReason.TIER_UNAVAILABLE: "the tier's medium fails or does not answer: see the log, `kvtier doctor`.",
    MissReason.TOO_LATE: "the tier was too slow: see `prefetch.deadline`, and `kvtier bench` for its speed.",
    MissReason.LOAD_FAILED: "they could not be read or copied: see the log.",
    MissReason.RECOMPUTE_WAS_FASTER: "the engine computes them faster than the tier delivers them.",
    MissReason.VERIFIED: "an idle engine has computed what is held, to compare both: see `verify`.",
    MissReason.QUARANTINED: "something that the tier held was wrong: see the log, then clear it there.",
    MissReason.DISABLED_BY_REQUEST: "the request does not use the cache, or vLLM cannot cache it.",
    MissReason.SHORTER_THAN_A_BLOCK: "the rest of a prompt behind its last whole block: usually computed.",
    MissReason.NOT_LOOKED_UP: "the cache process was away or did not answer in time: see its log.",
    MissReason.UNKNOWN: "they were stored once, too long ago to know more: raise `why.remembered_chunks`.",
}
"""What each reason means for who operates the engine, and what to do."""
AGAIN = "then the same again"
"""What has parted goes on as what is stored: something in the middle of a template changes."""


class Miss(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Consecutive tokens of a prompt that were not a hit, for one reason."""

    reason: MissReason
    tokens: int
    tier: str = ""
    """The tier that held them last, or was too slow."""
    seconds: float = 0.0
    """How long the tiers had them, or how long was waited for them."""
    ago: float = 0.0
    """How many seconds ago they went."""
    position: int = -1
    """The token from which on what is held differs. Exact to a block."""
    field: str = ""
    """What differs: a name, no value of a user."""


def text_of(miss: Miss) -> str:
    """Return a miss in a few words: ``512 evicted (from ram, after 40 s, 12 s ago)``."""
    match miss.reason:
        case MissReason.TOO_LATE | MissReason.RECOMPUTE_WAS_FASTER | MissReason.LOAD_FAILED:
            more = [f"{miss.tier}, {miss.seconds:.2f} s"] if miss.tier else []
        case MissReason.DIVERGES:
            more = [f"from token {miss.position} on"]
        case MissReason.STORE_FAILED | MissReason.DECLINED | MissReason.UNREADABLE:
            more = [f"in {miss.tier}"] if miss.tier else []
            more += [f"{miss.ago:.0f} s ago"] if miss.ago else []
        case _:
            more = [f"from {miss.tier}"] if miss.tier else []
            more += [f"after {miss.seconds:.0f} s, {miss.ago:.0f} s ago"] if miss.seconds or miss.ago else []
    more += [miss.field] if miss.field else []
    return f"{miss.tokens} {miss.reason}" + (f" ({', '.join(more)})" if more else "")


def misses_behind(misses: Sequence[Miss], begins: int, used: int, tokens: int) -> list[Miss]:
    """Return why the tokens of a prompt behind the first ``used`` were not a hit, one miss for each reason.

    ``misses``: those of the tokens from ``begins`` on. What is behind them has no whole block.
    """
    behind, at = list[Miss](), begins
    for miss in misses:
        start, at = at, at + miss.tokens
        # What was found and not used was, with what follows it, of no use.
        start = used if not behind else max(start, used)
        if min(at, tokens) > start:
            behind.append(msgspec.structs.replace(miss, tokens=min(at, tokens) - start))
    if (rest := tokens - max(used, at)) > 0:
        if behind and behind[-1].reason is MissReason.SHORTER_THAN_A_BLOCK:
            rest += behind.pop().tokens
        behind.append(Miss(MissReason.SHORTER_THAN_A_BLOCK, rest))
    return behind
