"""The choice of chunks to evict: in the policy's order, but each chunk before its parent."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvtier import native
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, IncomingPrompt
from kvtier.catalog.tenants import EvictionScope, TenantPolicies

IsRow = Callable[[int], bool]
"""Answers a question about the chunk in a row."""
DEFERRED_A_LIMIT = 16
"""Examine at most this multiple of the limit of deferred chunks, whose children come later in the order."""


def select_victims(
    policy: EvictionPolicy,
    columns: ChunkColumns,
    children: array[int],
    ready: bytearray,
    mask: int,
    is_pinned: IsRow | None,
    is_leased: IsRow | None,
    needed_bytes: int,
    limit: int | None,
    scope: EvictionScope = EvictionScope.ALL,
    prompt: IncomingPrompt | None = None,
) -> Sequence[int]:
    """Choose victims while a policy offers one row after another. Return their rows, in order.

    A chunk is chosen once each of its children in the tier was chosen or must stay; if these come later in
    the policy's order, it is deferred until then. So a chunk that is in use does not keep its prefix in the
    tier, but a prefix that is not in use is evicted from its end. Only chunks with ``ready[row] & mask`` may
    leave; at most ``limit`` of them that are neither pinned nor deferred are examined. ``children``: their
    number in the tier, by row. ``scope``: of which tenants. ``prompt``: the new chunks that need the room,
    if the policy may decline them.
    """
    parents, lengths = columns.parents, columns.lengths
    left = waiting = -1
    if limit is not None:
        left, waiting = limit, DEFERRED_A_LIMIT * limit
    shared = policy if isinstance(policy, TenantPolicies) else None
    order = policy.victims() if prompt is None else policy.victims_for(prompt)
    if shared is None and native.available():
        return native.core.select_victims(
            iter(order),
            parents,
            lengths,
            children,
            ready,
            mask,
            is_pinned,
            is_leased,
            needed_bytes,
            left,
            waiting,
            prompt is None,
        )
    chosen: list[int] = []
    deferred: dict[int, None] = {}
    finished: dict[int, int] = {}  # By row: how many of its children are chosen or must stay.

    def choose_deferred(row: int) -> None:
        """Choose a chunk that was only waiting for its children, and its parent if that waited for it."""
        nonlocal needed_bytes
        while needed_bytes > 0 and row in deferred and finished[row] >= children[row]:
            del deferred[row]
            chosen.append(row)
            needed_bytes -= lengths[row]
            row = parents[row]
            if row < 0:
                return
            finished[row] = finished.get(row, 0) + 1

    for row in order if shared is None else shared.order(chosen, scope):
        if needed_bytes <= 0 or not left or not waiting:
            break
        if ready[row] & mask and (is_pinned is None or not is_pinned(row)):
            if is_leased is None or not is_leased(row):
                if children[row] and finished.get(row, 0) < children[row]:
                    deferred[row] = None
                    waiting -= 1
                    continue
                chosen.append(row)
                needed_bytes -= lengths[row]
            left -= 1
        parent = parents[row]
        if parent >= 0:
            finished[parent] = finished.get(parent, 0) + 1
            if deferred and parent in deferred:
                choose_deferred(parent)
    else:
        if not chosen and deferred and prompt is None:  # Otherwise their children are worth more.
            return _unblocked(list(deferred), shared)
    return chosen if shared is None or scope is EvictionScope.ANY else shared.due(chosen)


def _unblocked(deferred: Sequence[int], shared: TenantPolicies | None) -> Sequence[int]:
    """Return what to choose if all chunks wait for others.

    Those may be chunks of other tenants, who give up some from now on. In a corrupt, circular chain every
    chunk waits for another: it must not stay in the tier for ever.
    """
    return [] if shared is not None and shared.unblock() else deferred[-1:]
