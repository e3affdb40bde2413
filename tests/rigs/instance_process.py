"""An instance in a process of its own, which a test drives over stdin and stdout, and may stop or kill.

:class:`InstanceProcess` runs it on this host, and :class:`tests.rigs.hosts.HostProcess` on a host of a test
network.
"""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from kvtier import Settings
from kvtier.catalog.catalog import State
from kvtier.instance import Instance
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, StoredHeader, object_bytes
from kvtier.memory.keys import ChunkKey
from kvtier.peers.link_codec import GrantEncoder
from kvtier.peers.source import Read, Source
from kvtier.pipeline.found import FoundPrefix
from kvtier.pipeline.query import Expected, Query
from kvtier.testing.backend import make_key, noise, same
from kvtier.testing.transport_sides import serve_commands
from kvtier.tiers.host_memory import Reservation
from tests.rigs.forks import python
from tests.rigs.hosts import LEAK_TIMEOUT_SECONDS, CommandProcess, LeakCheck

MODULE = "tests.rigs.instance_process"
SECRET = "what the processes of these tests know"
NAMESPACE = bytes(32)
CAPACITY = 256 << 20
EXPONENTS = bytes(value & 0x83 | 0x3C for value in range(256))
"""Makes of any byte the upper one of a value of bfloat16, with one of four exponents."""


