"""Cache process's end of the bridge. The state of an engine ends with its last connection.

Messages of a connection are handled in order, most of them by the event loop as soon as it has read them:
:class:`~kvtier.cache.TieredCache` decides answers synchronously. Waiting for a fetch is a task of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import time
from collections import Counter
from functools import cached_property, partial
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from kvtier.bridge import protocol
from kvtier.bridge.connection import Connection
from kvtier.bridge.engine_kv_transfers import EngineKVTransfers
from kvtier.bridge.leases import WriterProcess
from kvtier.bridge.notices import Notices
from kvtier.bridge.session import EngineSession
from kvtier.concurrency.placement import Placement
from kvtier.concurrency.tasks import open_tasks
from kvtier.errors import ChannelError, ProtocolError
from kvtier.instance import Instance
from kvtier.logs import ChangedWarnings
from kvtier.rpc.endpoint import Endpoint
from kvtier.rpc.wire import SocketWire
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.observability.recording.recorder import Recorder
    from kvtier.observability.whatif.report import Report
    from kvtier.peers.dialing import RemoteEngines

logger = logging.getLogger("kvtier")

STOPPED_SECONDS = 60.0
"""An engine that has sent nothing for this long, though it holds something, counts as stopped."""
CHECK_SECONDS = 1.0
"""Interval at which to check whether memory is still kept for a process that has disconnected."""


class BridgeServer:
    """Serves every engine of this host."""

    def __init__(self, instance: Instance, recorder: Recorder | None = None) -> None:
        self.cache = instance.cache
        self._instance = instance
        self._recorder = recorder
        self.epoch = secrets.randbits(63)
        self._numbers = itertools.count(1)
        self._engines: dict[str, EngineSession] = {}
        self._connections: dict[str, set[Connection]] = {}
        self._departed: set[EngineSession] = set()
        """Engines without a connection, with memory that their processes may still write to."""
        self._warnings = ChangedWarnings("KV transfer to %s failed: %s")
        self.notices = Notices()
        """Warnings for schedulers. The owner of the server enables them with :meth:`Notices.listening`."""
        self.engine_connected = anyio.Event()
        """Set while an engine is connected. Replaced only when it is set, so that no waiter is lost."""
        self.idle = anyio.Event()
        """Set when the last engine disconnects, until one connects. Replaced only when it is set."""
        if instance.server is not None:
            instance.server.serve_engine = self.handle_remote

    async def handle(self, connected: socket.socket) -> None:
        """Serve one connection of this host until the engine closes it."""
        wire = SocketWire(connected)
        if (user := wire.frames.peer_uid) not in (0, os.getuid()):
            logger.warning("rejected a connection of user %d", user)
            wire.close()
            return
        await self._serve(wire, remote=False)

    async def handle_remote(self, connected: socket.socket) -> None:
        """Serve the scheduler of an engine of another host, which has authenticated as a peer."""
        await self._serve(SocketWire(connected), remote=True)

    async def _serve(self, wire: SocketWire, *, remote: bool) -> None:
        try:
            endpoint = Endpoint(wire, protocol.decode_from_engine)
            async with open_tasks() as tasks:
                try:
                    process = None if remote else WriterProcess.of(wire.frames.socket)
                    await Connection(self, endpoint, tasks, process, remote=remote).serve()
                finally:
                    tasks.cancel_scope.cancel()
        except ChannelError as error:
            logger.debug("connection closed: %s", error)
        except Exception:
            # Last resort: an error in one connection must not end the others.
            logger.exception("connection failed")
        finally:
            wire.close()

    @property
    def peer(self) -> str | None:
        """Address on which this instance listens for peers, with the bound port; ``None`` if it does not."""
        listen, serving = self.cache.settings.peer.listen, self._instance.server
        if listen is None or serving is None:
            return None
        return f"{listen.rpartition(':')[0]}:{serving.address[1]}"

    @property
    def stages(self) -> bool:
        """Whether engines may have staging buffers."""
        return self._instance.stagings is not None

    @cached_property
    def remote_engines(self) -> RemoteEngines | None:
        """Connects schedulers of this host to other hosts; ``None`` without credentials for them."""
        settings = self.cache.settings.peer
        if not settings.has_credentials:
            return None
        # Imported here, so that an instance without peers does not pay for the import.
        from kvtier.peers.dialing import RemoteEngines
        from kvtier.rpc.authentication import Credentials

        return RemoteEngines(Credentials.from_settings(settings), self._instance.name)

    @property
    def engines(self) -> int:
        """Number of connected engines."""
        return len(self._engines)

    def join(self, connection: Connection, hello: protocol.Hello) -> EngineSession:
        """Add a connection to its engine. The first connection creates the engine.

        Raises :class:`ProtocolError`.
        """
        if not 0 <= hello.rank < hello.layout.ranks:
            raise ProtocolError(
                f"rank {hello.rank} is out of range: the layout has {hello.layout.ranks} ranks"
            )
        engine = self._engines.get(hello.engine)
        if engine is None:
            engine = self._engines[hello.engine] = self._returned(hello) or EngineSession(
                self.cache, hello, self._numbers, self._recorder
            )
            self._connections[hello.engine] = set()
            self.engine_connected.set()
            if self.idle.is_set():
                self.idle = anyio.Event()
            logger.info("engine %s connected", hello.engine)
        elif engine.layout != hello.layout or engine.startup_namespace != hello.namespace:
            raise ProtocolError(f"engine {hello.engine} is already connected with another layout")
        for other in tuple(self._connections[hello.engine]):
            if (other.role, other.rank) == (hello.role, hello.rank):
                other.replace()
        again = hello.epoch == self.epoch
        if hello.role == "scheduler":
            engine.scheduler_joined(hello.holding, hello.seen if again else None)
            engine.model = hello.model
        else:
            engine.absent_ranks.discard(hello.rank)
            engine.writes.worker_writes(hello.rank, hello.client, hello.holding if again else ())
        self.use_weights(engine, hello.weights or engine.weights)
        self._connections[hello.engine].add(connection)
        return engine

    def _returned(self, hello: protocol.Hello) -> EngineSession | None:
        """Return the engine of a process that had disconnected, if its memory was kept."""
        for engine in self._departed:
            if (engine.name, engine.layout, engine.startup_namespace) == (
                hello.engine,
                hello.layout,
                hello.namespace,
            ):
                self._departed.remove(engine)
                return engine
        return None

    def next_lease(self) -> int:
        """Return a number that is greater than those of all reservations so far."""
        return next(self._numbers)

    def worker_left(self, engine: EngineSession, rank: int, process: WriterProcess | None) -> None:
        """Void what a worker was filling. Takes ownership of its process, ``None`` if it writes no more."""
        engine.absent_ranks.add(rank)
        if engine.writes.worker_left(rank, process):
            assert process is not None
            if not process.watched:
                logger.warning(
                    "engine %s, rank %d: its connection was lost, and this kernel does not show whether its "
                    "process writes to its memory: that stays out of use until it returns",
                    engine.name,
                    rank,
                )
            self.cache.tasks.start_soon(self._await_exit, engine, process)
        elif process is not None:
            process.close()

    def reclaim_stopped(self) -> None:
        """Release what stopped engines hold, because another one has found no room or a chunk being stored.

        Except memory that they may still write to, which stays out of use.
        """
        now = time.monotonic()
        for name, engine in self._engines.items():
            last = max(connection.last_message_at for connection in self._connections[name])
            if now - last < STOPPED_SECONDS or engine.idle:
                continue
            engine.reclaim()
            logger.warning(
                "engine %s has sent nothing for %.0f s: its leases are released, and the chunks that it was "
                "storing are void; %s stay reserved for it until it continues or exits",
                name,
                now - last,
                format_size(engine.writes.reserved_bytes),
            )

    async def _await_exit(self, engine: EngineSession, process: WriterProcess) -> None:
        """Keep the memory that a process without a connection may write to, until it has exited."""
        try:
            while engine.writes.awaits(process) and not process.exited:
                with anyio.move_on_after(CHECK_SECONDS):
                    await process.wait_exited()
        finally:
            engine.writes.worker_exited(process)
            process.close()
        if engine in self._departed:
            engine.writes.close()
            if not len(engine.writes):
                self._departed.remove(engine)

    def use_weights(self, engine: EngineSession, weights: protocol.Weights) -> None:
        """Process that an engine has other weights."""
        engine.use_weights(weights)
        self._instance.served.add(engine.name, weights.namespace, engine.layout, engine.model)

    def kv_transfers(
        self, connection: Connection, engine: EngineSession, tasks: TaskGroup
    ) -> EngineKVTransfers:
        """Return the KV transfers of a scheduler's connection."""
        return EngineKVTransfers(
            partial(self._instance.transfer_kv, hinted=True),
            self.cache.catalog,
            engine.layout,
            self._warnings,
            self.cache.settings.kv_transfer.reserve,
            tasks,
            connection.notify,
        )

    def stage(
        self, connection: Connection, engine: EngineSession, rank: int, request: protocol.RequestStaging
    ) -> None:
        """Provide a staging buffer for a worker, or report why none is available."""
        stagings = self._instance.stagings
        if stagings is None:
            connection.send(
                protocol.OfferStaging(0, b"", 0, "kv_transfer.device is cpu in the cache process")
            )
            return
        if engine.staging is None:
            engine.staging = stagings.of_engine(engine.name, engine.namespace, engine.layout)
        engine.staging.join(rank, request.gpu, connection.offer)

    def leave(self, connection: Connection, engine: EngineSession, *, replaced: bool) -> None:
        """Remove a connection from its engine. The last connection closes the engine, unless ``replaced``."""
        connections = self._connections[engine.name]
        connections.discard(connection)
        if not connections and not replaced:
            del self._connections[engine.name], self._engines[engine.name]
            if engine.staging is not None and self._instance.stagings is not None:
                self._instance.stagings.remove(engine.name)
            engine.close()
            if len(engine.writes):
                self._departed.add(engine)
            self._instance.served.remove(engine.name)
            logger.info("engine %s disconnected", engine.name)
            if not self._engines:
                self.engine_connected = anyio.Event()
                self.idle.set()

    def what_if(self) -> Report | None:
        """Return what other settings would bring; ``None`` if that is not known."""
        return self._instance.what_if()

    def status(self) -> dict[str, object]:
        """Return what each engine holds, and the counters since the start."""
        engines = [engine.status() for engine in self._engines.values()]
        # By function name: a leak shows as a count that only grows.
        tasks = Counter(task.name for task in anyio.get_running_tasks())
        placement = Placement.current().describe()
        process = {"pid": os.getpid(), "epoch": self.epoch, "tasks": tasks, "placement": placement}
        recording = {} if self._recorder is None else {"recording": self._recorder.status()}
        both = [*self._engines.values(), *self._departed]
        reservations = {
            "bytes": sum(engine.writes.reserved_bytes for engine in both),
            "void_bytes": sum(engine.writes.void_bytes for engine in both),
            "departed_engines": len(self._departed),
        }
        return {
            **process,
            "engines": engines,
            "reservations": reservations,
            **recording,
            **self._instance.status(),
        }
