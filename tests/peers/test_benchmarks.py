"""Run the benchmarks of peers in quick mode, to keep them working."""

from __future__ import annotations

from tests.rigs.benchmark import run_benchmark


def test_peers() -> None:
    output = run_benchmark("peers", "--transport", "tcp", "--quick", "--peers", "2")
    for row in ("PeersBackend.held_prefix, 2 peers", "lookup until answered, 2 peers", "4 x 2 MiB, 2 peers"):
        assert row in output


def test_push() -> None:
    output = run_benchmark("push", "--transport", "tcp", "--quick")
    assert "4 x 2 MiB" in output
    assert "one chunk" in output
