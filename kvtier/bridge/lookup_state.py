"""What a scheduler has been granted for a lookup."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.bridge import protocol
from kvtier.rpc.calls import Call


@dataclass
class LookupState:
    """Everything that a lookup has been granted so far, in prefix order."""

    call: Call[protocol.Found]
    """Settled by the first answer; further ones may follow."""
    leases: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    fetching: int = 0
    coming: list[int] = field(default_factory=list)
    """The sources of the chunks in flight. Each of them may still fail."""
    needed: int = 0
    """With states: how many leases there must be. With fewer, all are useless."""
    staging: int = 0
    """Number of the staging buffer that holds the chunks whose source is one past the last tier."""
    held: int = 0
    """With states: how many leading chunks are held, also beyond the last state."""
    last_tokens: int = 0
    """If the last chunk is to be used in part: how many tokens its blocks hold."""
    block_hashes: bytes = b""
    """The block hashes of that chunk, once it has arrived."""
    parent: bytes = b""
    """The key before that chunk, once it has arrived."""
    likely_blocks: int = 0
    """How many of its blocks are expected to be equal. Never more are."""
    updated_at: float = 0.0
    """Time of the last answer (:func:`time.monotonic`); each batch that arrives causes one."""

    @property
    def answered(self) -> bool:
        """Whether there was an answer."""
        return self.call.result is not None

    @property
    def final(self) -> bool:
        """Whether the lookup is complete."""
        return self.answered and not self.fetching

    @property
    def located(self) -> bool:
        """Whether it is known which chunks are held. Chunks in flight may still fail."""
        return self.answered and len(self.coming) == self.fetching

    @property
    def total(self) -> int:
        """The number of leases, including those of chunks in flight."""
        return len(self.leases) + len(self.coming)
