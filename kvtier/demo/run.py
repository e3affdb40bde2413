"""The demo from beginning to end."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from types import FrameType

import httpx
import yaml
from rich.console import Console

from kvtier.bridge import client as bridge
from kvtier.demo import report
from kvtier.demo.client import Client
from kvtier.demo.model import is_model, make_model, prompt_text
from kvtier.demo.server import DemoFailed, Server, free_port, start_cache, start_vllm
from kvtier.errors import ChannelError

CHUNK_TOKENS = 256
NEW_TOKENS = 32
SPARE_TOKENS = 64
WARM_UP_TOKENS = 32
"""Fewer than a chunk, so that nothing of the request before the measured one is stored."""
VLLM_READY_SECONDS = 600.0
CACHE_READY_SECONDS = 30.0
STORED_SECONDS = 60.0
LOCAL_MODEL_ARGUMENTS = ("--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.3")
"""The small model needs 2 GB, and vLLM starts only where all that it may take is free."""


@dataclass(frozen=True)
class Options:
    """What the command line may choose."""

    model: str | None = None
    """A model's folder or name; ``None`` makes one."""
    tokens: int = 6000
    """Length of the prompt."""
    work_dir: Path | None = None
    """Where the model, logs and the disk tier go; ``None`` for a temporary folder."""
    keep: bool = False
    """Leave logs and disk tier behind."""
    dtype: str = "float32"
    """In narrower types near-ties flip with the shape of a batch, with or without a cache."""
    vllm_arguments: Sequence[str] = ()


