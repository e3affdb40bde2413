"""The book of grants by itself: bounds, expiry, who owns what, and that nothing is ever leaked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.arena import Arena
from kvtier.peers import grants as grants_module
from kvtier.peers.grants import Grant, GrantBook
from kvtier.settings_peer import PeerSettings
from kvtier.slices import PAGE_BYTES, Lease
from kvtier.transports.base import Access, RemoteSpan

PAGES = 16


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(PAGES * PAGE_BYTES)
    yield arena
    assert not arena.leases
    assert not arena.used
    arena.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def book_of(arena: Arena, clock: Clock, *, one_sided: bool = False, share: float = 0.5) -> GrantBook:
    return GrantBook(arena, PeerSettings(lease=10, share=share), one_sided=one_sided, clock=clock)


def leased(arena: Arena, *lengths: int) -> list[Lease]:
    leases = [arena.allocate(length) for length in lengths]
    assert None not in leases
    return [lease for lease in leases if lease is not None]


def span(grant: Grant, chunk: int, start: int = 0, length: int | None = None) -> RemoteSpan:
    lease = grant.leases[chunk]
    assert lease is not None
    return RemoteSpan(grant.number, lease.offset + start, lease.length if length is None else length)


def granted(book: GrantBook, leases: list[Lease], access: Access = Access.READ, owner: str = "a") -> Grant:
    grant = book.grant(owner, leases, access)
    assert grant is not None
    return grant


def test_what_lies_within_a_slice_is_held(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    grant = granted(book, leased(arena, 5000, PAGE_BYTES, 100))
    for chunk, start, length in [(0, 0, 5000), (0, 4999, 1), (1, 0, PAGE_BYTES), (2, 50, 50)]:
        lease = book.hold(span(grant, chunk, start, length), Access.READ)
        assert lease is not None
        assert lease.offset == grant.leases[chunk].offset  # type: ignore[union-attr]
        lease.release()
    book.end("a")


@pytest.mark.parametrize(
    ("chunk", "start", "length"),
    [
        (0, 0, 5001),  # Within the pages that are leased, but not within what is granted.
        (0, 5000, 1),
        (0, 1, 5000),
        (0, 0, 0),
        (0, 0, -1),
        (0, 10, -5),
        (1, -1, 1),  # In the padding of the slice before.
        (0, 0, 3 * PAGE_BYTES),  # Two slices side by side.
        (0, -PAGE_BYTES, 1),
        (1, 1 << 62, 1),
        (1, 0, 1 << 62),
    ],
)
def test_what_does_not_is_not(arena: Arena, clock: Clock, chunk: int, start: int, length: int) -> None:
    (before,) = leased(arena, PAGE_BYTES)
    book = book_of(arena, clock)
    grant = granted(book, leased(arena, 5000, PAGE_BYTES))
    assert book.hold(span(grant, chunk, start, length), Access.READ) is None
    assert book.hold(span(grant, 0)._replace(grant=grant.number + 1), Access.READ) is None
    assert book.hold(span(grant, 0)._replace(grant=0), Access.READ) is None
    book.end("a")
    before.release()


def test_numbers_are_random_and_fit(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    (lease,) = leased(arena, 10)
    numbers = {granted(book, [lease.share()]).number for _ in range(1000)}
    assert len(numbers) == 1000
    assert all(0 < number < 1 << 63 for number in numbers)
    assert max(numbers) > 1 << 60
    assert book.promised == 10
    lease.release()
    book.end("a")
    assert book.open == 0


def test_access_is_what_was_granted(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    reading = granted(book, leased(arena, 10))
    writing = granted(book, leased(arena, 10), Access.WRITE)
    assert book.hold(span(reading, 0), Access.WRITE) is None
    assert book.hold(span(writing, 0), Access.READ) is None
    lease = book.hold(span(writing, 0), Access.WRITE)
    assert lease is not None
    lease.release()
    book.end("a")


def test_what_is_unready_is_not_held(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    grant = granted(book, leased(arena, 10, 10))
    grant.unready.add(1)
    assert book.hold(span(grant, 1), Access.READ) is None
    lease = book.hold(span(grant, 0), Access.READ)
    assert lease is not None
    lease.release()
    book.end("a")


def test_release_chunk_by_chunk(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    ended: list[int] = []
    grant = granted(book, leased(arena, 10, 20, 30))
    grant.on_end = lambda: ended.append(1)
    gone = span(grant, 1)
    lease = book.hold(gone, Access.READ)
    assert lease is not None
    assert book.release("a", grant.number, [1])
    assert book.hold(gone, Access.READ) is None, "the grant is over"
    assert bytes(lease.view) == bytes(20), "its bytes are not"
    lease.release()
    assert not book.release("a", grant.number, [1, 0])
    assert not book.release("b", grant.number, [2])
    assert not ended
    assert book.release("a", grant.number, [2])
    assert ended == [1]
    assert book.open == 0
    assert not book.release("a", grant.number, [2])


def test_time_ends_a_grant_at_once_and_frees_it_when_looked_after(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    first = granted(book, leased(arena, 10))
    clock.now += 5
    second = granted(book, leased(arena, 10))
    clock.now += 5
    assert book.hold(span(first, 0), Access.READ) is None
    assert book.find("a", first.number) is None
    assert book.find("a", second.number) is second
    book.expire()
    assert book.open == 1
    assert not book.release("a", first.number, [0])
    assert book.release("a", second.number, [0])
    assert book.expired == 1


def test_late_but_before_anybody_looked_after_it(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    grant = granted(book, leased(arena, 10))
    clock.now += 10
    assert not book.release("a", grant.number, [0])
    assert book.open == 0


def test_memory_granted_for_one_sided_writing_outlives_its_time(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock, one_sided=True)
    kept = granted(book, leased(arena, 10), Access.WRITE)
    given_back = granted(book, leased(arena, 10), Access.WRITE)
    read = granted(book, leased(arena, 10))
    clock.now += 11
    book.expire()
    assert book.open == 2, "nobody can know that nobody writes any more"
    assert book.find("a", read.number) is None
    assert book.hold(span(kept, 0), Access.WRITE) is None
    assert not book.release("a", given_back.number, [0])
    assert book.open == 1
    book.end("a")
    assert book.open == 0


def test_memory_granted_for_writing_through_this_host_does_not(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    granted(book, leased(arena, 10), Access.WRITE)
    clock.now += 11
    book.expire()
    assert book.open == 0


def test_the_share_bounds_what_is_promised(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock, share=0.25)
    leases = leased(arena, *[PAGE_BYTES] * 6)
    grant = granted(book, leases)
    assert len(grant.leases) == 4
    assert book.promised == 4 * PAGE_BYTES
    assert book.grant("b", leases[4:]) is None
    again = granted(book, [lease.share() for lease in leases[:4]], owner="b")
    assert book.promised == 4 * PAGE_BYTES
    book.end("a")
    assert book.promised == 4 * PAGE_BYTES
    assert book.release("b", again.number, range(4))
    assert book.promised == 0
    for lease in leases[4:]:
        lease.release()


def test_slices_are_bounded_however_small(
    arena: Arena, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants_module, "MOST_SLICES", 3)
    book = book_of(arena, clock)
    (lease,) = leased(arena, 10)
    shares = [lease.share() for _ in range(5)]
    assert len(granted(book, shares).leases) == 3
    assert book.grant("b", shares[3:]) is None
    for one in [lease, *shares[3:]]:
        one.release()
    book.end("a")


def test_nothing_is_no_grant(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock)
    assert book.grant("a", []) is None
    book.end("a")
    book.end("a")


class Book(RuleBasedStateMachine):
    """Any sequence of what may happen to a book, beside a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(PAGES * PAGE_BYTES)
        self.clock = Clock()
        self.book = book_of(self.arena, self.clock)
        self.grants: list[tuple[str, Grant, dict[int, tuple[int, int]]]] = []
        self.held: list[Lease] = []

    @rule(owner=st.sampled_from("ab"), lengths=st.lists(st.integers(1, 3 * PAGE_BYTES), max_size=4))
    def grant(self, owner: str, lengths: list[int]) -> None:
        leases = [lease for length in lengths if (lease := self.arena.allocate(length)) is not None]
        grant = self.book.grant(owner, leases)
        count = 0 if grant is None else len(grant.leases)
        if grant is not None:
            slices = {at: (lease.offset, lease.length) for at, lease in enumerate(leases[:count])}
            self.grants.append((owner, grant, slices))
        for lease in leases[count:]:
            lease.release()

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), owner=st.sampled_from("ab"), chunks=st.lists(st.integers(-1, 5), max_size=4))
    def release(self, data: st.DataObject, owner: str, chunks: list[int]) -> None:
        its, grant, slices = data.draw(st.sampled_from(self.grants))
        stood = self.book.release(owner, grant.number, chunks)
        valid = its == owner and bool(slices) and grant.ends > self.clock.now
        assert stood == (valid and len(set(chunks)) == len(chunks) and set(chunks) <= slices.keys())
        if its == owner:
            for chunk in chunks:
                slices.pop(chunk, None)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), start=st.integers(-10, 9000), length=st.integers(0, 9000))
    def hold(self, data: st.DataObject, start: int, length: int) -> None:
        _, grant, slices = data.draw(st.sampled_from(self.grants))
        base = min((offset for offset, _ in slices.values()), default=0)
        at = base + start
        lease = self.book.hold(RemoteSpan(grant.number, at, length), Access.READ)
        within = any(offset <= at and at + length <= offset + size for offset, size in slices.values())
        assert (lease is not None) == (within and length > 0 and grant.ends > self.clock.now)
        if lease is not None:
            self.held.append(lease)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        self.book.expire()
        for _, grant, slices in self.grants:
            if grant.ends <= self.clock.now:
                slices.clear()

    @rule(owner=st.sampled_from("ab"))
    def end(self, owner: str) -> None:
        self.book.end(owner)
        for its, _, slices in self.grants:
            if its == owner:
                slices.clear()

    @rule()
    def let_go(self) -> None:
        while self.held:
            self.held.pop().release()

    @invariant()
    def counts_are_right(self) -> None:
        assert self.book.open == sum(bool(slices) for _, _, slices in self.grants)
        assert self.book.promised == sum(size for _, _, slices in self.grants for _, size in slices.values())
        assert self.book.promised <= self.book.limit
        assert self.arena.leases == len(self.held) + sum(len(slices) for _, _, slices in self.grants)

    def teardown(self) -> None:
        self.end("a")
        self.end("b")
        self.let_go()
        assert not self.arena.leases
        assert not self.arena.used
        self.arena.close()


Book.TestCase.settings = hypothesis_settings(deadline=None, max_examples=60, stateful_step_count=40)
TestBook = Book.TestCase
