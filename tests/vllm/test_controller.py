"""Real engines whose cache processes are registered with a controller that moves their KV."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtier.lab.demo import model as demo_model
from kvtier.lab.demo.server import Server, start_vllm
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import CHUNK, TIMEOUT_SECONDS, CacheProcess
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.vllm.engine import Engine
from tests.rigs.vllm.models import prompt
from tests.vllm.conftest import MakeCache, Oracle, StartEngine

LENGTH = 1000
"""Seven chunks and most of an eighth."""
CHUNKS = -(-LENGTH // CHUNK)
FIRST, SECOND, THIRD = (prompt(LENGTH, start=1200 * number) for number in range(3))
SECRET = "sixteen or more characters"
FIRST_RAM, FIRST_DISK = ("instance-1", "ram"), ("instance-1", "ssd")
SECOND_RAM, SECOND_DISK = ("instance-2", "ram"), ("instance-2", "ssd")
EXAMPLES = Path(__file__).parents[2] / "examples" / "controller"
QUESTION = "Explain the significance of KV cache in language models."
VLLM_READY_SECONDS = 240.0
TRIALS = 20

MakeInstance = Callable[..., CacheProcess]


@pytest.fixture
def make_instance(make_cache: MakeCache, controller: ControllerProcess) -> MakeInstance:
    """``make_instance(number)``: a running cache process with a controller and without configured peers."""

    def make(number: int, *, transport: str = "tcp", ask: bool = False) -> CacheProcess:
        cache = make_cache(
            partial_chunks=True,
            ssd={"write": "never"},  # Chunks reach the disk only by a move.
            peer={
                "listen": f"127.0.0.1:{free_port()}",
                "secret": SECRET,
                "transport": {"type": transport, "deadline": TIMEOUT_SECONDS},
                "timeout": "2s",  # Enough on a busy machine.
                "share": 0.9,
            },
            controller={"url": controller.url, "instance_id": f"instance-{number}", "ask": ask},
        )
        cache.start()
        return cache

    return make


def compute(engine: Engine, cache: CacheProcess, *prompts: list[int]) -> None:
    """Compute prompts until the cache process holds all of them, and nothing else.

    Hence the retries: a save that the cache process does not accept in time is dropped, as on a busy machine.
    """
    for number, tokens in enumerate(prompts, 1):
        for _ in range(TRIALS):
            engine.generate(tokens)
            cache.wait_until_idle()
            engine.reset_prefix_cache()
            if cache.status()["tiers"][0]["chunks"] == number * CHUNKS:
                break
        else:
            raise AssertionError(f"not stored: {cache.status()}")


def check_hits(engine: Engine, oracle: Oracle, model: Path, *prompts: list[int]) -> None:
    """Check that prompts are hit as a whole. vLLM may compute the last token of each again."""
    for tokens in prompts:
        answer = engine.generate(tokens)
        assert answer.tokens == oracle(model, tokens)
        assert answer.cached >= LENGTH - 1


def wait_until_idle(*caches: CacheProcess) -> None:
    """Wait until no lease or grant is left."""
    for cache in caches:
        cache.wait_until(lambda status: status["serving"]["grants"] == 0)
        cache.wait_until_idle()


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def test_moved_chunks_are_hit_at_the_target_only(
    llama: Path,
    controller: ControllerProcess,
    make_instance: MakeInstance,
    start: StartEngine,
    oracle: Oracle,
    transport: str,
) -> None:
    first, second = (make_instance(number, transport=transport) for number in (1, 2))
    controller.wait_until_registered("instance-1", "instance-2")
    with start(llama, first) as engine:
        compute(engine, first, FIRST)
        controller.wait_until_held(FIRST, **{"instance-1": {"ram": LENGTH}})
        moving = {"old_position": ["instance-1", "cpu"], "new_position": ["instance-2", "cpu"]}
        accepted = controller.post("/move", **moving, tokens=FIRST)
        assert accepted["num_tokens"] == LENGTH
        event = controller.wait_for_end(accepted)
        assert (event["state"], event["error"]) == ("done", None)
        assert (event["chunks"], event["chunks_done"], event["result"]["removed"]) == (CHUNKS,) * 3
        assert controller.lookup(FIRST) == {"instance-2": {"ram": LENGTH}}
        assert first.status()["tiers"][0]["chunks"] == 0
        again = engine.generate(FIRST)
        assert (again.tokens, again.cached) == (oracle(llama, FIRST), 0)
        nothing = controller.move(("instance-2", "ssd"), FIRST_RAM, FIRST)
        assert (nothing["state"], nothing["num_tokens"], nothing["chunks"]) == ("done", 0, 0)
    with start(llama, second) as engine:
        check_hits(engine, oracle, llama, FIRST)
    assert second.status()["counts"]["found_ram"] == CHUNKS
    wait_until_idle(first, second)


@pytest.mark.slow
def test_copies_moves_through_disks_and_holders_from_the_controller(
    llama: Path,
    controller: ControllerProcess,
    make_instance: MakeInstance,
    start: StartEngine,
    oracle: Oracle,
) -> None:
    first, second = make_instance(1), make_instance(2)
    controller.wait_until_registered("instance-1", "instance-2")
    with start(llama, first) as engine:
        compute(engine, first, FIRST, SECOND, THIRD)
        for tokens in (FIRST, SECOND, THIRD):
            controller.wait_until_held(tokens, **{"instance-1": {"ram": LENGTH}})
    # To the second instance's memory, and kept in the first's.
    assert controller.move(FIRST_RAM, SECOND_RAM, FIRST, copy=True)["result"]["chunks"] == CHUNKS
    assert controller.lookup(FIRST) == {"instance-1": {"ram": LENGTH}, "instance-2": {"ram": LENGTH}}
    # To the first instance's own disk, and from there to the second's memory.
    assert controller.move(FIRST_RAM, FIRST_DISK, SECOND)["result"]["chunks"] == CHUNKS
    assert controller.lookup(SECOND) == {"instance-1": {"ssd": LENGTH}}
    assert controller.move(FIRST_DISK, SECOND_RAM, SECOND)["result"]["chunks"] == CHUNKS
    assert controller.lookup(SECOND) == {"instance-2": {"ram": LENGTH}}
    # To the second instance's disk, where it is hit as well.
    assert controller.move(FIRST_RAM, SECOND_DISK, THIRD)["result"]["chunks"] == CHUNKS
    assert controller.lookup(THIRD) == {"instance-2": {"ssd": LENGTH}}
    with start(llama, second) as engine:
        check_hits(engine, oracle, llama, FIRST, SECOND, THIRD)
    # An instance without configured peers asks the controller for holders.
    asking = make_instance(3, ask=True)
    controller.wait_until_registered("instance-1", "instance-2", "instance-3")
    with start(llama, asking) as engine:
        check_hits(engine, oracle, llama, FIRST, SECOND, THIRD)
    wait_until_idle(first, second, asking)


@pytest.mark.slow
def test_killed_controller_recovers_its_state(
    llama: Path,
    controller: ControllerProcess,
    make_instance: MakeInstance,
    start: StartEngine,
    oracle: Oracle,
) -> None:
    first, second = make_instance(1), make_instance(2)
    controller.wait_until_registered("instance-1", "instance-2")
    with start(llama, first) as engine:
        compute(engine, first, FIRST)
        controller.wait_until_held(FIRST, **{"instance-1": {"ram": LENGTH}})
        copied = controller.move(FIRST_RAM, SECOND_RAM, FIRST, copy=True)
        controller.kill()
        assert engine.generate(FIRST).cached >= LENGTH - 1  # The engine does not need the controller.
        compute(engine, first, FIRST, SECOND)
    controller.start()
    controller.wait_until_registered("instance-1", "instance-2")
    both = {"instance-1": {"ram": LENGTH}, "instance-2": {"ram": LENGTH}}
    assert controller.lookup(FIRST) == both
    assert controller.lookup(SECOND) == {"instance-1": {"ram": LENGTH}}
    assert controller.get(f"/events/{copied['event_id']}") == copied
    controller.move(FIRST_RAM, SECOND_RAM, SECOND)
    with start(llama, second) as engine:
        check_hits(engine, oracle, llama, SECOND)
    wait_until_idle(first, second)


class Guide:
    """The walk-through of docs/controller.md with the example's files: two vLLM servers and a controller."""

    def __init__(self, folder: Path, controller: ControllerProcess, transport: str) -> None:
        self._folder = folder
        self._controller = controller
        self._transport = transport
        self.model = str(folder / "model")
        demo_model.make_model(Path(self.model))

    def serve(self, number: int) -> tuple[Server, httpx.Client]:
        """Start a vLLM server with the settings of ``instance<number>.yaml``, except ports and sizes."""
        settings = yaml.safe_load((EXAMPLES / f"instance{number}.yaml").read_text())
        settings["tiers"][0]["capacity"] = "256MiB"
        settings["peer"] |= {"listen": f"127.0.0.1:{free_port()}", "transport": self._transport}
        settings["controller"]["url"] = self._controller.url
        config = self._folder / f"instance{number}.yaml"
        config.write_text(yaml.safe_dump(settings))
        port = free_port()
        arguments = [
            "--dtype",
            "float32",
            "--kv-cache-memory-bytes",
            "256M",
            "--gpu-memory-utilization",
            "0.3",
        ]
        log = self._folder / f"vllm{number}.log"
        server = start_vllm(
            self.model, port=port, config=config, log=log, max_tokens=4096, arguments=arguments
        )
        return server, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0, trust_env=False)

    def kvtier(self, *arguments: str) -> str:
        """Run a command as in the example's README, and return its output."""
        completed = subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            env={**os.environ, "KVTIER_CONTROLLER__URL": self._controller.url},
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    def ask(self, client: httpx.Client) -> dict[str, Any]:
        body = {"model": self.model, "prompt": QUESTION, "max_tokens": 10, "temperature": 0.0}
        answer: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
        return answer

    def ask_until_stored(self, client: httpx.Client) -> dict[str, Any]:
        """Ask until an instance holds the prompt: an engine does not wait for a slow cache process."""
        answer = self.ask(client)
        tokens = self.tokenize(client)

        def is_held() -> bool:
            if not self._controller.lookup(tokens):
                client.post("/reset_prefix_cache")
                self.ask(client)
            return bool(self._controller.lookup(tokens))

        self._controller.wait_until(is_held)
        return answer

    def tokenize(self, client: httpx.Client) -> list[int]:
        body = {"model": self.model, "prompt": QUESTION}
        answer = client.post("/tokenize", json=body).raise_for_status().json()
        (self._folder / "tokens.json").write_text(json.dumps(answer))
        tokens: list[int] = answer["tokens"]
        return tokens


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.HTTPError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_walk_through_of_the_guide(
    tmp_path: Path, controller: ControllerProcess, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed")
    monkeypatch.setenv("PEER_SECRET", SECRET)
    guide = Guide(tmp_path, controller, transport)
    with ExitStack() as stack:
        clients = []
        for number in (1, 2):
            server, client = guide.serve(number)
            stack.callback(server.kill)
            stack.enter_context(client)
            server.wait_until(lambda client=client: is_healthy(client), VLLM_READY_SECONDS)
            clients.append(client)
        first, second = clients
        controller.wait_until_registered("instance-1", "instance-2")
        answer = guide.ask_until_stored(first)
        tokens = guide.tokenize(first)
        count = len(tokens)
        controller.wait_until_held(tokens, **{"instance-1": {"ram": count}})
        # Also by text, which an instance tokenizes.
        assert controller.post("/lookup", prompt=QUESTION)["num_tokens"] == count
        moved = controller.move(("instance-1", "cpu"), ("instance-2", "cpu"), tokens)
        assert (moved["state"], moved["num_tokens"], moved["chunks_done"]) == ("done", count, 1)
        assert controller.lookup(tokens) == {"instance-2": {"ram": count}}
        again = guide.ask(second)
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= count - 1
        assert f"{count} of {count} tokens hit (ram {count})" in (tmp_path / "vllm2.log").read_text()
        # Move it back with the CLI.
        file = str(tmp_path / "tokens.json")
        assert "instance-2" in guide.kvtier("lookup", "--tokens-file", file)
        output = guide.kvtier("move", "instance-2/ram", "instance-1/ram", "--tokens-file", file)
        assert output.startswith(f"{count} tokens moved (instance-2/ram -> instance-1/ram): 1 of 1 chunks")
        assert controller.lookup(tokens) == {"instance-1": {"ram": count}}
