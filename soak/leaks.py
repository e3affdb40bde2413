"""Leak checks: resources that an idle cache process, or the machine, must not hold."""

from __future__ import annotations

import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from soak.stack import command_line

IDLE_SECONDS = 60.0
"""How long to wait for pending work to finish. No finding depends on it."""
POLL_SECONDS = 0.1
SOCKETS_ALLOWED = 12
"""Connections to a peer, from a peer and to a pool are opened on demand, up to four of each, and kept."""
PUMPS_ALLOWED = 5
"""Each has an eventfd from its first transfer on: Redis's chunks, its lookups, what is served to peers, and
the links to the two addresses of the peer, that of the settings and that of the controller."""
OTHERS_ALLOWED = 2
TASKS_ALLOWED = 2
SERVED = "PeerServer._serve"
SERVED_ALLOWED = 5
"""One task per connection from the peer: four for data, and temporarily one more."""
ENDPOINT = "Endpoint.run.<locals>.until_failure"
ENDPOINT_ALLOWED = 2 * (SERVED_ALLOWED + 1)
"""Two tasks per connection: those that are served, and the link to the peer's other address."""
_LOGGED = re.compile(r"Traceback \(most recent call last\)|\bERROR\b|\bCRITICAL\b")


def held(status: Mapping[str, Any]) -> dict[str, int]:
    """Return the resources that a cache process holds although it should be idle, by name."""
    engines = status["engines"]
    serving, kv_transfers = status.get("serving", {}), status.get("kv_transfers", {})
    peers, controller = status.get("peers", ()), status.get("controller", {})
    found = {
        "leases": sum(engine["leases"] for engine in engines),
        "reservations": sum(engine["reservations"] for engine in engines),
        "tickets": sum(engine["tickets"] for engine in engines),
        "arena leases": status["arena"]["leases"] - status["tiers"][0]["chunks"],
        "flights": status["flights"],
        "pending bytes": status["pending_bytes"],
        "pinned chunks": status["pinned_chunks"],
        "pending pushes": status["pushed"]["announced"] + status["pushed"]["waiting"],
        "grants": serving.get("grants", 0),
        "granted bytes": serving.get("granted_bytes", 0),
        "unauthenticated connections": serving.get("unauthenticated", 0),
        "chunks granted by peers": sum(peer["granted_chunks"] for peer in peers),
        "bytes from peers": sum(peer["in_flight_bytes"] for peer in peers),
        "KV transfers": kv_transfers.get("open", 0),
        "commands": controller.get("commands", 0),
    }
    return {name: count for name, count in found.items() if count}


def wait_until_idle(status: Callable[[], Mapping[str, Any]], seconds: float = IDLE_SECONDS) -> dict[str, int]:
    """Wait until nothing is held. Return what is still held after ``seconds``."""
    deadline = time.monotonic() + seconds
    while (found := held(status())) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


def descriptors(pid: int) -> Counter[str]:
    """Count the open descriptors of a process by type: socket, pipe, file, anonymous inodes."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            kind, colon, _ = target.partition(":")
            if colon:
                found[target if kind == "anon_inode" else kind] += 1
            elif stat.S_ISREG(entry.stat().st_mode):
                found["chunk file" if target.endswith(".kv") else "file"] += 1
            else:
                found["other"] += 1
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str]:
    """Return the types of descriptors that have increased by more than allowed, with their numbers."""
    allowed = {"socket": SOCKETS_ALLOWED, "chunk file": 0, "anon_inode:[eventfd]": PUMPS_ALLOWED}
    return {
        kind: f"{before.get(kind, 0)} before, {count} after"
        for kind, count in after.items()
        if count > before.get(kind, 0) + allowed.get(kind, OTHERS_ALLOWED)
    }


def more_tasks(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, str]:
    """Return the tasks that have increased by more than allowed, by function name."""
    allowed = {SERVED: SERVED_ALLOWED, ENDPOINT: ENDPOINT_ALLOWED}
    return {
        name: f"{before.get(name, 0)} before, {count} after"
        for name, count in after.items()
        if count
        > before.get(name, 0)
        + next((more for end, more in allowed.items() if name.endswith(end)), TASKS_ALLOWED)
    }


def describe(pids: list[int]) -> str:
    """Return process ids with their commands, as text."""
    return ", ".join(f"{pid} ({command_line(pid)[:100] or 'zombie'})" for pid in pids)


def errors_in(log: Path, limit: int = 5) -> list[str]:
    """Return the first errors in a log, each with up to 40 lines."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    where = [number for number, line in enumerate(lines) if _LOGGED.search(line)]
    return ["\n".join(lines[number : number + 40]) for number in where[:limit]]
