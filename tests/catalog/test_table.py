"""The native table of chunks and selection, compared with the Python ones; and bad input."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator

import pytest
from blake3 import blake3

from kvtier import native
from kvtier.catalog.eviction import NO_PARENT, ChunkColumns
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.selection import select_victims
from kvtier.catalog.table import ChunkTable, PythonTable, TableColumns, make_table
from kvtier.memory.keys import KEY_BYTES, ChunkKey
from tests.rigs.cores import with_each_core

ROWS, TIERS, OWN = 64, 3, 1
KEYS = [ChunkKey(blake3(bytes([number])).digest()) for number in range(40)]


@pytest.fixture(autouse=True)
def _needs_native() -> None:
    if not native.available():
        pytest.skip(native.summary())


def make(table_of: Callable[[TableColumns], ChunkTable]) -> tuple[TableColumns, ChunkTable]:
    """Return columns with vacant rows, and their table. One tier has its own lengths."""
    shared = ChunkColumns()
    own = shared.with_own_lengths()
    columns = TableColumns(shared, [own.lengths if tier == OWN else shared.lengths for tier in range(TIERS)])
    shared.keys += bytes(ROWS * KEY_BYTES)
    columns.ready += bytes(ROWS)
    columns.pending += bytes(ROWS)
    numbers = (shared.parents, shared.lengths, own.lengths, columns.spaces, columns.generations)
    for column in (*numbers, *columns.children):
        column.frombytes(bytes(ROWS * column.itemsize))
    return columns, table_of(columns)


def state(columns: TableColumns, table: ChunkTable) -> object:
    """Return all that a table and its columns hold, except for what vacant rows are left with."""
    rows = sorted(row for row in table.find_all(KEYS) if row >= 0)
    shared = columns.shared
    described = (shared.parents, *columns.lengths, columns.spaces, columns.generations)
    return (
        table.find_all(KEYS),
        table.parents_only,
        [[column[row] for row in rows] for column in described],
        columns.ready,
        columns.pending,
        columns.children,
    )


@pytest.mark.parametrize("seed", range(20))
def test_native_table_equals_the_python_one(seed: int) -> None:
    chance = random.Random(seed)
    both = [make(PythonTable), make(make_table)]
    assert [type(table) for _, table in both] == [PythonTable, native.core.ChunkTable]
    vacant = list(range(ROWS))

    def on_both(method: str, *arguments: object) -> object:
        results = []
        for _, table in both:
            try:
                results.append(getattr(table, method)(*arguments))
            except (KeyError, ValueError) as error:
                results.append((type(error), error.args))
        assert results[0] == results[1], (method, arguments)
        assert state(*both[0]) == state(*both[1]), (method, arguments)
        return results[0]

    for _ in range(150):
        columns, table = both[0]
        tier, keys = chance.randrange(TIERS), chance.sample(KEYS, chance.choice([1, 2, 5, 25]))
        if chance.random() < 0.2:
            keys.append(keys[0])
        known = {key: row for key in KEYS if (row := table.find(key)) >= 0}
        on_both("prefix", keys, chance.choice([1, 2, 7]))
        on_both("absent", keys, tier)
        if chance.random() < 0.5:
            rows, lengths = vacant[: len(keys)], [chance.randrange(1, 1 << 40) for _ in keys]
            parent = chance.choice([NO_PARENT, *known.values()])
            if len(rows) < len(keys) or on_both("fill", keys, rows, lengths, parent, 1, 2) is not None:
                continue
            del vacant[: len(rows)]
            on_both("enter", rows, tier, chance.random() < 0.7)
        elif chance.random() < 0.3 and known:
            held = [row for row in known.values() if columns.ready[row] | columns.pending[row]]
            outside = [row for row in held if not (columns.ready[row] | columns.pending[row]) >> tier & 1]
            on_both("enter", outside, tier, True)
        else:
            there = [
                key for key in keys if (row := known.get(key)) is not None and columns.ready[row] >> tier & 1
            ]
            left = on_both("leave", there if chance.random() < 0.8 else keys, tier)
            assert isinstance(left, tuple)
            if isinstance(left[0], list):
                freed = on_both("release", left[0], tier)
                assert isinstance(freed, list)
                vacant += freed


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("lru", [True, False])
def test_native_selection_equals_the_python_one(
    seed: int, lru: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in an order in which parents come first, and with chunks that must stay."""
    chance = random.Random(seed)
    columns = ChunkColumns()
    path = seed % 4 == 0  # Offered from its root: all chunks wait for the last one.
    columns.parents.extend(row - 1 if path else chance.randrange(-1, row) for row in range(ROWS))
    columns.lengths.extend(chance.randrange(1, 9) for _ in range(ROWS))
    children = array("I", bytes(4 * ROWS))
    for parent in columns.parents:
        if parent >= 0:
            children[parent] += 1
    ready = bytearray(chance.choice([2, 2, 2, 0, 1]) for _ in range(ROWS))
    order = list(range(ROWS)) if path else chance.sample(range(ROWS), ROWS)
    busy, pinned = set(chance.sample(order, 5)), set(chance.sample(order, 5))
    policy = LruPolicy.factory()(columns)
    for row in order:
        policy.added([row], 0.0)
    if not lru:
        monkeypatch.setattr(policy, "victims", lambda: iter(order))

    def select(needed: int, limit: int | None) -> list[int]:
        questions = chance.choice([(None, None), (pinned.__contains__, busy.__contains__)])
        arguments = (policy, columns, children, ready, 2, *questions, needed, limit)
        fast, slow = with_each_core(lambda: list(select_victims(*arguments)))
        assert fast == slow
        return fast

    assert select(1 << 40, None)
    for needed, limit in ((1 << 40, 3), (1 << 40, 1), (5, None), (60, 20), (0, None)):
        select(needed, limit)


