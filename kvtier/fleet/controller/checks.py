"""Validation of what instances report: everything stored is bounded in size, printable and consistent.

Each check raises :class:`RefusedInstance` with a reason that the instance's operator can act on. Numbers are
checked while a message is decoded: their types have limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvtier.fleet.controller.errors import RefusedInstance
from kvtier.fleet.member.protocol import MAX_PEERS, Counters, Heartbeat, Hello, Model, TierDescription
from kvtier.memory.keys import KEY_BYTES
from kvtier.memory.layout import ChunkLayout
from kvtier.observability.whatif.report import Report as WhatIfReport
from kvtier.settings.controller import INSTANCE_ID
from kvtier.settings.peer import split_address

MAX_TIERS = 16
MAX_MODELS = 64
MAX_NAMES = 64
"""Per model."""
MAX_ENGINES = 256
MAX_COUNTERS = 256
"""Models and tenants together, or routes."""
MAX_REASONS = 64
MAX_CHARACTERS = 256
"""Per name or other text."""
MAX_GROUPS = 64
MAX_LAYERS = 4096
"""Per group."""
MAX_POINTS = 64
"""Estimated capacities of a tier."""
MAX_CHANGES = 512
"""Estimated changes of settings."""
MAX_CHUNK_BYTES = 1 << 40
MAX_CHUNK_TOKENS = 1 << 20

_ID = re.compile(INSTANCE_ID)


def check_hello(hello: Hello) -> None:
    """Check the description that an instance registers with."""
    if not _ID.fullmatch(hello.instance):
        raise RefusedInstance(
            f"{hello.instance[:MAX_CHARACTERS]!r} is not a valid instance id: use 1 to 128 letters, digits, "
            "'.', '_' and '-', starting with a letter or digit"
        )
    optional = [text for text in (hello.peer, hello.transport) if text is not None]
    _check_texts("the description of the instance", [hello.kvtier, hello.host, *optional])
    if hello.peer is not None:
        _check_address(hello.peer)
    _check_tiers(hello.tiers)


def check_heartbeat(heartbeat: Heartbeat, tiers: int) -> None:
    """Check a heartbeat of an instance that has ``tiers`` tiers."""
    if len(heartbeat.tiers) != tiers:
        raise RefusedInstance(
            f"the instance's heartbeat has {len(heartbeat.tiers)} tiers, but it registered {tiers}"
        )
    if len(heartbeat.engines) > MAX_ENGINES:
        raise RefusedInstance(f"the instance has {len(heartbeat.engines)} engines, more than {MAX_ENGINES}")
    _check_texts("the instance's engines", heartbeat.engines)
    if heartbeat.counters is not None:
        _check_counters(heartbeat.counters, tiers)


def _check_counters(counters: Counters, tiers: int) -> None:
    where = "the instance's counters"
    if (len(counters.outages), len(counters.corrupt)) != (tiers, tiers):
        raise RefusedInstance(f"{where} are not those of its {tiers} tiers")
    named = [*counters.models, *counters.tenants]
    if len(counters.peers) > MAX_PEERS or max(len(named), len(counters.routes)) > MAX_COUNTERS:
        raise RefusedInstance(
            f"{where} are of more than {MAX_PEERS} peers or {MAX_COUNTERS} models or routes"
        )
    if len(counters.misses) > MAX_REASONS:
        raise RefusedInstance(f"{where} have {len(counters.misses)} reasons of misses, not {MAX_REASONS}")
    ends = [text for route in counters.routes for text in (route.source, route.target)]
    peers = [text for peer in counters.peers for text in (peer.address, peer.instance or "-", peer.state)]
    _check_texts(where, [*(count.name for count in named), *ends, *peers, *counters.misses])


def check_what_if(report: WhatIfReport, tiers: Sequence[str]) -> None:
    """Check an estimate of an instance that has these ``tiers``."""
    where = "the instance's estimate"
    curves, changes = report.tiers, report.changes
    known = [curve.tier for curve in curves]
    if len(set(known)) < len(known) or not set(known).union(change.tier for change in changes) <= set(tiers):
        raise RefusedInstance(f"{where} is not about its own tiers")
    most = max((len(curve.points) for curve in curves), default=0)
    if most > MAX_POINTS or len(changes) > MAX_CHANGES:
        raise RefusedInstance(
            f"{where} has {most} capacities of a tier and {len(changes)} changes, "
            f"more than {MAX_POINTS} or {MAX_CHANGES}"
        )
    names = [name for change in changes for name in (change.policy, change.codec) if name is not None]
    stopped = [report.stopped] if report.stopped else []
    _check_texts(where, [*names, *stopped, *(curve.policy for curve in curves)])


def check_models(models: Sequence[Model]) -> None:
    """Check the models that an instance serves, including their layouts."""
    if len(models) > MAX_MODELS:
        raise RefusedInstance(f"the instance serves {len(models)} models, more than {MAX_MODELS}")
    for model in models:
        if not 0 < len(model.names) <= MAX_NAMES:
            raise RefusedInstance(
                f"one of the instance's models has {len(model.names)} names, not 1 to {MAX_NAMES}"
            )
        _check_texts("the instance's models", model.names)
        if len(model.namespace) != KEY_BYTES:
            raise RefusedInstance(
                f"the namespace of {model.names[0]!r} has {len(model.namespace)} bytes, not {KEY_BYTES}"
            )
        facts = [f"{name}={value}" for name, value in model.facts.items()]
        if len(facts) > MAX_NAMES:
            raise RefusedInstance(f"the instance's model {model.names[0]!r} has {len(facts)} facts")
        _check_texts("the facts of the instance's models", facts)
        if not _is_valid(model.layout):
            raise RefusedInstance(f"the layout of the instance's model {model.names[0]!r} is invalid")


def _check_tiers(tiers: Sequence[TierDescription]) -> None:
    if not 0 < len(tiers) <= MAX_TIERS:
        raise RefusedInstance(f"the instance has {len(tiers)} tiers, not 1 to {MAX_TIERS}")
    names = [tier.name for tier in tiers]
    _check_texts("the instance's tiers", [*names, *(tier.type for tier in tiers)])
    if len(set(names)) < len(names):
        raise RefusedInstance("two of the instance's tiers have the same name")


def _check_address(peer: str) -> None:
    try:
        split_address(peer)
    except ValueError as error:
        raise RefusedInstance(f"the instance's peer address: {error}") from error


def _check_texts(where: str, texts: Iterable[str]) -> None:
    for text in texts:
        if not text or len(text) > MAX_CHARACTERS or not text.isprintable():
            raise RefusedInstance(
                f"{where}: {text[:40]!r} is empty, longer than {MAX_CHARACTERS} characters or not printable"
            )


def _is_valid(layout: ChunkLayout) -> bool:
    """Return whether a layout, which is consistent since it was decoded, has the size of a real one."""
    if layout.chunk_tokens > MAX_CHUNK_TOKENS or len(layout.platform) > MAX_LAYERS:
        return False
    if len(layout.groups) > MAX_GROUPS:
        return False
    for group in layout.groups:
        if group.window < 0 or len(group.page_bytes) > MAX_LAYERS:
            return False
        if any(not 0 <= length <= MAX_CHUNK_BYTES for length in group.page_bytes):
            return False
    return layout.payload_bytes(layout.chunk_tokens) <= MAX_CHUNK_BYTES