def payload_of(key: ChunkKey, length: int) -> bytes:
    """Bytes unique to this chunk: 1 MiB of noise repeated, since gigabytes of noise take seconds to make."""
    pattern = noise(b"payload" + key, min(length, 1 << 20))
    return (pattern * (-(-length // len(pattern))))[:length]


def values_of(key: ChunkKey, length: int) -> bytes:
    """Values of bfloat16 of similar magnitude, unique to this chunk: a codec makes them smaller."""
    pattern = bytearray(noise(b"values" + key, min(length, 1 << 18) + 1))
    pattern[1::2] = pattern[1::2].translate(EXPONENTS)
    return bytes(pattern * (length // len(pattern) + 1))[:length]


CONTENTS = {"noise": payload_of, "values": values_of}
"""What the chunks contain, by name."""


def store(instance: Instance, numbers: Sequence[int], payload: int, contents: str = "noise") -> None:
    """Store chunks in memory, as an engine does."""
    for number in numbers:
        instance.cache.commit([filled(instance, number, payload, contents)])


def filled(instance: Instance, number: int, payload: int, contents: str = "noise") -> Reservation:
    """Reserve room for a chunk, and fill it."""
    key = make_key(number)
    header = ChunkHeader(key, make_key(number - 1), NAMESPACE, payload, key, 37)  # As two block hashes.
    reservation = instance.cache.reserve(header)
    assert reservation is not None, "no room"
    reservation.lease.view[HEADER_BYTES : HEADER_BYTES + payload] = CONTENTS[contents](key, payload)
    return reservation


def settings_of(
    listen: str | None, others: Sequence[str], capacity: int, folder: str | None = None, **peer: Any
) -> Settings:
    tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": capacity}]
    if folder:
        tiers.append({"name": "ssd", "type": "disk", "capacity": 1 << 30, "path": folder})
    return Settings(
        tiers=tiers,
        peer={"listen": listen, "others": list(others), "secret": SECRET, **peer},
    )


class InstanceProcess:
    """The test's handle of a process on this host, which can be restarted on the same port.

    It holds the chunks ``numbers`` of ``payload`` bytes. With ``folder``, memory has room for half of them,
    and a disk tier in that folder holds all. With ``blocks_after``, it blocks in the middle of the batch that
    it pushes after so many, until :meth:`resume`. ``contents``: see :data:`CONTENTS`. ``spoils``: see
    :func:`_spoil`.
    """

    def __init__(
        self,
        numbers: Sequence[int] = (),
        payload: int = 20_000,
        folder: str | None = None,
        *,
        capacity: int | None = None,
        blocks_after: int | None = None,
        contents: str = "noise",
        spoils: str = "",
        **peer: Any,
    ) -> None:
        self.numbers = list(numbers)
        self.payload = payload
        self.port = 0
        count = len(self.numbers)
        self._settings = {
            "capacity": capacity or object_bytes(payload) * (count // 2 if folder else 2 * count + 2),
            "folder": folder,
            "peer": peer,
            "blocks_after": blocks_after,
            "contents": contents,
            "spoils": spoils,
        }
        self._process: CommandProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> InstanceProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> None:
        # In a thread, since the first start waits for the parent of all.
        run = partial(python, MODULE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = CommandProcess(await anyio.to_thread.run_sync(run))
        self.port = await self._call("open", listen=self.address, **self._settings)
        for number in self.numbers:
            await self.compute([number], drains=True)

    async def compute(self, numbers: Sequence[int], *, drains: bool = False) -> None:
        """Make chunks READY; with ``drains``, also write them to the disk tier."""
        await self._call("store", numbers=list(numbers), payload=self.payload, drains=drains)

    async def reserve(self, numbers: Sequence[int]) -> None:
        """Reserve room for chunks, which :meth:`commit` makes READY."""
        await self._call("reserve", numbers=list(numbers), payload=self.payload)

    async def commit(self) -> None:
        """Make the reserved chunks READY."""
        await self._call("commit")

    async def transfer_kv(self, to: str, numbers: Sequence[int]) -> None:
        """Start a KV transfer, and return once it is announced."""
        await self._call("transfer_kv", to=to, numbers=list(numbers), waits=True)

    async def resume(self) -> None:
        """Unblock the writes."""
        await self._call("resume")

    async def finish(self) -> int:
        """Finish the KV transfer; return the number of leading chunks that the receiver holds."""
        leading: int = await self._call("finish", seconds=60)
        return leading

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._call("status")
        return status

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process with SIGKILL and reap it. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)  # Now, not when a thread has started.
            await anyio.to_thread.run_sync(process.kill)

    async def _call(self, name: str, **arguments: object) -> Any:
        assert self._process is not None
        self._process.send(name, **arguments)
        with anyio.fail_after(60):
            return await anyio.to_thread.run_sync(self._process.result, abandon_on_cancel=True)


class Commands(LeakCheck):
    """The commands that the process executes."""

    async def open(
        self,
        listen: str,
        peer: dict[str, Any],
        others: Sequence[str] = (),
        capacity: int = CAPACITY,
        folder: str | None = None,
        blocks_after: int | None = None,
        contents: str = "noise",
        spoils: str = "",
    ) -> int:
        """Open the instance; return its port."""
        self._contents = contents
        if spoils:
            _spoil(spoils)
        self._resume = anyio.Event() if blocks_after is None else _block_after(blocks_after)
        self._stack = AsyncExitStack()
        settings = settings_of(listen, others, capacity, folder, **peer)
        self._instance = await self._stack.enter_async_context(Instance.open(settings))
        assert self._instance.server is not None
        return self._instance.server.address[1]

    async def close(self) -> None:
        await self._stack.aclose()
        # An arena that is closed while garbage holds a view of it is unmapped only with its object.
        del self._instance

    async def store(self, numbers: Sequence[int], payload: int, *, drains: bool = False) -> None:
        store(self._instance, numbers, payload, self._contents)
        if drains:
            await self._instance.cache.drain(60)

    async def reserve(self, numbers: Sequence[int], payload: int) -> None:
        self._reserved = [filled(self._instance, number, payload) for number in numbers]

    async def commit(self) -> None:
        self._instance.cache.commit(self._reserved)

    async def fetch(self, start: int, count: int, payload: int) -> tuple[int, float]:
        """Look a prompt up; return the number of leading chunks that arrive intact, and the seconds taken.

        Waits for every leased chunk, as a request does. Clears the chunks afterwards.
        """
        cache = self._instance.cache
        keys = [make_key(number) for number in range(start, start + count)]
        started = time.monotonic()
        found = cache.look_up(Query(keys), Expected(NAMESPACE, [object_bytes(payload)] * count))
        await found.settle(None)
        seconds = time.monotonic() - started
        ready = _release_intact(found)
        await cache.clear(keys)
        return ready, seconds

    async def transfer_kv(self, to: str, numbers: Sequence[int], *, waits: bool = False) -> None:
        """Start the KV transfer of a prompt; with ``waits``, return once it is announced or has failed."""
        self._transfer = self._instance.transfer_kv(to, [make_key(number) for number in numbers])
        if waits:
            await self._transfer.announced.wait()

    async def resume(self) -> None:
        self._resume.set()

    async def finish(self, seconds: float) -> int:
        """Finish the KV transfer; return the number of leading chunks that the receiver holds."""
        leading = (await self._transfer.finish(seconds)).leading
        await self._transfer.ended.wait()
        return leading

    async def await_pushed(self, start: int, count: int, seconds: float) -> tuple[int, float]:
        """Like :meth:`fetch`, for pushed chunks, which are kept."""
        cache = self._instance.cache
        started = time.monotonic()
        keys = [make_key(number) for number in range(start, start + count)]
        found = cache.look_up(Query(keys, expect_seconds=seconds, expect_chunks=count))
        await cache.settle(found)
        taken = time.monotonic() - started
        return _release_intact(found), taken

    async def status(self) -> dict[str, object]:
        return self._instance.status()

    async def is_idle(self) -> bool:
        """Wait until no chunk is pending and only READY chunks are leased. Return ``False`` on a timeout."""
        cache = self._instance.cache
        catalog = cache.catalog
        with anyio.move_on_after(LEAK_TIMEOUT_SECONDS):
            while (
                cache.pending_bytes
                or any(catalog.state(key, 0) is State.PENDING for key in catalog.keys(0))
                or cache.arena.leases != catalog.count(0)
            ):
                await anyio.sleep(0.02)
            return True
        return False


def _release_intact(found: FoundPrefix) -> int:
    """Check the bytes of the chunks that were found, release them, and return their number."""
    for chunk in found.chunks:
        length = ChunkHeader.verify(chunk.lease.view, chunk.key).payload_bytes
        payload = chunk.lease.view[HEADER_BYTES : HEADER_BYTES + length]
        assert same(payload, payload_of(chunk.key, length)), "wrong bytes"
    ready = found.ready
    found.release()
    return ready


def _block_after(batches: int) -> anyio.Event:
    """Block ``Source.write_hashed`` amid a batch after so many; return the event that unblocks it."""
    write_all, remaining, resume = Source.write_hashed, iter(range(batches)), anyio.Event()

    async def write(self: Source, writes: list[Read]) -> Any:
        if next(remaining, None) is None and not resume.is_set():
            await write_all(self, writes[: len(writes) // 2])
            await resume.wait()
        return await write_all(self, writes)

    Source.write_hashed = write  # type: ignore[assignment, method-assign]
    return resume


def _spoil(how: str) -> None:
    """Spoil each chunk that is encoded for a peer.

    ``flip AT...``: a bit of the byte there, from the end if it is negative, of each chunk another one.
    ``length BY``: report another length. ``codec CODE``: name another codec.
    """
    encode = GrantEncoder._encode
    name, *numbers = how.split()
    in_turn = itertools.cycle(map(int, numbers))

    def spoiled(self: GrantEncoder, work: Any) -> int:
        length, memory, number = encode(self, work), work[3].view, next(in_turn)
        if name == "flip":
            stored = StoredHeader.parse(memory)
            last = HEADER_BYTES + stored.stored_bytes
            memory[number % last] ^= 0x10
        elif name == "codec":
            stored = StoredHeader.parse(memory)
            StoredHeader.seal(memory, stored.chunk, number, stored.stored_bytes, checksum=True)
        return length + number if name == "length" else length

    GrantEncoder._encode = spoiled  # type: ignore[method-assign]


if __name__ == "__main__":
    anyio.run(serve_commands, Commands())
