"""Signatures of endings, and the table that learns which of them come back soon."""

from __future__ import annotations

import hashlib
import struct
import time
import tracemalloc
from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random

import pytest
import xxhash
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtier.catalog.endings import (
    ENDINGS,
    FORGET,
    LIMITS,
    PERIOD_SECONDS,
    SIGNED_TOKENS,
    SLOTS,
    SOON_SECONDS,
    Endings,
    signature,
)

KEY, OTHER_KEY = bytes(range(32)), bytes(32)
CALL = signature(KEY, "stop", [17, 5, 2])
TURN = signature(KEY, "stop", [13, 7, 2])
SETTLED = SOON_SECONDS + 2 * PERIOD_SECONDS
"""After this time, what has ended is counted."""


class Clients:
    """Answers that end one after the other, and the prompts that come back."""

    def __init__(self, seconds: float = 1.0) -> None:
        """``seconds``: between two ends."""
        self.endings, self.now = Endings(), 1000.0
        self._seconds = seconds
        self._returns: list[tuple[float, int, float]] = []

    def end(self, signature: tuple[int, ...], gap: float) -> int:
        self.now += self._seconds
        while self._returns and self._returns[0][0] <= self.now:
            at, slot, waited = heappop(self._returns)
            self.endings.returned(slot, waited, at)
        slot = self.endings.answer_ended(signature, self.now)
        heappush(self._returns, (self.now + gap, slot, gap))
        return slot

    def settle(self) -> None:
        for at, slot, waited in sorted(self._returns):
            self.endings.returned(slot, waited, at)
        self._returns.clear()
        self.now += SETTLED
        self.endings._settle(self.now)


# Signatures.


def test_signature_goes_from_general_to_specific() -> None:
    whole = signature(KEY, "stop", [1, 2, 3, 4])
    assert len(whole) == len(set(whole)) == SIGNED_TOKENS + 1
    assert whole == signature(KEY, "stop", [2, 3, 4]), "only the last ones count"
    assert whole[:3] == signature(KEY, "stop", [3, 4])
    assert whole[:2] == signature(KEY, "stop", (4,))
    assert whole[:1] == signature(KEY, "stop", [])
    assert not {*whole} & {*signature(KEY, "length", [1, 2, 3, 4])}


def test_other_keys_give_other_signatures() -> None:
    tokens = [11, 12, 13]
    assert signature(KEY, "stop", tokens) == signature(bytes(range(32)), "stop", tokens)
    assert not {*signature(KEY, "stop", tokens)} & {*signature(OTHER_KEY, "stop", tokens)}


@given(
    how=st.text(st.characters(), max_size=20),
    tokens=st.lists(st.integers() | st.integers(0, 2**32 - 1), max_size=6),
)
def test_no_request_is_an_error(how: str, tokens: list[int]) -> None:
    hashes = signature(KEY, how, tokens)
    assert len(hashes) == 1 + min(SIGNED_TOKENS, len(tokens))
    assert all(0 <= hashed < 2**64 for hashed in hashes)
    assert hashes == signature(KEY, how, [token % 2**32 for token in tokens])


def test_text_that_utf_8_cannot_encode_is_no_error() -> None:
    assert signature(KEY, "\ud800", [1])


@given(how=st.binary(max_size=8), tokens=st.lists(st.integers(1, 127), min_size=1, max_size=SIGNED_TOKENS))
def test_reason_that_contains_tokens_is_another_one(how: bytes, tokens: list[int]) -> None:
    text = how.decode("latin-1")
    longer = text + b"".join(token.to_bytes(4, "little") for token in reversed(tokens)).decode()
    assert signature(KEY, longer, [])[0] not in signature(KEY, text, tokens)


def hashes_without_key(tokens: list[int]) -> Iterator[int]:
    """Yield what one could compute who knows how signatures are made, but not the key."""
    for count in range(len(tokens) + 1):
        last = tokens[len(tokens) - count :]
        for numbers in (last, last[::-1]):
            packed = struct.pack(f"<{count}I", *numbers)
            for data in (packed, b"stop" + packed, (4).to_bytes(4, "little") + b"stop" + packed):
                for digest in (
                    blake3(data).digest(8),
                    blake3(data, key=OTHER_KEY).digest(8),
                    hashlib.sha256(data).digest()[:8],
                    xxhash.xxh3_64(data).digest(),
                ):
                    yield int.from_bytes(digest, "little")
                    yield int.from_bytes(digest, "big")


def test_tokens_cannot_be_tried_without_the_key() -> None:
    random = Random(1)
    for _ in range(200):
        tokens = [random.randrange(2**17) for _ in range(SIGNED_TOKENS)]
        assert not {*signature(KEY, "stop", tokens)} & {*hashes_without_key(tokens)}


