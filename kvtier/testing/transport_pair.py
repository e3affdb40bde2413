"""What the conformance suite of transports stands on: two sides, linked, and right bytes told from wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from kvtier.backends.base import Outcome
from kvtier.slices import Lease
from kvtier.testing.backend import same
from kvtier.testing.relay import Relay
from kvtier.testing.transport_process import OtherProcess
from kvtier.testing.transport_side import (
    MIB,
    Certificate,
    Side,
    dial_nowhere,
    dial_to,
    pattern,
)
from kvtier.transports.base import Link, RemoteSpan, Transport

KIB = 1 << 10
OK, MISS, FAILED = Outcome.OK, Outcome.MISS, Outcome.FAILED

SHORT_DEADLINE = 1.0
GRACE_SECONDS = 3.0
"""How much later than its deadline a call may end on a machine that is busy."""
PATIENCE_SECONDS = 30.0
"""How long a condition that must come may take to come."""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail where it does not come."""
    with anyio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - of another process or thread
            await anyio.sleep(0.005)


def no_more(now: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> bool:
    """Whether no number is greater than it was."""
    return all(
        count <= earlier
        for row, row_before in zip(now, before, strict=True)
        for count, earlier in zip(row, row_before, strict=True)
    )


def part(span: RemoteSpan, start: int, length: int) -> RemoteSpan:
    """Some bytes of a span."""
    return RemoteSpan(span.grant, span.offset + start, length)


async def holds(view: memoryview, seed: int) -> bool:
    """Whether memory has the bytes of ``pattern(seed)``."""
    return await anyio.to_thread.run_sync(lambda: same(view, pattern(seed, len(view))))


async def fill(view: memoryview, seed: int) -> None:
    """Give memory these bytes."""
    view[:] = await anyio.to_thread.run_sync(pattern, seed, len(view))


@dataclass
class Linked:
    """This process's side, the other process, and the link there."""

    here: Side
    other: OtherProcess
    endpoint: bytes
    link: Link
    relay: Relay | None
    room: list[Lease] = field(default_factory=list)

    def views(self, lengths: Sequence[int]) -> list[memoryview]:
        """Memory of this process's arena, until the test ends; stained."""
        leases = [self.here.arena.allocate(length) for length in lengths]
        for lease in leases:
            assert lease is not None, "the arena of a test is too small"
            self.room.append(lease)
        return [lease.view for lease in leases if lease is not None]

    async def read(self, spans: Sequence[RemoteSpan]) -> tuple[list[Outcome], list[memoryview]]:
        """Read spans into memory of its own each."""
        views = self.views([span.length for span in spans])
        return list(await self.link.read(list(zip(spans, views, strict=True)))), views

    async def nothing_is_lent(self) -> None:
        """Wait until no transfer holds a lease over there; fail where one stays."""
        with anyio.fail_after(PATIENCE_SECONDS):
            while await self.other.do("lent"):  # noqa: ASYNC110 - of another process
                await anyio.sleep(0.01)


class TransportSuite:
    """What a transport says of itself, and fixtures."""

    pytestmark = pytest.mark.anyio

    transport: ClassVar[type[Transport]]
    settings: ClassVar[Mapping[str, Any]]
    """Of this transport, as an operator writes them, without ``deadline``."""
    counts_files: ClassVar[bool] = True
    """Whether all descriptors of a transport are closed with it: not so where a library keeps some."""
    counts_threads: ClassVar[bool] = True
    """The same of its threads."""

    def certificate(self, path: Path) -> Certificate | None:
        """One, made in that folder, to run all this over TLS."""
        return None

    @property
    def over_connections(self) -> bool:
        """Whether its bytes go over connections that it is given."""
        # Not issubclass(), which would ask for more than methods.
        return hasattr(self.transport, "serve")

    @pytest.fixture
    def anyio_backend(self) -> str:
        """The cache process runs on asyncio."""
        return "asyncio"

    @pytest.fixture(scope="class")
    @classmethod
    def process(cls) -> Iterator[OtherProcess]:
        """The other process; a test that ends it leaves it to the next to start it again."""
        process = OtherProcess()
        yield process
        process.kill()

    @pytest.fixture
    def other(self, process: OtherProcess) -> OtherProcess:
        """The other process, running."""
        process.start()
        return process

    @pytest.fixture
    def proof(self, tmp_path: Path) -> Certificate | None:
        """What this test's connections are secured with."""
        return self.certificate(tmp_path / "certificate")

    @asynccontextmanager
    async def linked(
        self,
        other: OtherProcess,
        proof: Certificate | None = None,
        *,
        deadline: float = 20.0,
        capacity: int = 24 * MIB,
        relayed: bool = False,
    ) -> AsyncIterator[Linked]:
        """Both sides open, and this one linked to the other. At the end nothing of either may be leased."""
        settings = {**self.settings, "deadline": deadline}
        endpoint, port = await other.open(self.transport, settings, capacity, proof)
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(Side.open(self.transport, settings, capacity, proof))
            relay = stack.enter_context(Relay.to(port)) if relayed else None
            dial = dial_to(relay.port if relay else port, proof) if port else dial_nowhere
            link = await here.transport.connect(endpoint, dial)
            linked = Linked(here, other, endpoint, link, relay)
            try:
                yield linked
            except BaseException:
                # What it is doing now is nobody's business any longer, least of all the next test's.
                other.kill()
                raise
            finally:
                await link.close()
                for lease in linked.room:
                    lease.release()
        if other.is_running:
            await other.do("close")

    @pytest.fixture
    async def pair(self, other: OtherProcess, proof: Certificate | None) -> AsyncIterator[Linked]:
        """Both sides, linked directly."""
        async with self.linked(other, proof) as linked:
            yield linked

    async def assert_reads(self, pair: Linked, spans: Sequence[RemoteSpan], seed: int = 0) -> None:
        """Fail unless whole slices, granted with this seed, are read right."""
        outcomes, views = await pair.read(spans)
        assert outcomes == [OK] * len(spans)
        for index, view in enumerate(views):
            assert await holds(view, seed + index), f"item {index} has other bytes"

    def only_over_connections(self) -> None:
        """Skip the test where the suite has no hand in how bytes travel."""
        if not self.over_connections:
            pytest.skip("needs connections that can be held back and cut")
