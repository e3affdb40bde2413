"""Staging buffers between two engine stand-ins with real cache processes, on a CPU and on one GPU.

The tests are the same for both kinds of memory. Tests with vLLM engines are in ``tests/vllm``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.peers.staging.push import REFUSED_SECONDS
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import MIB, CacheProcess, is_idle
from tests.rigs.children import nixl_processes
from tests.rigs.staging_engine import CHUNKS, PAGES, Result, Side, side

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")

ALL = CHUNKS + 1
SLOT = 4 * sum(PAGES)
"""Bytes of a chunk in a staging buffer, per rank."""
BUFFER = 2 * MIB
"""Room for three prompts: few of them reuse every slice."""
TIMEOUT_SECONDS = 30.0
START_SECONDS = 90.0
"""Processes that load NIXL have started by then, on a machine that is ten times slower."""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
PROMPTS = itertools.count(100)
"""Prompts that no shared cache holds, also when a test is rerun."""
STAGED = Result(["staging"] * ALL, True, True)


class Pair(NamedTuple):
    prefill: Side
    decode: Side
    prefill_cache: CacheProcess
    decode_cache: CacheProcess

    @property
    def receiver(self) -> str:
        return str(self.decode_cache.settings["peer"]["listen"])

    def serve(self, prompt: int) -> Result:
        """Run a whole request: transfer a prompt, and load it on the other side."""
        self.prefill.transfer_kv(prompt, self.receiver)
        ticket = self.decode.look_up(prompt, TIMEOUT_SECONDS)
        for first, last in ((0, 2), (2, 3), (3, ALL)):
            self.prefill.store(prompt, first, last)
        self.prefill.end(prompt, True)
        return Result(*self.decode.load(prompt, ticket))

    def wait_for_buffers(self, lost: Sequence[int] = ()) -> None:
        """Wait until both sides have usable buffers, other than the lost ones."""
        for engine, cache in ((self.prefill, self.prefill_cache), (self.decode, self.decode_cache)):
            deadline = time.monotonic() + START_SECONDS
            while {0, *lost} & set(engine.refresh()) or not cache.status()["staging"]:
                assert time.monotonic() < deadline, cache.tail()
                time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Wait until both caches are idle."""
        self.prefill_cache.wait_until(is_fully_idle)
        self.decode_cache.wait_until(is_fully_idle)


def is_fully_idle(status: dict[str, Any]) -> bool:
    transfer, reserving = status["kv_transfers"], status["serving"]["reserving"]
    counts = [transfer[name] for name in ("open", "leased_bytes", "awaited")]
    counts += [reserving[name] for name in ("reserved_bytes", "reservations", "announcements")]
    counts += [status["serving"]["grants"], *status["pushed"].values()]
    counts += [
        buffer[name]
        for buffer in status.get("staging", ())
        for name in ("used_bytes", "leases", "chunks", "grants")
    ]
    return is_idle(status) and not any(counts)