def numbers_in(value: object) -> Iterator[float]:
    """Yield all numbers in an object, whatever it consists of."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from numbers_in(pair)
    elif isinstance(value, str | bytes):
        yield from value.encode() if isinstance(value, str) else value
    elif hasattr(value, "__iter__"):
        for item in value:
            yield from numbers_in(item)
    else:
        yield from numbers_in(vars(value))


def test_no_token_is_kept() -> None:
    random, clients = Random(2), Clients()
    tokens = [random.randrange(2**17, 2**31) for _ in range(1000)]
    for at in range(SIGNED_TOKENS, len(tokens)):
        hashes = signature(KEY, "stop", tokens[at - SIGNED_TOKENS : at])
        assert not {*hashes} & {*tokens}
        clients.end(hashes, random.choice((5.0, 500.0)))
    kept = {*numbers_in(vars(clients.endings))}
    assert hashes[-1] in kept
    assert not kept & {*tokens}


# The table.


def test_endings_are_told_apart() -> None:
    clients, random = Clients(), Random(3)
    for _ in range(300):
        call = clients.end(CALL, random.uniform(3, 20) if random.random() < 0.95 else 1000.0)
        turn = clients.end(TURN, random.lognormvariate(5.3, 1.3))
    clients.settle()
    endings = clients.endings
    assert endings.rate(call) == pytest.approx(0.95, abs=0.05)
    assert endings.rate(turn) == pytest.approx(0.18, abs=0.07)
    assert endings.ending(call) == 0
    assert endings.ending(turn) in (2, 3)
    longer = clients.end(signature(KEY, "stop", [99, 5, 2]), 0.0)
    assert endings.ending(longer) == 0, "another token before the last two"
    unknown = clients.end(signature(KEY, "stop", [99, 98, 2]), 0.0)
    assert endings.ending(call) < endings.ending(unknown) <= endings.ending(turn), (
        "only the last one is known"
    )
    assert endings.ending(clients.end(signature(KEY, "abort", []), 0.0)) == endings.ending(0)


def test_without_a_signature_nothing_is_counted() -> None:
    endings = Endings()
    assert endings.answer_ended((), 1.0) == 0
    endings.returned(0, 1.0, 2.0)
    endings._settle(1000.0)
    assert endings.rate(0) == 0.5
    assert 0 < endings.ending(0) < ENDINGS


def test_those_still_away_count_neither_way() -> None:
    """In a burst, what comes back is seen at once, but what stays away only after a minute."""
    endings, now = Endings(), 100.0
    calls = [endings.answer_ended(CALL, now + 0.01 * number) for number in range(100)]
    turns = [endings.answer_ended(TURN, now + 0.01 * number) for number in range(100)]
    for number, slot in enumerate(calls):
        endings.returned(slot, 5.0, now + 5.0 + 0.01 * number)
    endings.answer_ended(TURN, now + SOON_SECONDS)
    assert endings.rate(calls[0]) == endings.rate(turns[0]) == 0.5
    endings.answer_ended(TURN, now + SETTLED)
    assert endings.rate(calls[0]) > 0.9
    assert endings.rate(turns[0]) < 0.1
    assert endings.rate(0) == pytest.approx(0.5, abs=0.05)


def test_return_after_a_minute_is_none() -> None:
    clients = Clients()
    for _ in range(100):
        late = clients.end(CALL, SOON_SECONDS + 1)
        in_time = clients.end(TURN, SOON_SECONDS - 1)
    clients.settle()
    assert clients.endings.rate(late) < 0.1
    assert clients.endings.rate(in_time) > 0.9


def test_another_template_is_followed() -> None:
    """New endings are known after a few dozen, and those that have changed after three times ``FORGET``."""
    clients = Clients(seconds=0.1)
    for _ in range(3000):
        clients.end(CALL, 5.0)
        clients.end(TURN, 500.0)
    clients.settle()
    new = signature(KEY, "stop", [1, 4])
    for _ in range(30):
        slot = clients.end(new, 5.0)
        turn = clients.end(TURN, 500.0)
    clients.settle()
    assert clients.endings.ending(slot) == 0
    for _ in range(3 * int(FORGET)):
        slot = clients.end(new, 500.0)
        turn = clients.end(TURN, 5.0)
    clients.settle()
    assert clients.endings.ending(slot) >= 3
    assert clients.endings.ending(turn) == 0


def test_noise_gives_one_class() -> None:
    """A third comes back soon, whatever the ending: the middle of class 2."""
    random, rare, often = Random(6), Clients(), Clients()

    def ending(choice: int) -> tuple[int, ...]:
        return signature(KEY, "stop", [random.randrange(choice) for _ in range(SIGNED_TOKENS)])

    for _ in range(10_000):
        gap = 10.0 if random.random() < 1 / 3 else 100.0
        rare.end(ending(2**17), gap)
        often.end(ending(16), gap)
    rare.settle()
    often.settle()

    def classes(clients: Clients, choice: int) -> list[int]:
        slots = [clients.endings.answer_ended(ending(choice), clients.now) for _ in range(1000)]
        return [clients.endings.ending(slot) for slot in slots]

    assert {*classes(rare, 2**17)} == {2}
    # With 40 observations of two tokens, and two of three, one in eight is one class off.
    assert classes(often, 16).count(2) > 800
    assert {*classes(often, 16)} <= {1, 2, 3}


@pytest.mark.parametrize("seconds", [0.005, 0.1, 10.0])
def test_table_is_bounded(seconds: float) -> None:
    """Random signatures, as if each answer ended in another way, and two endings among them."""
    random, clients = Random(7), Clients(seconds)
    endings = clients.endings
    reasons = [random.getrandbits(64) for _ in range(3)]
    began = time.perf_counter()
    for number in range(100_000):
        hashes = (random.choice(reasons), *(random.getrandbits(64) for _ in range(SIGNED_TOKENS)))
        assert 0 < endings.answer_ended(hashes, number * seconds) < SLOTS
    print(f"\n{(time.perf_counter() - began) * 10:.1f} µs for each random signature", end="")
    assert len(endings._slots) == SLOTS - 1
    assert {*endings._slots.values()} == {*range(1, SLOTS)}
    assert sum(len(period.ended) for period in endings._recent) <= SLOTS * (2 + SOON_SECONDS / PERIOD_SECONDS)
    order = {slot: number for number, slot in enumerate([*endings._slots.values(), 0])}
    assert all(order[endings._parents[slot]] > order[slot] for slot in endings._slots.values())
    assert {endings._suffixes(slot)[-1] for slot in endings._slots.values()} == {0}


@pytest.mark.parametrize("seconds", [0.005, 1.0])
def test_rare_endings_do_not_displace_others(seconds: float) -> None:
    """At 200 answers a second, the slots of endings that never recur are reused within the minute."""
    random, clients = Random(8), Clients(seconds)
    for _ in range(30_000):
        first, second = random.randrange(2**17), random.randrange(2**17)
        if random.random() < 0.5:
            clients.end(signature(KEY, "stop", [first, 5, 2]), random.choice([5.0] * 19 + [500.0]))
        else:
            last = random.choice((7, second))
            clients.end(signature(KEY, "stop", [first, last, 2]), random.choice([500.0] * 9 + [50.0]))
    clients.settle()
    endings = clients.endings
    call, turn = (endings.answer_ended(signature(KEY, "stop", [-1, last, 2]), clients.now) for last in (5, 7))
    print(f"\n{endings.rate(call):.2f} {endings.rate(turn):.2f}", end="")
    assert endings.rate(call) == pytest.approx(0.95, abs=0.07)
    assert endings.rate(turn) == pytest.approx(0.1, abs=0.07)


def test_memory() -> None:
    hashes = [signature(KEY, "stop", [number, number, 2]) for number in range(SLOTS)]
    tracemalloc.start()
    try:
        endings = Endings()
        for number, each in enumerate(hashes):
            endings.answer_ended(each, float(number))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"\n{size / 1e6:.2f} MB", end="")
    assert size < 1_000_000


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=7),
            st.integers(0, SLOTS - 1) | st.integers(0, 8),
            st.floats(-100, 1e4),
            st.floats(-50, 500),
        ),
        max_size=60,
    )
)
def test_nothing_is_an_error(calls: list[tuple[list[int], int, float, float]]) -> None:
    """Hashes that are no signature, slots that are not used, and times that go backwards."""
    endings, now = Endings(), 0.0
    for hashes, slot, gap, seconds in calls:
        now += seconds
        endings.answer_ended(hashes, now)
        endings.returned(slot, gap, now)
        assert 0.0 <= endings.rate(slot) <= 1.0
        assert 0 <= endings.ending(slot) < ENDINGS


@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_rate_is_near_that_of_the_observations(soon: list[bool]) -> None:
    clients = Clients()
    for is_soon in soon:
        slot = clients.end(CALL, 5.0 if is_soon else 500.0)
    clients.settle()
    observed = sum(soon) / len(soon)
    rate = clients.endings.rate(slot)
    if len(soon) <= FORGET:
        assert min(0.5, observed) <= rate + 1e-6
        assert rate - 1e-6 <= max(0.5, observed)
        assert abs(rate - observed) <= 8 / (len(soon) + 8) + 1e-6
    worse = [limit for limit in LIMITS if limit <= 1 - rate]
    assert clients.endings.ending(slot) == len(worse)
