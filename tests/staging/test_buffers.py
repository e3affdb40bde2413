"""Staging buffers between two processes with tensors, beside real cache processes: on a CPU, and on one GPU.

The same tests on either: only the kind of the memory differs. vLLM's engines are in ``tests/vllm``.
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

from kvtier.testing.servers.base import free_port
from tests.staging.side import CHUNKS, PAGES, Result, Side, side
from tests.vllm.cache_process import MIB, CacheProcess, is_idle

torch = pytest.importorskip("torch")
pytest.importorskip("nixl")

ALL = CHUNKS + 1
SLOT = 4 * sum(PAGES)
"""What a chunk takes, on each rank."""
ENOUGH_SECONDS = 30.0
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
        ],
    ),
]
PROMPTS = itertools.count(100)
"""Each is new to caches that are shared by tests, also in a test that is run again."""
STAGED = Result(["staging"] * ALL, True, True)


class Pair(NamedTuple):
    prefiller: Side
    decoder: Side
    here: CacheProcess
    there: CacheProcess

    @property
    def to(self) -> str:
        return str(self.there.settings["peer"]["listen"])

    def serve(self, prompt: int) -> Result:
        """A whole request: handed over, and fetched meanwhile."""
        self.prefiller.hand_over(prompt, self.to)
        ticket = self.decoder.look_up(prompt, ENOUGH_SECONDS)
        for first, last in ((0, 2), (2, 3), (3, ALL)):
            self.prefiller.store(prompt, first, last)
        self.prefiller.end(prompt, True)
        return Result(*self.decoder.load(prompt, ticket))

    def open(self, lost: Sequence[int] = ()) -> None:
        """Wait until both sides have buffers that can be used, other than the lost ones, as engines do."""
        for engine, cache in ((self.prefiller, self.here), (self.decoder, self.there)):
            deadline = time.monotonic() + ENOUGH_SECONDS
            while {0, *lost} & set(engine.refresh()) or not cache.status()["staging"]:
                assert time.monotonic() < deadline, cache.tail()
                time.sleep(0.05)

    def rest(self) -> None:
        """Nobody holds anything any more."""
        self.here.wait_until(is_quiet)
        self.there.wait_until(is_quiet)


def is_quiet(status: dict[str, Any]) -> bool:
    handing, taking = status["hand_overs"], status["serving"]["reserving"]
    counts = [handing[what] for what in ("open", "leased_bytes", "awaited")]
    counts += [taking[what] for what in ("reserved_bytes", "reservations", "announcements")]
    counts += [status["serving"]["grants"], *status["pushed"].values()]
    counts += [
        buffer[what]
        for buffer in status.get("staging", ())
        for what in ("used_bytes", "leases", "chunks", "grants")
    ]
    return is_idle(status) and not any(counts)


@contextmanager
def cache(device: str = "cuda", transport: str = "nixl", **hand_over: Any) -> Iterator[CacheProcess]:
    folder = Path(tempfile.mkdtemp(prefix="kvt-"))
    running = CacheProcess(
        folder,
        chunk_tokens=64,
        peer={
            "listen": f"127.0.0.1:{free_port()}",
            "secret": "sixteen or more characters",
            "transport": {"type": transport},
        },
        hand_over={"device": device, "buffer": 8 * MIB, "reserve": "4s", **hand_over},
    )
    try:
        running.start()
        yield running
    finally:
        running.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def pair(memory: str, ranks: int = 1, **decoder: Any) -> Iterator[Pair]:
    """``decoder``: settings of its hand-overs."""
    with ExitStack() as stack:
        here = stack.enter_context(cache())
        there = stack.enter_context(cache(**decoder))
        engines = [stack.enter_context(side(one.socket, memory, ranks)) for one in (here, there)]
        yield Pair(engines[0], engines[1], here, there)


@pytest.fixture(scope="module", params=DEVICES)
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(request.param) as running:
        running.open()
        yield running


@pytest.fixture
def both(shared: Pair) -> Iterator[Pair]:
    shared.open()
    yield shared
    shared.rest()


def carriers(process: CacheProcess) -> list[int]:
    """Processes of a cache process that have NIXL in them."""
    pid = process.status()["pid"]
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = {int(child) for path in children for child in path.read_text().split()}
    return [child for child in found if b"carrier.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_all_goes_from_buffer_to_buffer_and_the_memory_goes_back(both: Pair) -> None:
    """Three times what the buffers hold, so that slices are used again."""
    rounds = 3 * 8 * MIB // (ALL * SLOT)
    assert rounds > 5
    before = both.here.status()["hand_overs"]["counts"].get("staged", 0)
    for _ in range(rounds):
        assert both.serve(next(PROMPTS)) == STAGED, both.here.tail() + both.there.tail()
    both.rest()
    assert both.here.status()["hand_overs"]["counts"]["staged"] == before + rounds * ALL
    assert both.there.status()["tiers"][0]["chunks"] == 0, "nothing went through the decoder's first tier"


def test_a_prefill_that_is_aborted(both: Pair) -> None:
    prompt = next(PROMPTS)
    both.prefiller.hand_over(prompt, both.to)
    ticket = both.decoder.look_up(prompt, ENOUGH_SECONDS)
    both.prefiller.store(prompt, 0, 3)
    both.prefiller.end(prompt, False)
    result = Result(*both.decoder.load(prompt, ticket))
    assert result.whole
    assert result.confirmed
    assert len(result.sources) <= 3
    assert set(result.sources) <= {"staging"}


def test_a_look_up_that_is_given_up_leaves_nothing(both: Pair) -> None:
    prompt = next(PROMPTS)
    both.prefiller.hand_over(prompt, both.to)
    ticket = both.decoder.look_up(prompt, ENOUGH_SECONDS)
    both.prefiller.store(prompt, 0, 2)
    both.there.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
    both.decoder.cancel(ticket)
    both.prefiller.store(prompt, 2, ALL)
    both.prefiller.end(prompt, True)
    both.rest()  # Those that came later go when nobody has asked for them in time.


@pytest.mark.parametrize("whose", ["here", "there"])
def test_buffers_that_are_lost_are_made_anew(both: Pair, whose: str) -> None:
    """What was in them is pushed through the first tier, or computed; and nothing that is wrong is loaded."""
    prompt = next(PROMPTS)
    both.prefiller.hand_over(prompt, both.to)
    ticket = both.decoder.look_up(prompt, ENOUGH_SECONDS)
    both.prefiller.store(prompt, 0, 2)
    both.there.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
    victim: CacheProcess = getattr(both, whose)
    lost = (both.prefiller if whose == "here" else both.decoder).refresh()
    for pid in carriers(victim):
        os.kill(pid, signal.SIGKILL)
    both.prefiller.store(prompt, 2, ALL)
    both.prefiller.end(prompt, True)
    sources, confirmed, whole = both.decoder.load(prompt, ticket)
    assert whole or not confirmed, "what does not count need not be right"
    assert confirmed == (whose == "here"), sources
    both.open(lost)
    both.rest()
    assert both.serve(next(PROMPTS)) == STAGED


@pytest.mark.slow
@pytest.mark.parametrize("memory", DEVICES)
def test_two_ranks_have_a_buffer_each(memory: str) -> None:
    with pair(memory, ranks=2) as both:
        both.open()
        for prompt in (1, 2, 3):
            assert both.serve(prompt) == STAGED
        both.rest()


@pytest.mark.slow
def test_what_finds_no_room_goes_through_the_first_tier() -> None:
    with pair("cpu", buffer=2 * SLOT) as both:
        both.open()
        both.prefiller.hand_over(1, both.to)
        both.prefiller.store(1, 0, ALL)
        both.prefiller.end(1, True)
        result = both.decoder.fetch(1)
        assert (result.confirmed, result.whole, len(result.sources)) == (True, True, ALL)
        assert set(result.sources) == {"staging", "ram"}
        both.rest()
        assert both.here.log.read_text().count("goes by way of the first tier: its staging buffer has") == 1


@pytest.mark.slow
def test_a_side_without_buffers_is_handed_over_to_through_the_first_tier() -> None:
    with pair("cpu", device="cpu") as both:
        assert not both.decoder.staged
        both.here.wait_until(lambda status: bool(status["staging"]))
        for prompt in (1, 2):
            assert both.serve(prompt) == Result(["ram"] * ALL, True, True)
        both.rest()
        said = "goes by way of the first tier: hand_over.device is cpu there"
        assert both.here.log.read_text().count(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["prefiller", "decoder"])
def test_an_engine_that_is_killed_frees_everything(whose: str) -> None:
    with pair("cpu") as both:
        both.open()
        both.prefiller.hand_over(1, both.to)
        ticket = both.decoder.look_up(1, ENOUGH_SECONDS)
        both.prefiller.store(1, 0, 2)
        both.there.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
        victim: Side = getattr(both, whose)
        victim.kill()
        if whose == "prefiller":
            assert Result(*both.decoder.load(1, ticket)) == Result(["staging"] * 2, True, True)
        else:
            both.prefiller.store(1, 2, ALL)
            both.prefiller.end(1, True)
        home = both.here if whose == "prefiller" else both.there
        home.wait_until(lambda status: not status["engines"] and not status["staging"])
        both.rest()
        assert len(carriers(home)) <= 2, "those of the arena alone"


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["here", "there"])
def test_a_cache_process_that_is_killed_amid_a_hand_over(whose: str) -> None:
    with pair("cpu") as both:
        both.open()
        both.prefiller.hand_over(1, both.to)
        ticket = both.decoder.look_up(1, ENOUGH_SECONDS)
        both.prefiller.store(1, 0, 2)
        both.there.wait_until(lambda status: status["staging"][0]["chunks"] == 2)
        if whose == "here":
            both.here.kill()
            result = Result(*both.decoder.load(1, ticket))
            assert result == Result(["staging"] * 2, True, True)
            both.there.wait_until(is_quiet)
        else:
            both.there.kill()
            both.prefiller.store(1, 2, ALL)
            both.prefiller.end(1, True)
            both.here.wait_until(is_quiet)
