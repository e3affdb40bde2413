"""``GrantBook``: bounds, expiry, ownership, and that it never leaks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.memory.arena import Arena
from kvtier.memory.slices import PAGE_BYTES, Lease
from kvtier.peers import grants as grants_module
from kvtier.peers.grants import Grant, GrantBook
from kvtier.settings.peer import PeerSettings
from kvtier.transports.base import Access, RemoteSpan
from tests.rigs.clock import Clock
from tests.rigs.peer_server import held

PAGES = 16


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


@pytest.fixture
def book(arena: Arena, clock: Clock) -> Iterator[GrantBook]:
    book = book_of(arena, clock)
    yield book
    book.close()
    assert (book.open, book.granted_bytes, book.slices) == (0, 0, 0)


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


def span_of(grant: Grant, copy: Lease) -> RemoteSpan:
    return RemoteSpan(grant.number, copy.offset, PAGE_BYTES)


def is_held(book: GrantBook, where: RemoteSpan) -> bool:
    lease = book.hold(where, Access.READ)
    if lease is not None:
        lease.release()
    return lease is not None


def granted(book: GrantBook, leases: list[Lease], access: Access = Access.READ, owner: str = "a") -> Grant:
    grant = book.grant(owner, leases, access)
    assert grant is not None
    return grant


def test_span_within_slice_is_held(book: GrantBook, arena: Arena) -> None:
    grant = granted(book, leased(arena, 5000, PAGE_BYTES, 100))
    for chunk, start, length in [(0, 0, 5000), (0, 4999, 1), (1, 0, PAGE_BYTES), (2, 50, 50)]:
        with held(book, span(grant, chunk, start, length)) as lease:
            assert lease.offset == grant.leases[chunk].offset  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("chunk", "start", "length"),
    [
        (0, 0, 5001),  # Within the leased pages, but beyond the granted length.
        (0, 5000, 1),
        (0, 1, 5000),
        (0, 0, 0),
        (0, 0, -1),
        (0, 10, -5),
        (1, -1, 1),  # In the padding of the previous slice.
        (0, 0, 3 * PAGE_BYTES),  # Two adjacent slices.
        (0, -PAGE_BYTES, 1),
        (1, 1 << 62, 1),
        (1, 0, 1 << 62),
    ],
)
def test_span_outside_slice_is_not_held(
    book: GrantBook, arena: Arena, chunk: int, start: int, length: int
) -> None:
    (before,) = leased(arena, PAGE_BYTES)
    grant = granted(book, leased(arena, 5000, PAGE_BYTES))
    assert book.hold(span(grant, chunk, start, length), Access.READ) is None
    _, offset, size = span(grant, 0)
    for number in (grant.number + 1, 0):
        assert book.hold(RemoteSpan(number, offset, size), Access.READ) is None
    before.release()


def test_grant_numbers_are_random_and_fit(book: GrantBook, arena: Arena) -> None:
    (lease,) = leased(arena, 10)
    numbers = {granted(book, [lease.share()]).number for _ in range(1000)}
    assert len(numbers) == 1000
    assert all(0 < number < 1 << 63 for number in numbers)
    assert max(numbers) > 1 << 60
    assert book.granted_bytes == 10
    lease.release()


def test_access_is_limited_to_what_was_granted(book: GrantBook, arena: Arena) -> None:
    reading = granted(book, leased(arena, 10))
    writing = granted(book, leased(arena, 10), Access.WRITE)
    assert book.hold(span(reading, 0), Access.WRITE) is None
    assert book.hold(span(writing, 0), Access.READ) is None
    with held(book, span(writing, 0), Access.WRITE):
        pass


def test_checksum_of_a_slice_counts_if_it_was_written_once(book: GrantBook, arena: Arena) -> None:
    grant = granted(book, leased(arena, 100, 100), Access.WRITE)
    for chunk, parts in enumerate([[(0, 100)], [(at, 1) for at in range(100)]]):
        for start, length in parts:
            with held(book, span(grant, chunk, start, length), Access.WRITE):
                book.arrived(span(grant, chunk, start, length), b"hash")
    first, second = (lease for lease in grant.leases if lease is not None)
    assert grant.checksum_of(first, first.offset, 100) == b"hash"
    assert grant.checksum_of(first, first.offset, 99) is None
    assert grant.checksum_of(second, second.offset, 1) is None
    assert len(grant.checksums) == 2, "a peer cannot have more of them kept"


def test_unready_chunk_is_not_held(book: GrantBook, arena: Arena) -> None:
    grant = granted(book, leased(arena, 10, 10))
    grant.unready.add(1)
    assert book.hold(span(grant, 1), Access.READ) is None
    with held(book, span(grant, 0)):
        pass


def test_release_chunk_by_chunk(book: GrantBook, arena: Arena) -> None:
    ended: list[int] = []
    grant = granted(book, leased(arena, 10, 20, 30))
    grant.on_end = lambda: ended.append(1)
    released_span = span(grant, 1)
    with held(book, released_span) as lease:
        assert book.release("a", grant.number, [1])
        assert book.hold(released_span, Access.READ) is None, "the grant has ended"
        assert bytes(lease.view) == bytes(20), "the lease keeps its bytes"
    assert not book.release("a", grant.number, [1, 0])
    assert not book.release("b", grant.number, [2])
    assert not ended
    assert book.release("a", grant.number, [2])
    assert ended == [1]
    assert book.open == 0
    assert not book.release("a", grant.number, [2])


def test_encoded_copy_takes_the_place_of_a_chunk(book: GrantBook, arena: Arena) -> None:
    grant = granted(book, leased(arena, PAGE_BYTES, PAGE_BYTES))
    plain = span(grant, 0)
    assert is_held(book, plain)  # The order of the slices is known before.
    [copy] = leased(arena, 2 * PAGE_BYTES)
    book.replace(grant, 0, copy, PAGE_BYTES)
    [other] = leased(arena, PAGE_BYTES)
    book.replace(grant, 0, other, PAGE_BYTES)
    copy.release()
    other.release()
    assert grant.encoded == {0: (copy.offset, PAGE_BYTES)}, "it is encoded once"
    assert (book.granted_bytes, book.slices) == (3 * PAGE_BYTES, 2)
    assert is_held(book, span_of(grant, copy))
    assert not is_held(book, plain)
    assert is_held(book, span(grant, 1)), "the other chunk is as it was"
    assert book.release("a", grant.number, [0, 1])
    assert not arena.leases


def test_encoded_copies_are_bounded_by_share(book: GrantBook, arena: Arena) -> None:
    """Each of several peers that read one chunk gets a copy of its own."""
    [chunk] = leased(arena, 3 * PAGE_BYTES)
    leases = [chunk, chunk.share(), chunk.share()]
    grants = [granted(book, [lease], owner=owner) for owner, lease in zip("abc", leases, strict=True)]

    def replaced(grant: Grant) -> bool:
        [copy] = leased(arena, 3 * PAGE_BYTES)
        book.replace(grant, 0, copy, PAGE_BYTES)
        copy.release()
        assert book.granted_bytes <= book.limit
        return bool(grant.encoded)

    assert [replaced(grant) for grant in grants] == [True, False, False]
    book.end("b")
    assert replaced(grants[2]), "it frees the chunk"


def test_released_chunk_is_not_replaced(book: GrantBook, arena: Arena) -> None:
    grant = granted(book, leased(arena, PAGE_BYTES, PAGE_BYTES))
    [copy] = leased(arena, PAGE_BYTES)
    book.release("a", grant.number, [0])
    book.replace(grant, 0, copy, PAGE_BYTES)
    assert not is_held(book, span_of(grant, copy))
    book.end("a")
    book.replace(grant, 1, copy, PAGE_BYTES)
    copy.release()
    assert not arena.leases


class Waiting:
    """What makes the slices of a grant ready."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        grant.until_ready, grant.on_end = self.wait, self.end

    async def wait(self, slices: Sequence[int]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Do nothing."""


def test_ended_grant_is_not_left_to_garbage_collection(book: GrantBook, arena: Arena) -> None:
    waiting = Waiting(granted(book, leased(arena, 10)))
    exists = weakref.ref(waiting)
    book.end("a")
    del waiting
    assert exists() is None


def test_grant_expires_by_time_and_is_freed_by_expire(book: GrantBook, arena: Arena, clock: Clock) -> None:
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


def test_expired_grant_is_freed_by_release(book: GrantBook, arena: Arena, clock: Clock) -> None:
    grant = granted(book, leased(arena, 10))
    clock.now += 10
    assert not book.release("a", grant.number, [0])
    assert book.open == 0


def test_one_sided_write_grant_outlives_its_lease(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock, one_sided=True)
    overdue = granted(book, leased(arena, 10), Access.WRITE)
    released = granted(book, leased(arena, 10), Access.WRITE)
    read = granted(book, leased(arena, 10))
    clock.now += 11
    book.expire()
    assert book.open == 2, "a one-sided writer may still be writing"
    assert book.find("a", read.number) is None
    assert book.hold(span(overdue, 0), Access.WRITE) is None
    assert not book.release("a", released.number, [0])
    assert book.open == 1
    book.end("a")
    assert book.open == 0


def test_two_sided_write_grant_is_freed_by_expire(book: GrantBook, arena: Arena, clock: Clock) -> None:
    granted(book, leased(arena, 10), Access.WRITE)
    clock.now += 11
    book.expire()
    assert book.open == 0


def test_share_bounds_promised_bytes(arena: Arena, clock: Clock) -> None:
    book = book_of(arena, clock, share=0.25)
    leases = leased(arena, *[PAGE_BYTES] * 6)
    grant = granted(book, leases)
    assert len(grant.leases) == 4
    assert book.granted_bytes == 4 * PAGE_BYTES
    assert book.grant("b", leases[4:]) is None
    again = granted(book, [lease.share() for lease in leases[:4]], owner="b")
    assert book.granted_bytes == 4 * PAGE_BYTES
    book.end("a")
    assert book.granted_bytes == 4 * PAGE_BYTES
    assert book.release("b", again.number, range(4))
    assert book.granted_bytes == 0
    for lease in leases[4:]:
        lease.release()


def test_number_of_slices_is_bounded(book: GrantBook, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grants_module, "MAX_SLICES", 3)
    (lease,) = leased(arena, 10)
    shares = [lease.share() for _ in range(5)]
    assert len(granted(book, shares).leases) == 3
    assert book.grant("b", shares[3:]) is None
    for share in [lease, *shares[3:]]:
        share.release()


def test_grant_of_nothing_is_refused(book: GrantBook) -> None:
    assert book.grant("a", []) is None
    book.end("a")


class Book(RuleBasedStateMachine):
    """Any sequence of operations on a grant book, compared with a simple model."""

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
        grant_owner, grant, slices = data.draw(st.sampled_from(self.grants))
        valid_release = self.book.release(owner, grant.number, chunks)
        valid = grant_owner == owner and bool(slices) and grant.ends > self.clock.now
        assert valid_release == (valid and len(set(chunks)) == len(chunks) and set(chunks) <= slices.keys())
        if grant_owner == owner:
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
        for grant_owner, _, slices in self.grants:
            if grant_owner == owner:
                slices.clear()

    @rule()
    def release_held(self) -> None:
        while self.held:
            self.held.pop().release()

    @invariant()
    def counts_are_right(self) -> None:
        assert self.book.open == sum(bool(slices) for _, _, slices in self.grants)
        granted = [size for _, _, slices in self.grants for _, size in slices.values()]
        assert self.book.granted_bytes == sum(granted)
        assert self.book.granted_bytes <= self.book.limit
        assert self.arena.leases == len(self.held) + sum(len(slices) for _, _, slices in self.grants)

    def teardown(self) -> None:
        self.end("a")
        self.end("b")
        self.release_held()
        assert not self.arena.leases
        assert not self.arena.used
        self.arena.close()


Book.TestCase.settings = hypothesis_settings(deadline=None, max_examples=60, stateful_step_count=40)
TestBook = Book.TestCase
