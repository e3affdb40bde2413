"""What an instance may say of itself: everything that is kept of it is bounded, printable and makes sense.

Each check raises :class:`RefusedInstance` with a reason that whoever runs the instance can act on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvtier.agent.protocol import VERSION, Heartbeat, Hello, Model, TierDescription
from kvtier.controller.errors import RefusedInstance
from kvtier.keys import KEY_BYTES
from kvtier.layout import ChunkLayout
from kvtier.settings_controller import INSTANCE_ID
from kvtier.settings_peer import split_address

MOST_TIERS = 16
MOST_MODELS = 64
MOST_NAMES = 64
"""Of one model."""
MOST_ENGINES = 256
MOST_CHARACTERS = 256
"""In anything that has a name."""
MOST_GROUPS = 64
MOST_LAYERS = 4096
"""In one group."""
MOST_COUNT = 1 << 62
"""Of bytes, chunks or tokens: what adds two of them still fits into 64 bits."""
MOST_CHUNK_BYTES = 1 << 40
MOST_CHUNK_TOKENS = 1 << 20

_ID = re.compile(INSTANCE_ID)


def check_hello(hello: Hello) -> None:
    """Whether an instance can be registered as what it says that it is."""
    if hello.version != VERSION:
        raise RefusedInstance(
            f"this controller speaks version {VERSION} of the protocol and the instance {hello.version}: "
            "install the same kvtier on both"
        )
    if not _ID.fullmatch(hello.instance):
        raise RefusedInstance(
            f"{hello.instance[:MOST_CHARACTERS]!r} is no instance id: 1 to 128 letters, digits, '.', '_' and "
            "'-', the first a letter or a digit"
        )
    optional = [text for text in (hello.peer, hello.transport) if text is not None]
    _check_texts("its description", [hello.kvtier, hello.host, *optional])
    if hello.peer is not None:
        _check_address(hello.peer)
    _check_counts("its process", [hello.process])
    _check_tiers(hello.tiers)


def check_heartbeat(heartbeat: Heartbeat, tiers: int) -> None:
    """Whether a heartbeat is one of an instance with so many tiers."""
    if len(heartbeat.tiers) != tiers:
        raise RefusedInstance(f"its heartbeat has {len(heartbeat.tiers)} tiers where it said {tiers}")
    counts = [count for tier in heartbeat.tiers for count in (tier.used, tier.chunks, tier.found)]
    _check_counts("its heartbeat", [*counts, heartbeat.looked_up, heartbeat.leases, heartbeat.pending_bytes])
    if len(heartbeat.engines) > MOST_ENGINES:
        raise RefusedInstance(f"it has {len(heartbeat.engines)} engines, more than {MOST_ENGINES}")
    _check_texts("its engines", heartbeat.engines)


def check_models(models: Sequence[Model]) -> None:
    """Whether prompts can be cut into chunks as these models say."""
    if len(models) > MOST_MODELS:
        raise RefusedInstance(f"it serves {len(models)} models, more than {MOST_MODELS}")
    for model in models:
        if not 0 < len(model.names) <= MOST_NAMES:
            raise RefusedInstance(
                f"a model of it has {len(model.names)} names, and can have 1 to {MOST_NAMES}"
            )
        _check_texts("its models", model.names)
        if len(model.namespace) != KEY_BYTES:
            raise RefusedInstance(
                f"the namespace of {model.names[0]!r} has {len(model.namespace)} bytes, not {KEY_BYTES}"
            )
        if not _is_sane(model.layout):
            raise RefusedInstance(f"the layout of its model {model.names[0]!r} makes no sense")


def _check_tiers(tiers: Sequence[TierDescription]) -> None:
    if not 0 < len(tiers) <= MOST_TIERS:
        raise RefusedInstance(f"it has {len(tiers)} tiers, and can have 1 to {MOST_TIERS}")
    names = [tier.name for tier in tiers]
    _check_texts("its tiers", [*names, *(tier.type for tier in tiers)])
    if len(set(names)) < len(names):
        raise RefusedInstance("two of its tiers have one name")
    _check_counts("its tiers", [tier.capacity for tier in tiers if tier.capacity is not None])


def _check_address(peer: str) -> None:
    try:
        split_address(peer)
    except ValueError as error:
        raise RefusedInstance(f"where peers reach it: {error}") from error


def _check_texts(where: str, texts: Iterable[str]) -> None:
    for text in texts:
        if not text or len(text) > MOST_CHARACTERS or not text.isprintable():
            raise RefusedInstance(
                f"{where}: {text[:40]!r} is empty, over {MOST_CHARACTERS} characters or not printable"
            )


def _check_counts(where: str, counts: Iterable[int]) -> None:
    for count in counts:
        if not 0 <= count <= MOST_COUNT:
            raise RefusedInstance(f"{where}: {count} is less than 0 or over {MOST_COUNT}")


def _is_sane(layout: ChunkLayout) -> bool:
    if not 0 < layout.chunk_tokens <= MOST_CHUNK_TOKENS or not 0 < layout.ranks <= MOST_CHUNK_TOKENS:
        return False
    if len(layout.groups) > MOST_GROUPS or len(layout.platform) > MOST_LAYERS:
        return False
    for group in layout.groups:
        if group.block_tokens <= 0 or group.window < 0 or len(group.page_bytes) > MOST_LAYERS:
            return False
        if any(not 0 <= length <= MOST_CHUNK_BYTES for length in group.page_bytes):
            return False
    return layout.payload_bytes(layout.chunk_tokens) <= MOST_CHUNK_BYTES
