"""Base of the transport conformance suite: two linked sides, and checks of their bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from kvtier.backends.base import Outcome
from kvtier.concurrency.tasks import DetachedTask
from kvtier.memory.slices import Lease
from kvtier.testing.backend import same
from kvtier.testing.relay import Relay
from kvtier.testing.transport_process import OtherProcess
from kvtier.testing.transport_side import MIB, Certificate, Side, dial_nowhere, dial_to, pattern
from kvtier.transports.base import Link, RemoteSpan, Transport

KIB = 1 << 10
OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED

SHORT_DEADLINE = 1.0
GRACE_SECONDS = 10.0
"""How long after its deadline a call may return on a busy machine."""
TIMEOUT_SECONDS = 60.0
"""How long to wait for a condition."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail after ``TIMEOUT_SECONDS``."""
    with anyio.fail_after(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 - of another process or thread
            await anyio.sleep(0.005)


def none_greater(now: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> bool:
    """Return whether no number has increased."""
    return all(
        count <= earlier
        for row, row_before in zip(now, before, strict=True)
        for count, earlier in zip(row, row_before, strict=True)
    )


def part(span: RemoteSpan, start: int, length: int) -> RemoteSpan:
    """Return a part of a span."""
    return RemoteSpan(span.grant, span.offset + start, length)


async def holds(view: memoryview, seed: int) -> bool:
    """Return whether memory contains ``pattern(seed)``."""
    return await anyio.to_thread.run_sync(lambda: same(view, pattern(seed, len(view))))


async def fill(view: memoryview, seed: int) -> None:
    """Fill memory with ``pattern(seed)``."""
    view[:] = await anyio.to_thread.run_sync(pattern, seed, len(view))


@dataclass
class Linked:
    """This process's side, the other process, and the link to it."""

    here: Side
    other: OtherProcess
    endpoint: bytes
    link: Link
    relay: Relay | None
    leases: list[Lease] = field(default_factory=list)

    def views(self, lengths: Sequence[int]) -> list[memoryview]:
        """Allocate memory in this process's arena until the test ends. It contains the sentinel byte."""
        leases = [self.here.arena.allocate(length) for length in lengths]
        for lease in leases:
            assert lease is not None, "the test's arena is too small"
            self.leases.append(lease)
        return [lease.view for lease in leases if lease is not None]

    async def read(self, spans: Sequence[RemoteSpan]) -> tuple[list[Outcome], list[memoryview]]:
        """Read each span into newly allocated memory."""
        views = self.views([span.length for span in spans])
        return list(await self.link.read(list(zip(spans, views, strict=True)))), views

    async def assert_no_leases(self) -> None:
        """Wait until no transfer holds a lease in the other process; fail after ``TIMEOUT_SECONDS``."""
        with anyio.fail_after(TIMEOUT_SECONDS):
            while await self.other.do("transfer_leases"):  # noqa: ASYNC110 - of another process
                await anyio.sleep(0.01)


class TransportSuite:
    """Declarations for the transport under test, and fixtures."""

    pytestmark = pytest.mark.anyio

    transport: ClassVar[type[Transport]]
    """The class to test."""
    settings: ClassVar[Mapping[str, Any]]
    """The transport's settings, as in the configuration, without ``deadline``."""
    counts_files: ClassVar[bool] = True
    """Whether closing the transport closes all its file descriptors. False if a library keeps some open."""
    counts_threads: ClassVar[bool] = True
    """Whether closing the transport stops all its threads."""

    def certificate(self, path: Path) -> Certificate | None:
        """Create a certificate in ``path`` to run the suite over TLS; ``None``, the default: without TLS."""
        return None

    @property
    def over_connections(self) -> bool:
        """Whether the transport uses the connections that it is given."""
        # Not issubclass(), which checks more than the method.
        return hasattr(self.transport, "serve")

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The cache process runs on asyncio."""
        return "asyncio"

    @pytest.fixture(scope="class")
    @classmethod
    def process(cls) -> Iterator[OtherProcess]:
        """The other process. It may not be running: a test that kills it does not restart it."""
        process = OtherProcess()
        yield process
        process.kill()

    @pytest.fixture
    def other(self, process: OtherProcess) -> OtherProcess:
        """The other process, running."""
        process.start()
        return process

    @pytest.fixture
    def tls(self, tmp_path: Path) -> Certificate | None:
        """The certificate for this test's connections."""
        return self.certificate(tmp_path / "certificate")

    @asynccontextmanager
    async def linked(
        self,
        other: OtherProcess,
        tls: Certificate | None = None,
        *,
        deadline: float = TIMEOUT_SECONDS,
        capacity: int = 24 * MIB,
        relayed: bool = False,
    ) -> AsyncIterator[Linked]:
        """Open both sides, and link this one to the other. Fails if either has open leases at the end."""
        settings = {**self.settings, "deadline": deadline}
        endpoint, port = await other.open(self.transport, settings, capacity, tls)
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(Side.open(self.transport, settings, capacity, tls))
            relay = stack.enter_context(Relay.to(port)) if relayed else None
            dial = dial_to(relay.port if relay else port, tls) if port else dial_nowhere
            link = await here.transport.connect(endpoint, dial)
            linked = Linked(here, other, endpoint, link, relay)
            try:
                yield linked
            except BaseException:
                # Its state is unknown, and must not affect the next test.
                other.kill()
                raise
            finally:
                await link.close()
                for lease in linked.leases:
                    lease.release()
        if other.is_running:
            await other.do("close")

    @pytest.fixture
    async def pair(self, other: OtherProcess, tls: Certificate | None) -> AsyncIterator[Linked]:
        """Both sides, linked directly."""
        async with self.linked(other, tls) as linked:
            yield linked

    async def assert_reads(self, pair: Linked, spans: Sequence[RemoteSpan], seed: int = 0) -> None:
        """Read whole slices that were granted with ``seed``, and check their bytes."""
        outcomes, views = await pair.read(spans)
        assert outcomes == [OK] * len(spans)
        for index, view in enumerate(views):
            assert await holds(view, seed + index), f"item {index} has wrong bytes"

    async def until_reads(self, pair: Linked, spans: Sequence[RemoteSpan], seed: int = 0) -> None:
        """Like :meth:`assert_reads`, over a link whose deadline a read may exceed on a busy machine."""
        views = pair.views([span.length for span in spans])
        outcomes: set[Outcome] = set()
        with anyio.fail_after(TIMEOUT_SECONDS):
            while outcomes != {OK}:
                outcomes = set(await pair.link.read(list(zip(spans, views, strict=True))))
                assert outcomes <= {OK, FAILED}
        for index, view in enumerate(views):
            assert await holds(view, seed + index), f"item {index} has wrong bytes"

    async def held_back(
        self, pair: Linked, transfer: Callable[[], Coroutine[Any, Any, Sequence[Outcome]]]
    ) -> DetachedTask[Sequence[Outcome]]:
        """Start a transfer of more than 1 MiB, and return it when the relay holds back the rest.

        On a busy machine, a short deadline may pass before. The transfer is then started again.
        """
        assert pair.relay is not None
        relay = pair.relay
        relay.hold_after(MIB)
        with anyio.fail_after(TIMEOUT_SECONDS):
            while True:
                call = DetachedTask(transfer())
                while not relay.is_holding and not await call.wait(0.005):
                    pass
                if relay.is_holding:
                    return call
                assert FAILED in call.result()

    def require_connections(self) -> None:
        """Skip the test if the transport does not use connections that the suite can control."""
        if not self.over_connections:
            pytest.skip("the transport does not use connections")