def test_order_of_lru_is_read_as_it_is_asked_for() -> None:
    """A search that was abandoned neither locks the policy's arrays nor sees freed memory."""
    columns = ChunkColumns()
    columns.parents.extend([NO_PARENT] * 9)
    policy = LruPolicy.factory()(columns)
    policy.added([0], 0.0)
    policy.added([1], 0.0)
    order = policy.victims()
    assert next(order) == 0
    policy.added([8], 0.0)
    assert list(order) == [1, 8]
    assert list(order) == []
    broken = native.core.LruOrder(array("i", [7]))
    with pytest.raises(IndexError):
        list(broken)


def test_errors_of_an_order_and_of_questions_are_raised() -> None:
    columns = ChunkColumns()
    columns.parents.extend([NO_PARENT] * 2)
    columns.lengths.extend([1, 1])

    def select(order: Iterator[int], leased: Callable[[int], bool] | None = None) -> list[int]:
        children, ready = array("I", [0, 0]), bytearray(b"\1\1")
        return native.core.select_victims(
            order, columns.parents, columns.lengths, children, ready, 1, None, leased, 9, -1, -1, True
        )

    def fails(row: int) -> bool:
        columns.parents.append(row)  # Locked.
        return True

    assert select(iter([1, 0])) == [1, 0]
    for rows in ([2], [-1], [1 << 40]):
        with pytest.raises((IndexError, OverflowError)):
            select(iter(rows))
    with pytest.raises(TypeError):
        select(iter(["0"]))  # type: ignore[list-item]
    with pytest.raises(ZeroDivisionError):
        select(1 // row - 1 for row in [1, 0])
    with pytest.raises(BufferError):
        select(iter([0]), fails)
    columns.parents.append(0)


@pytest.mark.parametrize("key", [b"", b"short", bytes(33)])
def test_what_is_not_a_key_is_unknown(key: bytes) -> None:
    for table_of in (PythonTable, make_table):
        _, table = make(table_of)
        table.fill(KEYS[:2], [3, 2], [1, 1], NO_PARENT, 0, 0)
        assert table.find(ChunkKey(key)) == -1
        assert table.find_all([KEYS[0], ChunkKey(key), KEYS[1]]) == [3, -1, 2]
        with pytest.raises(ValueError, match="32 bytes"):
            table.fill([KEYS[2], ChunkKey(key)], [0, 1], [1, 1], NO_PARENT, 0, 0)
        assert table.find(KEYS[2]) == -1


def test_rows_beyond_the_columns_are_refused() -> None:
    columns, table = make(make_table)
    calls: list[Callable[[], object]] = [
        lambda: table.fill(KEYS[:1], [ROWS], [1], NO_PARENT, 0, 0),
        lambda: table.enter([ROWS], 0, True),
        lambda: table.release([ROWS], 0),
        lambda: table.free_parents([ROWS]),
        lambda: table.enter([0], TIERS, True),
        lambda: native.core.keys_at(columns.shared.keys, [ROWS]),
    ]
    for call in calls:
        with pytest.raises(IndexError):
            call()
