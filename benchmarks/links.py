"""A network namespace behind a limited link, and servers in it. Needs root, ``ip`` and ``tc``."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers_process import SECRET
from kvtier.testing.servers import free_port
from tests.rigs.servers.s3 import S3Server

HERE, THERE = "10.207.0.1", "10.207.0.2"


@contextmanager
def link(rate: float) -> Iterator[str]:
    """Yield what runs a command in a namespace behind a link with ``rate`` Gb/s in each direction."""
    name = f"kvtier-{os.getpid()}"
    inside = f"ip netns exec {name}"
    run(f"ip netns add {name}")
    try:
        # The parts of a server reach each other over it, also at the address of the link.
        run(f"{inside} ip link set lo up")
        run(f"ip link add kvt0 type veth peer name kvt1 netns {name}")
        run(f"ip addr add {HERE}/24 dev kvt0")
        run(f"{inside} ip addr add {THERE}/24 dev kvt1")
        run("ip link set kvt0 up")
        run(f"{inside} ip link set kvt1 up")
        limit(rate)
        yield inside
    finally:
        run(f"ip netns del {name}")


def limit(rate: float) -> None:
    """Limit the link of :func:`link`, again if it is limited already."""
    bucket = f"root tbf rate {rate * 1000:.0f}mbit burst {max(256, rate * 1000):.0f}kb latency 50ms"
    run(f"tc qdisc replace dev kvt0 {bucket}")
    run(f"ip netns exec kvtier-{os.getpid()} tc qdisc replace dev kvt1 {bucket}")


@contextmanager
def redis_at(inside: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a Redis in a namespace."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        options = f"--bind {THERE} --port {port} --protected-mode no --save '' --appendonly no --dir {folder}"
        with subprocess.Popen(shlex.split(f"{inside} redis-server {options} --logfile log")) as server:
            try:
                time.sleep(0.5)
                yield {"name": "pool", "type": "redis", "url": f"redis://{THERE}:{port}", "deadline": 60}
            finally:
                server.terminate()


@contextmanager
def s3_at(inside: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of an S3 store in a namespace."""
    if reason := S3Server.missing():
        raise SystemExit(reason)
    with (
        tempfile.TemporaryDirectory() as folder,
        S3Server(Path(folder), host=THERE, inside=shlex.split(inside)) as server,
    ):
        yield {"name": "pool", **server.tier(), "deadline": 60}


def peer_settings(codec: str, **peer: object) -> dict[str, Any]:
    """Return the settings of a peer that a slow link or a busy machine does not make fail."""
    limits = {"share": 1, "timeout": 5, "lease": 60, "transport": {"type": "tcp", "deadline": 60}}
    return {"secret": SECRET, "codec": codec, **limits, **peer}


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)