def run_demo(options: Options, console: Console) -> bool:
    """Run the demo and print what it finds; whether it found what it should.

    Raises :class:`DemoFailed`. However it ends, no process of it is left, and no file unless asked for.
    """
    with _ends_on_signals(), _work_folder(options) as work:
        demo = _Demo(options, work, report.Steps(console))
        try:
            runs = demo.run()
        except (httpx.HTTPError, ChannelError) as error:
            raise demo.failure(error) from error
        finally:
            demo.kill()
        console.print(report.table(runs))
        found = report.problems(runs, (options.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
        for problem in found:
            console.print(f"[red]✗[/] {problem}", highlight=False)
        if options.keep:
            console.print(f"logs, settings and disk tier: {work.folder}", highlight=False)
    return not found


@dataclass(frozen=True)
class _Work:
    """Where everything of one demo lies."""

    model: Path
    folder: Path
    socket: Path

    @property
    def config(self) -> Path:
        return self.folder / "kvtier.yaml"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@dataclass
class _Demo:
    options: Options
    work: _Work
    steps: report.Steps
    vllm: Server | None = None
    cache: Server | None = None
    prompt: list[int] = field(default_factory=list)

    def run(self) -> list[report.Run]:
        model = self._model()
        self._write_settings()
        runs = []
        self._start_cache()
        with self._serving(model) as client:
            runs.append(self._measure(client, "cold"))
            self._wait_until_stored()
            with self.steps.step("emptying vLLM's own prefix cache"):
                if not client.reset_prefix_cache():
                    raise DemoFailed("vLLM would not empty its prefix cache")
            runs.append(self._measure(client, "warm from memory", "host"))
            self._kill_vllm()
        with self._serving(model) as client:
            runs.append(self._measure(client, "warm from memory, vLLM restarted", "host"))
            with self.steps.step("stopping vLLM and the cache process"):
                self.stop()
        self._start_cache()
        with self._serving(model) as client:
            runs.append(self._measure(client, "warm from disk, both restarted", "disk"))
            with self.steps.step("stopping vLLM and the cache process"):
                self.stop()
        return runs

    def stop(self) -> None:
        """Stop whatever runs, the engine first, as its cache process outlives it."""
        for server in (self.vllm, self.cache):
            if server is not None:
                server.stop()
        self.vllm = self.cache = None

    def kill(self) -> None:
        """End whatever still runs, at once."""
        for server in (self.vllm, self.cache):
            if server is not None:
                server.kill()

    def failure(self, error: Exception) -> DemoFailed:
        """An error of a call to one of the servers, told with that server's log."""
        server = self.cache if isinstance(error, ChannelError) else self.vllm
        if server is None:
            return DemoFailed(str(error))
        return server.failure(f"did not answer as it should ({error})")

    def _model(self) -> str:
        if self.options.model is not None:
            return self.options.model
        if not is_model(self.work.model):
            with self.steps.step("making a model of 100 M parameters"):
                make_model(self.work.model)
        return str(self.work.model)

    def _write_settings(self) -> None:
        settings = {
            "chunk_tokens": CHUNK_TOKENS,
            "socket": str(self.work.socket),
            "tiers": [
                {"name": "ram", "type": "cpu", "capacity": "4GiB"},
                {"name": "ssd", "type": "disk", "path": str(self.work.folder / "disk"), "capacity": "16GiB"},
            ],
            "prefetch": {"policy": "timeout", "deadline": "60s"},
        }
        self.work.config.write_text(yaml.safe_dump(settings, sort_keys=False))

    def _start_cache(self) -> None:
        with self.steps.step("starting the cache process"):
            self.cache = start_cache(self.work.config, self.work.log("cache"))
            self.cache.wait_until(self._cache_answers, CACHE_READY_SECONDS)

    def _cache_answers(self) -> bool:
        try:
            bridge.status(self.work.socket)
        except ChannelError:
            return False
        return True

    @contextlib.contextmanager
    def _serving(self, model: str) -> Iterator[Client]:
        """vLLM, started and warmed up with a prompt that is too short to be stored."""
        arguments = ["--dtype", self.options.dtype, *self.options.vllm_arguments]
        if self.options.model is None:
            arguments = [*LOCAL_MODEL_ARGUMENTS, *arguments]
        port = free_port()
        with Client(port, model) as client:
            with self.steps.step("starting vLLM"):
                self.vllm = start_vllm(
                    model,
                    port=port,
                    config=self.work.config,
                    log=self.work.log("vllm"),
                    max_tokens=self.options.tokens + NEW_TOKENS + SPARE_TOKENS,
                    arguments=arguments,
                    scratch=self.work.socket.parent,
                )
                self.vllm.wait_until(client.healthy, VLLM_READY_SECONDS)
                if not self.prompt:
                    self.prompt = self._make_prompt(client)
                client.complete(self.prompt[-WARM_UP_TOKENS:], 2)
            yield client

    def _make_prompt(self, client: Client) -> list[int]:
        tokens = client.tokenize(prompt_text())
        if len(tokens) < self.options.tokens:
            raise DemoFailed(f"--tokens: the demo's text has {len(tokens)} tokens, write at most that")
        return tokens[: self.options.tokens]

    def _measure(self, client: Client, name: str, expected: str | None = None) -> report.Run:
        with self.steps.step(f"{name}: {self.options.tokens} tokens"):
            return report.Run(name, client.complete(self.prompt, NEW_TOKENS), expected)

    def _wait_until_stored(self) -> None:
        """An answer comes before its last chunks are committed."""
        chunks = self.options.tokens // CHUNK_TOKENS
        assert self.cache is not None
        with self.steps.step(f"storing {chunks} chunks"):
            self.cache.wait_until(lambda: self._stored_chunks() >= chunks, STORED_SECONDS)

    def _stored_chunks(self) -> int:
        return int(bridge.status(self.work.socket)["tiers"][0]["chunks"])

    def _kill_vllm(self) -> None:
        with self.steps.step("killing vLLM (kill -9)"):
            assert self.vllm is not None
            self.vllm.kill()


@contextlib.contextmanager
def _work_folder(options: Options) -> Iterator[_Work]:
    """Folders for one demo, removed at the end but for what the user chose to keep."""
    with contextlib.ExitStack() as stack:
        # Not in the work folder: a socket's path may only be 107 bytes long.
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-"))
        if options.work_dir is not None:
            base = options.work_dir.expanduser().resolve()
            base.mkdir(parents=True, exist_ok=True)
        else:
            base = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
            if not options.keep:
                stack.callback(rmtree, base, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
        if not options.keep:
            stack.callback(rmtree, folder, ignore_errors=True)
        yield _Work(base / "model", folder, Path(sockets) / "kvtier.sock")


@contextlib.contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that every server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
