"""``kvtier demo --disaggregated``: compare a prefiller and a decoder behind a proxy with a single engine.

All run on 127.0.0.1, each engine with its own cache process. The single engine is the decoder, used directly:
it gets the same prompts with a salt, so that neither way hits cache entries of the other.
"""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.bridge import client as bridge
from kvtier.concurrency.processes import exit_on_signals
from kvtier.lab.demo.client import Client, Completion
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
    conclude,
    make_prompts,
    served_model,
    vllm_arguments,
    work_folder,
)
from kvtier.testing.servers import free_port

PROMPTS = 3
"""Prompts sent sequentially."""
NEW_TOKENS = 32
CONCURRENT_TOKENS = 96
"""Tokens of the response that is decoded while another prompt is prefilled."""
STARTED_TOKENS = 8
"""The other prompt is sent after this many of them."""
SALT = "one engine"
ROLES = {"prefiller": ("prefill", "kv_producer"), "decoder": ("decode", "kv_consumer")}
"""kvtier's ``role`` and vLLM's ``kv_role`` of each engine."""
STEP = ("--max-num-batched-tokens", "1024")
"""Chunked prefill: the KV of one step is transferred during the next one."""
PROXY_READY_SECONDS = 120.0
TIMEOUT_SECONDS = 60
"""Generous, because a KV transfer is slow on a busy machine."""


def run_disaggregated(options: Options, console: Console) -> bool:
    """Run the demo, print its results, and return whether they are as expected.

    All subprocesses are stopped, however it ends. Files are kept if the user asked for them, or a result is
    not as expected. Raises :class:`kvtier.lab.demo.server.DemoFailed`.
    """
    with exit_on_signals(), work_folder(options) as work:
        steps = Steps(console)
        with serving(options, work, steps, prompts=PROMPTS + 2, new_tokens=CONCURRENT_TOKENS) as running:
            result = _measure(running, steps)
            with steps.step("stopping all processes"):
                running.servers.stop()
        console.print(table(result))
        found = problems(result)
        conclude(found, work, console, "logs and settings")
    return not found


def _measure(running: Serving, steps: Steps) -> Result:
    alone: list[Completion] = []
    together: list[Completion] = []
    # Interleaved, so that other load on the machine affects both alike.
    for number, prompt in enumerate(running.prompts[:PROMPTS], 1):
        with steps.step(f"prompt {number} of {PROMPTS}, {len(prompt):,} tokens: one engine"):
            alone.append(running.decoder.complete(prompt, NEW_TOKENS, salt=SALT))
        with steps.step(f"prompt {number} of {PROMPTS}, {len(prompt):,} tokens: prefiller and decoder"):
            together.append(running.proxy.complete(prompt, NEW_TOKENS))
    with steps.step("decoding during another prompt's prefill: one engine"):
        alone += anyio.run(_complete_concurrently, running, running.decoder, SALT)
    with steps.step("decoding during another prompt's prefill: prefiller and decoder"):
        together += anyio.run(_complete_concurrently, running, running.proxy, None)
    return Result(alone, together, PROMPTS, running.pushed())


async def _complete_concurrently(running: Serving, client: Client, salt: str | None) -> list[Completion]:
    """Complete two prompts; the second is sent while the first is being decoded."""
    completions: list[Completion | None] = [None, None]
    first, second = running.prompts[PROMPTS:]
    started = anyio.Event()

    async def complete_first() -> None:
        def on_token(count: int) -> None:
            if count >= STARTED_TOKENS:
                started.set()

        completions[0] = await client.stream(first, CONCURRENT_TOKENS, salt=salt, on_token=on_token)
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(complete_first)
        await started.wait()
        completions[1] = await client.stream(second, NEW_TOKENS, salt=salt)
    return [completion for completion in completions if completion is not None]


@dataclass(frozen=True)
class Result:
    """Completions of the same prompts in the same order, by one engine and by two.

    The first ``sequential`` prompts were sent one after the other; of the last two, the second was sent while
    the first was being decoded.
    """

    alone: list[Completion]
    together: list[Completion]
    sequential: int
    pushed: Pushed

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that the decoder did not compute."""
        return sum(completion.cached_tokens for completion in self.together)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(completion.prompt_tokens for completion in self.together)

    @property
    def identical(self) -> bool:
        """Whether both ways generated the same tokens."""
        alone = [completion.tokens for completion in self.alone]
        return alone == [completion.tokens for completion in self.together]


def problems(result: Result) -> list[str]:
    """Return one sentence for each result that is not as expected."""
    found = []
    if not result.pushed.bytes:
        found.append("no KV was transferred from the prefiller to the decoder")
    for number, (alone, together) in enumerate(zip(result.alone, result.together, strict=True), 1):
        if alone.tokens != together.tokens:
            found.append(f"prompt {number}: its tokens differ from those of one engine")
        if together.cached_tokens < together.prompt_tokens - 1:
            hit, expected = f"{together.cached_tokens:,}", f"{together.prompt_tokens - 1:,}"
            found.append(f"prompt {number}: {hit} tokens hit at the decoder, {expected} expected")
        if alone.cached_tokens:
            hit = f"{alone.cached_tokens:,}"
            found.append(f"prompt {number}: {hit} tokens hit at one engine, 0 expected")
    return found


def table(result: Result) -> Table:
    """Return a table that compares both ways."""
    shown = Table(box=box.ROUNDED, header_style="bold", caption_justify="left", caption=_caption(result))
    shown.add_column("run")
    for title in ("TTFT", "between tokens", "longest pause", "tokens pushed", "hit tokens", "GB/s"):
        shown.add_column(title, justify="right")
    shown.add_column("identical")
    same = "[green]yes[/]" if result.identical else "[red]no[/]"
    shown.add_row("one engine", *_times(result.alone, result.sequential), "-", "-", "-", "-")
    shown.add_row(
        "prefiller and decoder",
        *_times(result.together, result.sequential),
        f"{result.pushed.tokens:,}",
        f"{result.hit_tokens:,}",
        f"{result.pushed.speed:.2f}",
        same,
    )
    return shown


def _caption(result: Result) -> str:
    each = result.prompt_tokens // len(result.together)
    return (
        f"{len(result.together)} prompts of {each:,} tokens. TTFT and time between tokens: medians of "
        f"{result.sequential} sequential requests. Longest pause: between two tokens of a response while "
        "another prompt was prefilled."
    )


def _times(completions: Sequence[Completion], sequential: int) -> tuple[str, str, str]:
    first = completions[:sequential]
    between = [gap for completion in first for gap in completion.gaps]
    return (
        f"{statistics.median(completion.ttft for completion in first):.2f} s",
        f"{statistics.median(between) * 1e3:.1f} ms",
        f"{max(completions[sequential].gaps) * 1e3:,.0f} ms",
    )


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
            for name in ROLES:
                servers.append(_start_engine(name, model, ports[name], options, work, new_tokens))
            for name, engine in zip(ROLES, servers[-len(ROLES) :], strict=True):
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
