"""The peers' benchmarks run, in small, so that they cannot rot."""

from __future__ import annotations

from tests.benchmark import run_benchmark


def test_peers() -> None:
    shown = run_benchmark("peers", "--transport", "tcp", "--quick")
    for row in ("PeersBackend.held_prefix, 2 peers", "look-up and answered, 1 peer", "4 x 2 MiB, 2 peers"):
        assert row in shown


def test_push() -> None:
    shown = run_benchmark("push", "--transport", "tcp", "--quick")
    assert "4 x 2 MiB" in shown
    assert "one chunk" in shown
