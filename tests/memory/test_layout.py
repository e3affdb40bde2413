"""Chunk layouts: each payload byte belongs to one span, and each block that may be needed has a span."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.memory.layout import STATE_TOKENS, ChunkLayout, GroupLayout, GroupValues, namespace

MODEL = ChunkLayout(
    chunk_tokens=256,
    groups=(GroupLayout(32, (4096, 4096)), GroupLayout(64, (8192,), window=128)),
    ranks=2,
    platform="cpu LBHNC float32",
)

LOSSY = msgspec.structs.replace(MODEL, values=(GroupValues("float32", 32, 32, 32), GroupValues()))
"""The same for an engine that accepts loss."""

block_tokens = st.sampled_from([1, 2, 4, 8])
groups = st.builds(
    GroupLayout,
    block_tokens,
    st.lists(st.integers(1, 64), min_size=1, max_size=3).map(tuple),
    st.just(0) | st.integers(1, 24),
)
layouts = st.builds(
    ChunkLayout,
    st.just(16),
    st.lists(groups, min_size=1, max_size=3).map(tuple),
    st.integers(1, 3),
    st.text(),
)
chunk_lengths = st.integers(1, 16)


def test_state_is_an_object_of_its_own() -> None:
    """Of one page in each group with states, and of none in the others."""
    attention, states = GroupLayout(32, (4096, 4096)), GroupLayout(64, (1000,), state=True)
    layout = ChunkLayout(128, (attention, states, states), ranks=2)
    assert layout.has_states
    assert (layout.payload_bytes(128), layout.payload_bytes(STATE_TOKENS)) == (2 * 4 * 8192, 2 * 2000)
    assert [(span.group, span.offset, span.pages) for span in layout.spans(STATE_TOKENS, 1)] == [
        (0, 2000, 0),
        (0, 2000, 0),
        (1, 2000, 1),
        (2, 3000, 1),
    ]
    assert not ChunkLayout(128, (attention,)).has_states


@pytest.mark.parametrize(
    ("ranks", "chunk", "state"), [(1, (0,), (0,)), (2, (0, 0), (0, 1)), (4, (0, 0, 0, 0), (0, 1, 2, 3))]
)
def test_what_ranks_hold_in_common_is_stored_once(
    ranks: int, chunk: tuple[int, ...], state: tuple[int, ...]
) -> None:
    """Latent attention beside states that are split between the ranks."""
    latent, states = GroupLayout(64, (1000,), shards=(0,) * ranks), GroupLayout(64, (500,), state=True)
    layout = ChunkLayout(128, (latent, states), ranks=ranks)
    assert layout.payload_bytes(128) == 2000
    assert layout.payload_bytes(STATE_TOKENS) == ranks * 500
    assert tuple(layout.share(128, rank) // 2000 for rank in range(ranks)) == chunk
    assert tuple(layout.share(STATE_TOKENS, rank) // 500 for rank in range(ranks)) == state


def test_ranks_take_turns_to_write_what_they_share() -> None:
    """Each chunk is written once for each share, and the work is divided."""
    layout = ChunkLayout(64, (GroupLayout(64, (1000,), shards=(0, 0, 1, 1)),), ranks=4)
    writers = [[rank for rank in range(4) if layout.writes(64, rank, number)] for number in range(4)]
    assert writers == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {layout.share(64, rank) for rank in writers[0]} == {layout.share(64, rank) for rank in writers[1]}


def test_ranks_that_share_need_not_be_neighbours() -> None:
    """Two heads, each on ranks that divide its tokens; what of a group differs makes another share."""
    heads, tokens = GroupLayout(64, (10,), shards=(0, 0, 1, 1)), GroupLayout(64, (20,), shards=(0, 1, 0, 1))
    assert ChunkLayout(64, (tokens,), ranks=4).shares(64) == (0, 1, 0, 1)
    assert ChunkLayout(64, (heads, tokens), ranks=4).shares(64) == (0, 1, 2, 3)
    layout = ChunkLayout(64, (tokens,), ranks=4)
    assert [layout.share(64, rank) for rank in range(4)] == [0, 20, 0, 20]
    assert layout.payload_bytes(64) == 40
    writers = [[rank for rank in range(4) if layout.writes(64, rank, number)] for number in range(2)]
    assert writers == [[0, 1], [2, 3]]


@given(layouts, chunk_lengths)
def test_spans_cover_the_payload_without_gap_or_overlap(layout: ChunkLayout, tokens: int) -> None:
    stop = 0
    for rank in range(layout.ranks):
        for span in layout.spans(tokens, rank):
            assert span.offset == stop
            stop += span.pages * span.page_bytes
    assert stop == layout.payload_bytes(tokens)


@given(layouts, chunk_lengths)
def test_every_rank_has_a_span_for_every_layer(layout: ChunkLayout, tokens: int) -> None:
    layers = [
        (index, layer, len(group.blocks(tokens)), page_bytes)
        for index, group in enumerate(layout.groups)
        for layer, page_bytes in enumerate(group.page_bytes)
    ]
    for rank in range(layout.ranks):
        spans = list(layout.spans(tokens, rank))
        assert [(span.group, span.layer, span.pages, span.page_bytes) for span in spans] == layers
        assert spans[0].offset == rank * layout.rank_bytes(tokens)


@given(layouts, st.integers(0, 15))
def test_shorter_chunk_is_never_larger_without_windows(layout: ChunkLayout, tokens: int) -> None:
    full = msgspec.structs.replace(
        layout, groups=tuple(msgspec.structs.replace(group, window=0) for group in layout.groups)
    )
    assert full.payload_bytes(tokens) <= full.payload_bytes(tokens + 1)
    assert layout.payload_bytes(tokens) <= full.payload_bytes(tokens)


def test_model_with_two_groups() -> None:
    assert MODEL.rank_bytes(256) == 8 * 2 * 4096 + 2 * 8192
    assert MODEL.payload_bytes(256) == 2 * MODEL.rank_bytes(256)
    assert [tuple(span) for span in MODEL.spans(256, 1)] == [
        (0, 0, 81920, 8, 4096),
        (0, 1, 114688, 8, 4096),
        (1, 0, 147456, 2, 8192),
    ]


# Stored blocks.


@given(block_tokens, st.integers(1, 64))
def test_full_attention_stores_every_block(size: int, tokens: int) -> None:
    assert GroupLayout(size, (1,)).blocks(tokens) == range(-(-tokens // size))


@given(block_tokens, st.integers(1, 64), st.integers(2, 80))
def test_window_stores_blocks_that_prompts_see_which_leave_after_a_whole_block(
    size: int, tokens: int, window: int
) -> None:
    # The token at position `whole` sees itself and the window - 1 tokens before it.
    whole = tokens // size * size
    visible = {position // size for position in range(max(0, whole - window + 1), tokens)}
    assert set(GroupLayout(size, (1,), window).blocks(tokens)) == visible


def test_window_of_one_stores_no_full_blocks() -> None:
    assert len(GroupLayout(4, (1,), window=1).blocks(16)) == 0


@pytest.mark.parametrize(
    ("tokens", "window", "stored"),
    [
        (256, 128, range(4, 8)),
        (256, 129, range(4, 8)),
        (256, 130, range(3, 8)),
        (256, 512, range(8)),
        (40, 16, range(2)),
        (223, 64, range(4, 7)),
    ],
)
def test_blocks_that_a_window_sees_are_stored(tokens: int, window: int, stored: range) -> None:
    assert GroupLayout(32, (1,), window).blocks(tokens) == stored


# Fingerprints.


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(MODEL, chunk_tokens=512),
        msgspec.structs.replace(MODEL, groups=MODEL.groups[:1]),
        msgspec.structs.replace(MODEL, groups=MODEL.groups[::-1]),
        msgspec.structs.replace(MODEL, groups=(GroupLayout(64, (4096, 4096)), MODEL.groups[1])),
        msgspec.structs.replace(MODEL, groups=(GroupLayout(32, (8192,)), MODEL.groups[1])),
        msgspec.structs.replace(MODEL, groups=(MODEL.groups[0], GroupLayout(64, (8192,), window=64))),
        msgspec.structs.replace(MODEL, ranks=1),
        msgspec.structs.replace(MODEL, platform="cpu LBHNC bfloat16"),
        LOSSY,
        msgspec.structs.replace(LOSSY, values=(GroupValues(), GroupValues())),
    ],
)
def test_any_difference_changes_the_fingerprint(other: ChunkLayout) -> None:
    assert other.fingerprint() != MODEL.fingerprint()
    assert namespace("llama", other) != namespace("llama", MODEL)


@given(layouts, layouts)
def test_fingerprints_are_equal_only_for_equal_layouts(left: ChunkLayout, right: ChunkLayout) -> None:
    assert (left.fingerprint() == right.fingerprint()) is (left == right)


@given(st.text(max_size=8), st.text(max_size=8))
def test_namespaces_of_models_differ(left: str, right: str) -> None:
    assert (namespace(left, MODEL) == namespace(right, MODEL)) is (left == right)


def test_fingerprint_and_namespace_are_stable() -> None:
    fingerprint = "824d39b8f2cea53d24d499e71a96690537da65aab0eea6e6b934159ae08d1815"
    assert MODEL.fingerprint().hex() == fingerprint
    space = "528f8568ba2bb1555fcb93b5181e1c6864788b1e3f13acdac04c1b5bdf9863ca"
    assert namespace("llama", MODEL).hex() == space


@pytest.mark.parametrize(
    "fields",
    [
        {"ranks": 0},
        {"ranks": 10**9},
        {"chunk_tokens": 0},
        {"groups": (GroupLayout(0, (1,)),)},
        {"groups": (GroupLayout(-16, (1,)),)},
        {"groups": (GroupLayout(16, (1,), shards=(0,)),)},
        {"values": (GroupValues(),)},
        {"values": (GroupValues("float32", -1, 1, 1), GroupValues())},
    ],
)
def test_invalid_layout_from_another_host_is_refused(fields: dict[str, Any]) -> None:
    """Before anything is allocated for it."""
    valid = msgspec.structs.asdict(MODEL) | fields
    with pytest.raises(LayoutError):
        ChunkLayout(**valid)
    encoded = msgspec.msgpack.encode(list(valid.values()))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=ChunkLayout)


@pytest.mark.parametrize("layout", [MODEL, LOSSY])
def test_layout_survives_serialization(layout: ChunkLayout) -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=ChunkLayout)
    assert copy == layout
    assert copy.fingerprint() == layout.fingerprint()


def test_layout_of_an_earlier_version_accepts_no_loss() -> None:
    earlier = msgspec.msgpack.encode(msgspec.structs.astuple(MODEL)[:-1])
    assert msgspec.msgpack.decode(earlier, type=ChunkLayout) == MODEL
    differs = {name for name, value in LOSSY.fields().items() if MODEL.fields()[name] != value}
    assert differs == {"accept_lossy"}


def test_chunk_tokens_must_be_a_multiple_of_the_block_size() -> None:
    with pytest.raises(LayoutError, match="use `auto`, 240 or another multiple of 48"):
        ChunkLayout(256, (GroupLayout(48, (1,)),))
