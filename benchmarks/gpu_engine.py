"""Compare a real vLLM on a GPU with kvtier, with vLLM's own offloading, and without either.

::

    python -m benchmarks.gpu_engine                       # three servers on one GPU of 80 GB; seven minutes
    python -m benchmarks.gpu_engine --eager               # without CUDA graphs; five minutes
    python -m benchmarks.gpu_engine --tokens 8000 --systems plain,kvtier

    python -m benchmarks.gpu_engine --small               # smoke test on a CPU, with a small model

The model has the shape of Llama 3.1 8B and dummy weights in bfloat16. *Gain*: the time to first token of a
long prompt, cold and from host memory. *Cost*: new prompts at once, none of which ever hits: seconds until
all are answered, until the last first token, and between tokens. All are measured alternately.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import parse, show
from kvtier.lab.demo.client import Client, Completion
from kvtier.lab.demo.model import make_model
from kvtier.lab.demo.server import Server, start_vllm
from kvtier.lab.demo.work import GENERATED_MODEL_ARGUMENTS
from kvtier.testing.servers import free_port

HOST_BYTES = 24 << 30
READY_SECONDS = 300
AT_ONCE, PROMPT_TOKENS, NEW_TOKENS = 16, 2048, 64
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131_072,
}
LARGE_ARGUMENTS = (
    *("--load-format", "dummy", "--dtype", "bfloat16"),
    *("--kv-cache-memory-bytes", "6G", "--gpu-memory-utilization", "0.1"),
)
SMALL_ARGUMENTS = (*GENERATED_MODEL_ARGUMENTS, "--dtype", "float32")
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
}
ARGUMENTS = {
    "plain": (),
    "kvtier": (),
    "offloading": ("--kv-transfer-config", json.dumps(OFFLOADING)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a real vLLM on a GPU with and without kvtier.")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32_000, help="of a long prompt; default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile")
    parser.add_argument("--systems", default=",".join(ARGUMENTS), help="default: %(default)s")
    options = parse(parser)
    tokens = 3000 if options.small else options.tokens
    arguments, mode = SMALL_ARGUMENTS if options.small else LARGE_ARGUMENTS, "in eager mode"
    if not (options.small or options.eager):
        arguments, mode = (*arguments, "--no-enforce-eager"), "as vLLM runs by default"
    with servers(options.systems.split(","), tokens, arguments, small=options.small) as clients:
        for client in clients.values():
            client.complete(fresh_prompt("warm-up", 2500), 8)
        gain(clients, tokens, options.rounds, mode)
        cost(clients, options.rounds, mode)


def gain(clients: dict[str, Client], tokens: int, rounds: int, mode: str) -> None:
    """Measure the time to first token of a long prompt."""
    found: dict[str, list[tuple[Completion, Completion]]] = {name: [] for name in clients}
    for turn in range(rounds):
        for name in alternately(clients, turn):
            prompt = fresh_prompt(f"long {turn}", tokens)
            cold = clients[name].complete(prompt, 8)
            time.sleep(0.5)  # Copies of the last step.
            clients[name].reset_prefix_cache()
            found[name].append((cold, clients[name].complete(prompt, 8)))
            clients[name].reset_prefix_cache()
    show(
        f"time to first token of {tokens:,} tokens, {rounds} prompts, {mode}",
        ("", "cold ms", "again ms", "cached tokens", "equal"),
        [
            (
                name,
                statistics.median(cold.ttft for cold, _ in pairs) * 1e3,
                statistics.median(again.ttft for _, again in pairs) * 1e3,
                min(again.cached_tokens for _, again in pairs),
                str(all(cold.tokens == again.tokens for cold, again in pairs)),
            )
            for name, pairs in found.items()
        ],
    )


def cost(clients: dict[str, Client], rounds: int, mode: str) -> None:
    """Measure prompts that never hit, all at once."""
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
    for turn in range(-1, rounds):
        for name in alternately(clients, turn):
            prompts = [fresh_prompt(f"{name} {turn} {number}", PROMPT_TOKENS) for number in range(AT_ONCE)]
            started = time.perf_counter()
            with ThreadPoolExecutor(AT_ONCE) as pool:
                answers = list(pool.map(partial(clients[name].complete, new_tokens=NEW_TOKENS), prompts))
            seconds = time.perf_counter() - started
            gap = statistics.median(gap for answer in answers for gap in answer.gaps)
            if turn >= 0:
                rows[name].append((seconds, max(answer.ttft for answer in answers), gap))
    show(
        f"never hit: {AT_ONCE} at once, {PROMPT_TOKENS} tokens in, {NEW_TOKENS} out, {rounds} rounds, {mode}",
        ("", "s", "last first token s", "between tokens ms"),
        [
            (name, *(statistics.median(row[at] for row in found) * (1, 1, 1e3)[at] for at in range(3)))
            for name, found in rows.items()
        ],
    )


def alternately(clients: dict[str, Client], turn: int) -> list[str]:
    return sorted(clients, reverse=turn % 2 == 0)


def fresh_prompt(seed: str, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(100, 8000), k=tokens)


@contextmanager
def servers(
    names: Sequence[str], tokens: int, arguments: Sequence[str], *, small: bool
) -> Iterator[dict[str, Client]]:
    """Start a server for each system, all at the same time."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        make_model(folder / "model")
        config = folder / "model" / "config.json"
        if not small:
            config.write_text(json.dumps(json.loads(config.read_text()) | SHAPE))
        host_bytes = HOST_BYTES // 24 if small else HOST_BYTES
        settings = folder / "kvtier.yaml"
        settings.write_text(json.dumps({"tiers": [{"name": "ram", "type": "cpu", "capacity": host_bytes}]}))
        started: list[tuple[Server, Client]] = []
        for name in names:
            port = free_port()
            client = stack.enter_context(Client(port, str(folder / "model")))
            server = start_vllm(
                str(folder / "model"),
                port=port,
                config=settings if name == "kvtier" else None,
                log=folder / f"{name}.log",
                max_tokens=tokens + 128,
                arguments=[*arguments, *ARGUMENTS[name]],
                connector=name == "kvtier",
                name=f"vLLM, {name}",
            )
            stack.callback(server.kill)
            started.append((server, client))
        for server, client in started:
            server.wait_until(client.healthy, READY_SECONDS)
        yield dict(zip(names, (client for _, client in started), strict=True))


if __name__ == "__main__":
    main()
