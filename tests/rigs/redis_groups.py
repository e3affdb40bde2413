"""Pools of several servers: a primary with a replica and sentinels, and a cluster of primaries."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtier.backends.redis.topology import SLOTS
from kvtier.testing.servers import free_port
from tests.rigs.redis_pool import execute, info
from tests.rigs.servers.redis import HOST, RedisServer, TLSFiles
from tests.rigs.waiting import wait_until


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


class _Sentinel(RedisServer):
    def __init__(self, kind: type[RedisServer], folder: Path, primary: RedisServer) -> None:
        super().__init__(folder)
        self._kind = kind
        self._configuration = folder / "sentinel.conf"
        self._configuration.write_text(
            f"sentinel monitor mymaster {HOST} {primary.port} 2\n"
            "sentinel down-after-milliseconds mymaster 300\n"
            "sentinel failover-timeout mymaster 2000\n"
        )

    def _launch(self) -> None:
        program, configuration = str(self._kind.program()), str(self._configuration)
        self._spawn([program, configuration, "--sentinel", "--bind", HOST, "--port", str(self.port)])


class Sentinels:
    """A primary, a replica, and three sentinels with a quorum of two."""

    def __init__(self, kind: type[RedisServer], folder: Path, stack: ExitStack) -> None:
        self._kind = kind
        sync_at_once = ["--repl-diskless-sync-delay", "0"]
        self.primary = stack.enter_context(kind(_make_folder(folder / "primary"), options=sync_at_once))
        follow = ["--replicaof", HOST, str(self.primary.port)]
        self.replica = stack.enter_context(kind(_make_folder(folder / "replica"), options=follow))
        self.sentinels = [
            stack.enter_context(_Sentinel(kind, _make_folder(folder / f"sentinel {number}"), self.primary))
            for number in range(3)
        ]
        wait_until(lambda: info(self.replica)["master_link_status"] == "up")
        wait_until(lambda: all(self._knows_all(sentinel) for sentinel in self.sentinels))

    def tier(self) -> dict[str, Any]:
        """See :meth:`Server.tier`."""
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return {"type": self._kind.type, "url": f"{self._kind.type}+sentinel://{addresses}/mymaster"}

    def _knows_all(self, sentinel: RedisServer) -> bool:
        known = info(sentinel)["master0"]
        return (known["status"], known["slaves"], known["sentinels"]) == ("ok", 1, 3)


class Cluster:
    """Three primaries, each with a third of the hash slots."""

    def __init__(
        self,
        kind: type[RedisServer],
        folder: Path,
        stack: ExitStack,
        *,
        tls: TLSFiles | None = None,
        password: str | None = None,
    ) -> None:
        self._kind = kind
        self._folder = folder
        self._stack = stack
        self._tls = tls
        self._password = password
        self.nodes: list[RedisServer] = []
        for number in range(3):
            bus = self._start()
            first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
            self.nodes[-1].command("CLUSTER", "ADDSLOTSRANGE", str(first), str(last))
            # Refused once it knows another node, so before they meet.
            self.nodes[-1].command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            self._join(bus)
        wait_until(self.is_healthy)

    def _start(self) -> str:
        """Start a node, without slots; return its port for other nodes."""
        bus = str(free_port())
        # By default, the whole cluster stops serving when one node is down.
        partial = ["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
        options = ["--cluster-enabled", "yes", "--cluster-port", bus, *partial]
        if self._tls is not None:
            options += ["--tls-cluster", "yes", "--tls-replication", "yes"]
        if self._password is not None:
            options += ["--masterauth", self._password]
        folder = _make_folder(self._folder / str(len(self.nodes)))
        node = self._kind(folder, tls=self._tls, password=self._password, options=options)
        self.nodes.append(self._stack.enter_context(node))
        return bus

    def _join(self, bus: str) -> None:
        """Let the last node join the others."""
        if len(self.nodes) > 1:
            self.nodes[0].command("CLUSTER", "MEET", HOST, str(self.nodes[-1].port), bus)

    def add_replica(self, primary: RedisServer) -> RedisServer:
        """Start a replica of a node, and wait until it is in sync."""
        self._join(self._start())
        wait_until(self.is_healthy)
        replica = self.nodes[-1]
        replica.command("CLUSTER", "REPLICATE", self._name_of(primary))
        wait_until(lambda: info(replica).get("master_link_status") == "up")
        return replica

    def tier(self) -> dict[str, Any]:
        """See :meth:`Server.tier`. The URL names one node; the client discovers the others."""
        tier = self.nodes[1].tier()
        return {**tier, "url": tier["url"].replace("://", "+cluster://")}

    def owner_of(self, slot: int) -> RedisServer:
        """Return the node that owns a slot, unless it was migrated."""
        return self.nodes[slot * 3 // SLOTS]

    def start_migration(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Start moving a slot: ``source`` redirects to ``target`` for keys that it does not hold."""
        target.command("CLUSTER", "SETSLOT", str(slot), "IMPORTING", self._name_of(source))
        source.command("CLUSTER", "SETSLOT", str(slot), "MIGRATING", self._name_of(target))

    def finish_migration(self, slot: int, target: RedisServer) -> None:
        """Assign a slot to ``target`` on all nodes."""
        for node in (target, *self.nodes):
            node.command("CLUSTER", "SETSLOT", str(slot), "NODE", self._name_of(target))

    def _name_of(self, node: RedisServer) -> str:
        return str(execute(node, "CLUSTER MYID"))

    def is_healthy(self) -> bool:
        """Whether every node reports all nodes and slots as up."""
        states = [execute(node, "CLUSTER INFO") for node in self.nodes]
        fields = ("cluster_state", "cluster_known_nodes", "cluster_slots_ok")
        expected = ["ok", str(len(self.nodes)), str(SLOTS)]
        return all([state[name] for name in fields] == expected for state in states)
