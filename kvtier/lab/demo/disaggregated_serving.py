"""Run a prefiller, a decoder and a proxy on 127.0.0.1, each engine with its own cache process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from kvtier.bridge import client as bridge
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import Server, Servers, running_servers, start_cache, start_proxy, start_vllm
from kvtier.lab.demo.work import (
    CACHE_READY_SECONDS,
    CHUNK_TOKENS,
    SPARE_TOKENS,
    VLLM_READY_SECONDS,
    WARM_UP_TOKENS,
    Model,
    Options,
    Steps,
    Work,
    cache_answers,
    make_prompts,
    served_model,
    vllm_arguments,
)
from kvtier.testing.servers import free_port

ROLES = {"prefiller": ("prefill", "kv_producer"), "decoder": ("decode", "kv_consumer")}
"""kvtier's ``role`` and vLLM's ``kv_role`` of each engine."""
STEP = ("--max-num-batched-tokens", "1024")
"""Chunked prefill: the KV of one step is transferred during the next one."""
PROXY_READY_SECONDS = 120.0
TIMEOUT_SECONDS = 60
"""Generous, because a KV transfer is slow on a busy machine."""


@dataclass(frozen=True)
class Pushed:
    """KV transferred from the prefill instance to the decode instance."""

    tokens: int
    bytes: int
    seconds: float
    """Time during which at least one transfer was in flight."""

    @property
    def speed(self) -> float:
        """Throughput in GB/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass
class Serving:
    """The running servers, and clients for them."""

    work: Work
    prefiller: Client
    decoder: Client
    proxy: Client
    servers: Servers
    prompts: list[list[int]] = field(default_factory=list)

    def status(self, name: str) -> dict[str, Any]:
        """Return the status of a cache process. Raises :class:`kvtier.errors.ChannelError`."""
        return bridge.status(self.work.socket(name))

    def pushed(self) -> Pushed:
        """Return the KV transferred since the start."""
        kv_transfers = self.status("prefiller")["kv_transfers"]
        tokens = self.proxy.get("/stats")["transferred_tokens"]
        return Pushed(tokens, kv_transfers["pushed_bytes"], kv_transfers["pushing_seconds"])


@contextmanager
def serving(
    options: Options,
    work: Work,
    steps: Steps,
    *,
    prompts: int,
    new_tokens: int,
    transport: str = "tcp",
    memory: str = "4GiB",
) -> Iterator[Serving]:
    """Start and warm up all servers; stop them when the block exits.

    ``prompts``: number of prompts to make, of ``options.tokens`` tokens each and without overlap.
    ``memory``: capacity of each cache process. Raises :class:`DemoFailed`.
    """
    ports = {name: free_port() for name in ("prefiller", "decoder", "proxy")}
    _write_settings(work, transport, memory)
    with ExitStack() as stack:
        model = stack.enter_context(served_model(options, work, steps))
        clients = {name: stack.enter_context(Client(port, model.name)) for name, port in ports.items()}
        servers = stack.enter_context(running_servers())
        running = Serving(work, clients["prefiller"], clients["decoder"], clients["proxy"], servers)
        with steps.step("starting the cache processes"):
            for name in ROLES:
                cache = start_cache(
                    work.config(name), work.log(f"{name}-cache"), f"the {name}'s cache process"
                )
                servers.append(cache)
            for name, cache in zip(ROLES, servers, strict=True):
                cache.wait_until(partial(cache_answers, work.socket(name)), CACHE_READY_SECONDS)
        with steps.step("starting vLLM twice, as prefiller and decoder"):
            engines = {
                name: _start_engine(name, model, ports[name], options, work, new_tokens) for name in ROLES
            }
            servers += engines.values()
            for name, engine in engines.items():
                engine.wait_until(clients[name].healthy, VLLM_READY_SECONDS)
        with steps.step("starting the proxy"):
            _start_proxy(running, ports["proxy"])
        with steps.step("warming up"):
            running.prompts = make_prompts(running.decoder, options.tokens, prompts)
            for engine_client in (running.prefiller, running.decoder):
                engine_client.complete(running.prompts[0][-WARM_UP_TOKENS:], 2)
        yield running


def _write_settings(work: Work, transport: str, memory: str) -> None:
    """Write the settings of both instances, with a random shared secret."""
    secret = secrets.token_hex(32)
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ROLES}
    for name, (role, _) in ROLES.items():
        settings = {
            "role": role,
            "chunk_tokens": CHUNK_TOKENS,
            "socket": str(work.socket(name)),
            "tiers": [{"name": "ram", "type": "cpu", "capacity": memory}],
            "peer": {"listen": addresses[name], "secret": secret, "transport": transport},
            "kv_transfer": {
                "timeout": f"{TIMEOUT_SECONDS}s",
                "reserve": f"{TIMEOUT_SECONDS}s",
                "targets": [addresses["decoder"]],
            },
        }
        file = work.config(name)
        file.touch(mode=0o600)
        file.write_text(yaml.safe_dump(settings, sort_keys=False))


def _start_engine(
    name: str, model: Model, port: int, options: Options, work: Work, new_tokens: int
) -> Server:
    number = list(ROLES).index(name)
    return start_vllm(
        model.name,
        port=port,
        config=work.config(name),
        log=work.log(name),
        max_tokens=options.tokens + new_tokens + SPARE_TOKENS,
        arguments=[*STEP, *vllm_arguments(options)],
        kv_role=ROLES[name][1],
        scratch=work.sockets,
        name=f"the {name}'s vLLM",
        variables={**model.variables, **_share_of_machine(number)},
    )


def _share_of_machine(number: int) -> dict[str, str]:
    """Return environment variables that give each engine its own GPU if possible, else all CPUs to both."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if devices:
        return {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]}
    # By default, each engine would bind its threads to CPUs of its own, but mostly only one engine is busy.
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count())}


def _start_proxy(running: Serving, port: int) -> None:
    proxy = start_proxy(
        port=port,
        prefill=[running.prefiller.url],
        decode=[running.decoder.url],
        log=running.work.log("proxy"),
        arguments=["--timeout", f"{TIMEOUT_SECONDS}s"],
    )
    running.servers.append(proxy)
    proxy.wait_until(running.proxy.healthy, PROXY_READY_SECONDS)
    proxy.wait_until(lambda: _all_known(running.proxy.get("/engines")), PROXY_READY_SECONDS)


def _all_known(engines: Sequence[dict[str, Any]]) -> bool:
    """Whether both engines are up and the decoder's peer address is known."""
    return all(
        engine["state"] == "up" and (engine["role"] != "decode" or engine["peer"]) for engine in engines
    )
