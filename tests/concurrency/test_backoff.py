from __future__ import annotations

from kvtier.concurrency.backoff import Backoff


def test_delay_grows_to_a_limit_until_reset() -> None:
    backoff = Backoff(0.2, 10.0)
    seconds = [backoff.next() for _ in range(8)]
    limits = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert all(0.75 * limit <= value <= limit for value, limit in zip(seconds, limits, strict=True))
    backoff.reset()
    assert backoff.next() <= 0.2