@contextmanager
def cache(
    device: str = "cuda", transport: str = "nixl", port: int = 0, **kv_transfer: Any
) -> Iterator[CacheProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    running = CacheProcess(
        folder,
        chunk_tokens=64,
        peer={
            "listen": f"127.0.0.1:{port or free_port()}",
            "secret": "sixteen or more characters",
            "transport": {"type": transport},
        },
        kv_transfer={"device": device, "buffer": BUFFER, "reserve": "4s", **kv_transfer},
    )
    try:
        running.start()
        yield running
    finally:
        running.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_pair(memory: str, ranks: int = 1, **decode: Any) -> Iterator[Pair]:
    """Open two caches with an engine each. ``decode``: ``kv_transfer`` settings of the decode instance."""
    with ExitStack() as stack:
        port = free_port()
        prefill_cache = stack.enter_context(cache(targets=[f"127.0.0.1:{port}"]))
        decode_cache = stack.enter_context(cache(port=port, **decode))
        engines = [
            stack.enter_context(side(process.socket, memory, ranks))
            for process in (prefill_cache, decode_cache)
        ]
        yield Pair(engines[0], engines[1], prefill_cache, decode_cache)


@pytest.fixture(scope="module", params=DEVICES)
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with open_pair(request.param) as running:
        running.wait_for_buffers()
        yield running


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    shared.wait_for_buffers()
    yield shared
    shared.wait_until_idle()


def test_chunks_go_from_buffer_to_buffer_and_memory_is_freed(pair: Pair) -> None:
    """Three times the capacity of the buffers, so that slices are reused."""
    rounds = 3 * BUFFER // (ALL * SLOT)
    assert rounds > 5
    before = pair.prefill_cache.status()["kv_transfers"]["counts"].get("staged", 0)
    for _ in range(rounds):
        assert pair.serve(next(PROMPTS)) == STAGED, pair.prefill_cache.tail() + pair.decode_cache.tail()
    pair.wait_until_idle()
    assert pair.prefill_cache.status()["kv_transfers"]["counts"]["staged"] == before + rounds * ALL
    assert pair.decode_cache.status()["tiers"][0]["chunks"] == 0, (
        "no chunk goes through the first tier of the decode instance"
    )


def test_aborted_prefill(pair: Pair) -> None:
    prompt = next(PROMPTS)
    pair.prefill.transfer_kv(prompt, pair.receiver)
    ticket = pair.decode.look_up(prompt, TIMEOUT_SECONDS)
    pair.prefill.store(prompt, 0, 3)
    pair.prefill.end(prompt, False)
    result = Result(*pair.decode.load(prompt, ticket))
    assert result.intact
    assert result.confirmed
    assert len(result.sources) <= 3
    assert set(result.sources) <= {"staging"}


def test_cancelled_lookup_leaks_nothing(pair: Pair) -> None:
    prompt = next(PROMPTS)
    pair.prefill.transfer_kv(prompt, pair.receiver)
    ticket = pair.decode.look_up(prompt, TIMEOUT_SECONDS)
    pair.prefill.store(prompt, 0, 2)
    pair.decode_cache.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
    pair.decode.cancel(ticket)
    pair.prefill.store(prompt, 2, ALL)
    pair.prefill.end(prompt, True)
    pair.wait_until_idle()  # Chunks that arrive later are freed after a timeout without a lookup.


@pytest.mark.parametrize("which", ["prefill_cache", "decode_cache"])
def test_lost_buffers_are_recreated(pair: Pair, which: str) -> None:
    """Lost chunks are pushed through the first tier or computed, and no wrong bytes count as loaded."""
    prompt = next(PROMPTS)
    pair.prefill.transfer_kv(prompt, pair.receiver)
    ticket = pair.decode.look_up(prompt, TIMEOUT_SECONDS)
    pair.prefill.store(prompt, 0, 2)
    pair.decode_cache.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
    victim: CacheProcess = getattr(pair, which)
    lost = (pair.prefill if which == "prefill_cache" else pair.decode).refresh()
    for pid in nixl_processes(victim.status()["pid"]):
        os.kill(pid, signal.SIGKILL)
    pair.prefill.store(prompt, 2, ALL)
    pair.prefill.end(prompt, True)
    sources, confirmed, intact = pair.decode.load(prompt, ticket)
    assert intact or not confirmed, "unconfirmed bytes need not be intact"
    assert confirmed == (which == "prefill_cache"), sources
    pair.wait_for_buffers(lost)
    pair.wait_until_idle()
    assert pair.serve(next(PROMPTS)) == STAGED


def test_running_transfer_uses_buffers_that_were_recreated(pair: Pair) -> None:
    prompt = next(PROMPTS)
    pair.prefill.transfer_kv(prompt, pair.receiver)
    lost = pair.decode.refresh()
    for pid in nixl_processes(pair.decode_cache.status()["pid"]):
        os.kill(pid, signal.SIGKILL)
    pair.decode_cache.wait_until(lambda status: not status["staging"])
    before = pair.decode_cache.status()["tiers"][0]["chunks"]
    pair.prefill.store(prompt, 0, 2)
    pair.decode_cache.wait_until(lambda status: status["tiers"][0]["chunks"] == before + 2)
    pair.wait_for_buffers(lost)
    time.sleep(REFUSED_SECONDS)
    pair.prefill.store(prompt, 2, ALL)
    pair.prefill.end(prompt, True)
    result = pair.decode.fetch(prompt)
    assert result == Result(["ram"] * 2 + ["staging"] * (ALL - 2), True, True)


@pytest.mark.slow
@pytest.mark.parametrize("memory", DEVICES)
def test_each_rank_has_its_own_buffer(memory: str) -> None:
    with open_pair(memory, ranks=2) as pair:
        pair.wait_for_buffers()
        for prompt in (1, 2, 3):
            assert pair.serve(prompt) == STAGED
        pair.wait_until_idle()


@pytest.mark.slow
def test_overflow_of_buffers_goes_through_first_tier() -> None:
    with open_pair("cpu", buffer=2 * SLOT) as pair:
        pair.wait_for_buffers()
        pair.prefill.transfer_kv(1, pair.receiver)
        pair.prefill.store(1, 0, ALL)
        pair.prefill.end(1, True)
        result = pair.decode.fetch(1)
        assert (result.confirmed, result.intact, len(result.sources)) == (True, True, ALL)
        assert set(result.sources) == {"staging", "ram"}
        pair.wait_until_idle()
        assert (
            pair.prefill_cache.log.read_text().count("instead of staging buffers: the peer's staging buffer")
            == 1
        )


@pytest.mark.slow
def test_receiver_without_buffers_gets_chunks_through_first_tier() -> None:
    with open_pair("cpu", device="cpu") as pair:
        assert not pair.decode.staged
        pair.prefill_cache.wait_until(lambda status: bool(status["staging"]))
        for prompt in (1, 2):
            assert pair.serve(prompt) == Result(["ram"] * ALL, True, True)
        pair.wait_until_idle()
        message = "instead of staging buffers: kv_transfer.device is cpu there"
        assert pair.prefill_cache.log.read_text().count(message) == 1


@pytest.mark.slow
@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_killed_engine_frees_its_buffers(which: str) -> None:
    with open_pair("cpu") as pair:
        pair.wait_for_buffers()
        pair.prefill.transfer_kv(1, pair.receiver)
        ticket = pair.decode.look_up(1, TIMEOUT_SECONDS)
        pair.prefill.store(1, 0, 2)
        pair.decode_cache.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
        victim: Side = getattr(pair, which)
        victim.kill()
        if which == "prefill":
            assert Result(*pair.decode.load(1, ticket)) == Result(["staging"] * 2, True, True)
        else:
            pair.prefill.store(1, 2, ALL)
            pair.prefill.end(1, True)
        cache_process = pair.prefill_cache if which == "prefill" else pair.decode_cache
        cache_process.wait_until(lambda status: not status["engines"] and not status["staging"])
        pair.wait_until_idle()
        assert len(nixl_processes(cache_process.status()["pid"])) <= 2, "only those of the arena remain"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["prefill_cache", "decode_cache"])
def test_cache_process_killed_during_kv_transfer(which: str) -> None:
    with open_pair("cpu") as pair:
        pair.wait_for_buffers()
        pair.prefill.transfer_kv(1, pair.receiver)
        ticket = pair.decode.look_up(1, TIMEOUT_SECONDS)
        pair.prefill.store(1, 0, 2)
        pair.decode_cache.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
        if which == "prefill_cache":
            pair.prefill_cache.kill()
            result = Result(*pair.decode.load(1, ticket))
            assert result == Result(["staging"] * 2, True, True)
            pair.decode_cache.wait_until(is_fully_idle)
        else:
            pair.decode_cache.kill()
            pair.prefill.store(1, 2, ALL)
            pair.prefill.end(1, True)
            pair.prefill_cache.wait_until(is_fully_idle)
