"""The single-engine demo: cold, warm from memory, after a vLLM restart, and warm from disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.bridge import client as bridge
from kvtier.concurrency.processes import exit_on_signals
from kvtier.lab.demo.client import Client, Completion
from kvtier.lab.demo.server import DemoFailed, Servers, running_servers, start_cache, start_vllm
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

NEW_TOKENS = 32
STORED_SECONDS = 60.0
TIERS = {"device": "vLLM itself", "host": "memory", "disk": "disk", "p2p": "another host"}
"""Display names for vLLM's cache sources."""


def run_demo(options: Options, console: Console) -> bool:
    """Run the demo, print its results, and return whether they are as expected.

    All subprocesses are stopped, however it ends. Files are kept if the user asked for them, or a result is
    not as expected. Raises :class:`DemoFailed`.
    """
    steps = Steps(console)
    with exit_on_signals(), work_folder(options) as work:
        with served_model(options, work, steps) as model, running_servers() as servers:
            runs = _Demo(options, work, steps, model, servers).run()
        console.print(table(runs))
        found = problems(runs, (options.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
        conclude(found, work, console, "logs, settings and disk tier")
    return not found


@dataclass
class _Demo:
    options: Options
    work: Work
    steps: Steps
    model: Model
    servers: Servers
    """The cache process and the engine."""
    prompt: list[int] = field(default_factory=list)

    def run(self) -> list[Run]:
        self._write_settings()
        runs = []
        self._start_cache()
        with self._serving() as client:
            runs.append(self._measure(client, "cold"))
            self._wait_until_stored()
            with self.steps.step("emptying vLLM's own prefix cache"):
                if not client.reset_prefix_cache():
                    raise DemoFailed("vLLM did not reset its prefix cache")
            runs.append(self._measure(client, "warm from memory", "host"))
            with self.steps.step("killing vLLM (kill -9)"):
                self.servers[-1].kill()
                self.servers.pop()
        with self._serving() as client:
            runs.append(self._measure(client, "warm from memory, vLLM restarted", "host"))
            self._stop()
        self._start_cache()
        with self._serving() as client:
            runs.append(self._measure(client, "warm from disk, both restarted", "disk"))
            self._stop()
        return runs

    def _write_settings(self) -> None:
        settings = {
            "chunk_tokens": CHUNK_TOKENS,
            "socket": str(self.work.socket()),
            "tiers": [
                {"name": "ram", "type": "cpu", "capacity": "4GiB"},
                {"name": "ssd", "type": "disk", "path": str(self.work.folder / "disk"), "capacity": "16GiB"},
            ],
            "prefetch": {"policy": "timeout", "deadline": "60s"},
        }
        self.work.config().write_text(yaml.safe_dump(settings, sort_keys=False))

    def _start_cache(self) -> None:
        with self.steps.step("starting the cache process"):
            self.servers.append(cache := start_cache(self.work.config(), self.work.log("cache")))
            cache.wait_until(lambda: cache_answers(self.work.socket()), CACHE_READY_SECONDS)

    def _stop(self) -> None:
        with self.steps.step("stopping vLLM and the cache process"):
            self.servers.stop()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[Client]:
        """Start vLLM and warm it up with a prompt shorter than a chunk, so that nothing is stored."""
        port = free_port()
        with Client(port, self.model.name) as client:
            with self.steps.step("starting vLLM"):
                vllm = start_vllm(
                    self.model.name,
                    port=port,
                    config=self.work.config(),
                    log=self.work.log("vllm"),
                    max_tokens=self.options.tokens + NEW_TOKENS + SPARE_TOKENS,
                    arguments=vllm_arguments(self.options),
                    scratch=self.work.sockets,
                    variables=self.model.variables,
                )
                self.servers.append(vllm)
                vllm.wait_until(client.healthy, VLLM_READY_SECONDS)
                if not self.prompt:
                    (self.prompt,) = make_prompts(client, self.options.tokens)
                client.complete(self.prompt[-WARM_UP_TOKENS:], 2)
            yield client

    def _measure(self, client: Client, name: str, expected: str | None = None) -> Run:
        with self.steps.step(f"{name}: {self.options.tokens} tokens"):
            return Run(name, client.complete(self.prompt, NEW_TOKENS), expected)

    def _wait_until_stored(self) -> None:
        """Wait until all chunks are committed, which may be after the response."""
        chunks = self.options.tokens // CHUNK_TOKENS
        with self.steps.step(f"storing {chunks} chunks"):
            self.servers[0].wait_until(lambda: self._stored_chunks() >= chunks, STORED_SECONDS)

    def _stored_chunks(self) -> int:
        return int(bridge.status(self.work.socket())["tiers"][0]["chunks"])


@dataclass(frozen=True)
class Run:
    """One of the four requests. ``expected``: the source that must have supplied the prompt's KV, if any."""

    name: str
    completion: Completion
    expected: str | None = None


def problems(runs: Sequence[Run], min_hit: int) -> list[str]:
    """Return one sentence for each result that is not as expected."""
    found = []
    cold = runs[0].completion
    for run in runs[1:]:
        completion = run.completion
        supplied = completion.sources.get(run.expected or "", 0)
        if completion.cached_tokens < min_hit:
            found.append(f"{run.name}: {completion.cached_tokens} tokens hit, {min_hit} expected")
        elif supplied < min_hit:
            source = TIERS.get(run.expected or "", "")
            found.append(f"{run.name}: {supplied} tokens came from {source}, {min_hit} expected")
        if completion.tokens != cold.tokens:
            found.append(f"{run.name}: its tokens differ from the cold run's")
    if cold.cached_tokens:
        found.append(f"{runs[0].name}: {cold.cached_tokens} tokens hit, 0 expected")
    return found


def table(runs: Sequence[Run]) -> Table:
    """Return a table with one row per run."""
    cold = runs[0].completion
    shown = Table(box=box.ROUNDED, header_style="bold")
    shown.add_column("run")
    for title in ("tokens", "hit tokens"):
        shown.add_column(title, justify="right")
    shown.add_column("source tier")
    for title in ("TTFT", "speed-up"):
        shown.add_column(title, justify="right")
    shown.add_column("tokens identical")
    for run in runs:
        completion = run.completion
        same = completion.tokens == cold.tokens
        sources = [TIERS.get(source, source) for source, count in completion.sources.items() if count]
        shown.add_row(
            run.name,
            f"{completion.prompt_tokens:,}",
            f"{completion.cached_tokens:,}",
            " + ".join(sources) or "-",
            f"{completion.ttft:.2f} s",
            "-" if run is runs[0] else f"{cold.ttft / completion.ttft:.1f} x",
            "-" if run is runs[0] else ("[green]yes[/]" if same else "[red]no[/]"),
        )
    return shown
